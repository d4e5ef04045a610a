"""Rows per second of a stream, from Spark's tasks into TensorFlow, against the same frame read by the tasks alone.

    ./run bench stream [--rows 2000000] [--turns 5]

The frame is a Parquet file of 20 float32 columns and an int64 label in two partitions, on a local Spark cluster of two
executors. The tasks alone (``mapInArrow`` in barrier tasks, which is how a stream arrives) count the rows that Spark
hands to them: the limit. Of the stream, training processes draw every batch (global batch 4096) with TensorFlow, once
in the order of arrival and once mixed. The clock is each worker's, from its first row asked to its last; the slower
worker counts. The contenders take turns; the first turn does not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peers import print_table, spark_cluster
from pyspark.sql import DataFrame

from tfdist import ComputeConfig
from tfdist.data import stream
from tfdist.data.dealt import Dealt
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id
from tfdist.train.gang import launch

BATCH = 4096
WORKERS = 2


def write(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    for part in range(WORKERS):
        n = rows // WORKERS
        columns = {f"x{i}": rng.random(n, np.float32) for i in range(20)} | {"label": rng.integers(0, 2, n)}
        pq.write_table(pa.table(columns), folder / f"part-{part}.parquet", row_group_size=2**17)


def by_tasks(frame: DataFrame) -> tuple[int, float]:
    """Rows, and seconds of the slower task."""

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        start, rows = time.perf_counter(), sum(batch.num_rows for batch in batches)
        yield pa.record_batch({"rows": [rows], "seconds": [time.perf_counter() - start]})

    found = frame.mapInArrow(count, "rows long, seconds double", barrier=True).collect()
    return sum(row.rows for row in found), max(row.seconds for row in found)


def draw(dealt: Dealt, shuffle: Any) -> bytes:
    """In a training process: rows drawn, and the seconds that it took."""
    import tensorflow as tf

    batches = dealt.to_tf(global_batch=BATCH, shuffle=shuffle)
    steps = dealt.steps(BATCH)

    @tf.function
    def rows_of(dataset: Any) -> Any:
        return dataset.take(steps).reduce(np.int64(0), lambda rows, batch: rows + tf.size(batch[1], tf.int64))

    start = time.perf_counter()
    rows = int(rows_of(batches))
    return json.dumps([rows, time.perf_counter() - start]).encode()


def by_stream(frame: DataFrame, shuffle: Any) -> tuple[int, float]:
    """Rows, and seconds of the slower worker."""
    compute = ComputeConfig(slots=WORKERS, threads_per_worker=1)
    dealt, handed = stream(frame, label="label").dealt(WORKERS, BATCH, 1)
    program = dump_program(partial(draw, dealt, shuffle), "draw")
    plan = LaunchPlan.of(compute, new_run_id(), results="all")
    found = [json.loads(text) for text in launch(program, compute, plan, frame.sparkSession, lambda _: None, handed)]
    return sum(rows for rows, _ in found), max(seconds for _, seconds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    rows = arguments.rows // WORKERS * WORKERS
    contenders: dict[str, Callable[[DataFrame], tuple[int, float]]] = {
        "tasks alone": by_tasks,
        "stream, in order": partial(by_stream, shuffle=False),
        "stream, shuffled": partial(by_stream, shuffle=True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder, spark_cluster(WORKERS) as spark:
        write(Path(folder), rows)
        spark.conf.set("spark.sql.files.openCostInBytes", str(2**30))  # a partition for each file
        spark.conf.set("spark.sql.files.maxPartitionBytes", str(2**30))
        frame = spark.read.parquet(folder)
        for turn in range(arguments.turns + 1):
            for name, contender in contenders.items():
                got, seconds = contender(frame)
                assert got == rows, f"{name}: expected {rows} rows, got {got}"
                if turn:
                    speeds[name].append(rows / seconds / 1e6)
    print_table([*speeds.items()], "M rows/s", "tasks alone")


if __name__ == "__main__":
    main()
