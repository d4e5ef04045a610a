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
from pathlib import Path

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


def reader(handle: Handle, batch: int, shuffle: bool) -> int:
    """The part before TensorFlow."""
    from tfdist.data.reader import Blocks, Reading

    blocks = Blocks(Reading(handle.manifest, batch, shuffle=shuffle), 0)
    return sum(blocks[i].steps * blocks[i].rows for i in range(len(blocks)))


def pipeline(handle: Handle, batch: int, shuffle: bool) -> int:
    """Every batch drawn by TensorFlow, as the traced step of ``model.fit`` draws them."""
    dataset = handle.to_tf(global_batch=batch, shuffle=shuffle)
    return int(dataset.reduce(np.int64(0), lambda rows, batch: rows + tf.size(batch[1], tf.int64)))


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
    parser.add_argument("--stages", action="store_true", help="also the part before TensorFlow")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        handle = write(Path(folder), arguments.rows, arguments.row_group)
        contenders: dict[str, Callable[[], int]] = {"raw scan": lambda: raw_scan(handle)}
        for batch in (4096, 256):
            for shuffle, order in ((False, "in order"), (True, "shuffled")):
                if arguments.stages:
                    contenders[f"reader, {order}, {batch}"] = lambda b=batch, s=shuffle: reader(handle, b, s)
                contenders[f"{order}, batch {batch}"] = lambda b=batch, s=shuffle: pipeline(handle, b, s)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for turn in range(arguments.turns + 1):
            for name, contender in contenders.items():
                took = measure(contender, arguments.rows)
                if turn:  # the first warms the page cache and TensorFlow
                    times[name].append(took)
        peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{arguments.rows:,} rows, row groups of {arguments.row_group:,}, median of {arguments.turns} turns")
    print(f"{'':28} {'M rows/s':>9} {'range':>15} {'CPU ns/row':>11} {'of raw scan':>12}")
    raw = statistics.median(wall for wall, _ in times["raw scan"])
    for name, took in times.items():
        walls = sorted(wall for wall, _ in took)
        wall, cpu = statistics.median(walls), statistics.median(c for _, c in took)
        speeds = [arguments.rows / w / 1e6 for w in (wall, walls[-1], walls[0])]
        span = f"{speeds[1]:.1f} - {speeds[2]:.1f}"
        print(f"{name:28} {speeds[0]:9.2f} {span:>15} {cpu / arguments.rows * 1e9:11.1f} {raw / wall:12.2f}")
    print(f"peak memory over the start, all contenders: {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
