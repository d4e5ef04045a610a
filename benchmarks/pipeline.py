"""Rows per second of the data pipeline against a raw scan of the same Parquet file.

Both read every row of 20 float32 columns and one int64 column once. The clock starts before the reader is made; the
contenders take turns, and the median of all turns counts. CPU time is of the whole process, all threads.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tfdist.data import Handle, from_parquet

COLUMNS = 20


def write(folder: Path, rows: int, row_group: int) -> Handle:
    rng = np.random.default_rng(0)
    names = [*(f"x{i}" for i in range(COLUMNS)), "label"]
    schema = pa.schema([(name, pa.float32()) for name in names[:-1]] + [("label", pa.int64())])
    with pq.ParquetWriter(folder / "part.parquet", schema, compression="snappy", use_dictionary=False) as writer:
        for start in range(0, rows, row_group):
            n = min(row_group, rows - start)
            columns = [rng.random(n, np.float32) for _ in range(COLUMNS)]
            writer.write_table(pa.table([*columns, rng.integers(0, 2, n)], schema=schema), row_group_size=row_group)
    return from_parquet(folder, label="label")


def raw_scan(handle: Handle) -> int:
    """The limit: every row group decoded, by Arrow's threads."""
    file = pq.ParquetFile(handle.root / handle.manifest.fragments[0].path)
    return sum(file.read_row_group(i, use_threads=True).num_rows for i in range(file.metadata.num_row_groups))


Contender = Callable[[], int]


@tf.function
def _rows(dataset: Any) -> Any:
    return dataset.reduce(np.int64(0), lambda rows, batch: rows + tf.size(batch[1], tf.int64))


def batches(dataset: Any) -> int:
    """Every batch drawn by TensorFlow in a function that was traced before, as that of ``model.fit``."""
    return int(_rows(dataset))


def contenders_of(handle: Handle, batch: int) -> dict[str, Contender]:
    """From the files the reader is made anew each time; from the cache it stays, as over the epochs of a training."""
    filled: dict[str, Any] = {
        "from the cache, in order": handle.to_tf(global_batch=batch, shuffle=False, cache=True),
        "from the cache, shuffled": handle.to_tf(global_batch=batch),
    }
    return {
        "in order": lambda: batches(handle.to_tf(global_batch=batch, shuffle=False)),
        "pool": lambda: batches(handle.to_tf(global_batch=batch, shuffle="pool")),
        **{name: partial(batches, dataset) for name, dataset in filled.items()},
    }


def spread(handle: Handle, batch: int) -> float:
    """How much more the means of shuffled batches of sorted rows spread than those of a perfect shuffle."""
    means = [float(tf.reduce_mean(tf.cast(label, tf.float64))) for _, label in handle.to_tf(global_batch=batch)]
    return float(np.std(means[:-1]) / (handle.rows / np.sqrt(12 * batch)))


def measure(contender: Callable[[], int], rows: int) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    got = contender()
    assert got == rows, f"expected {rows} rows, got {got}"
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--row-group", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        handle = write(Path(folder), arguments.rows, arguments.row_group)
        contenders: dict[str, Contender] = {"raw scan": lambda: raw_scan(handle)}
        for batch in (4096, 256):
            contenders |= {f"{name}, batch {batch}": call for name, call in contenders_of(handle, batch).items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for turn in range(arguments.turns + 1):
            for name, contender in contenders.items():
                took = measure(contender, arguments.rows)
                if turn:  # the first warms the page cache and TensorFlow
                    times[name].append(took)
        peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{arguments.rows:,} rows, row groups of {arguments.row_group:,}, median of {arguments.turns} turns")
    print(f"{'':36} {'M rows/s':>9} {'range':>15} {'CPU ns/row':>11} {'of raw scan':>12}")
    raw = statistics.median(wall for wall, _ in times["raw scan"])
    for name, took in times.items():
        walls = sorted(wall for wall, _ in took)
        wall, cpu = statistics.median(walls), statistics.median(c for _, c in took)
        speeds = [arguments.rows / w / 1e6 for w in (wall, walls[-1], walls[0])]
        span = f"{speeds[1]:.1f} - {speeds[2]:.1f}"
        print(f"{name:36} {speeds[0]:9.2f} {span:>15} {cpu / arguments.rows * 1e9:11.1f} {raw / wall:12.2f}")
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"x": np.zeros(arguments.rows, np.float32), "row": np.arange(arguments.rows)})
        pq.write_table(table, Path(folder) / "part.parquet", row_group_size=arguments.row_group)
        quality = spread(from_parquet(folder, label="row"), 4096)
    print(f"spread of the means of shuffled batches of sorted rows over the ideal: {quality:.2f}")
    print(f"peak memory over the start, all contenders: {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
