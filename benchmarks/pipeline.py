"""Rows per second of the data pipeline against a raw scan of the same Parquet file.

    ./run bench pipeline [--table narrow|mixed|images] [--rows N] [--turns 5]

Both read every row once: of 20 float32 columns (narrow); of 8 float32 columns, 4 strings and lists of 64 float32
(mixed); or of byte strings of 12 KiB (images); and an int64 label. The clock starts before the reader is made; the
contenders take turns, and the median of all turns counts. CPU time is of the whole process, all threads. The narrow
table is also read as the one matrix that ``pack=`` makes of its features, the images also as pixels.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tfdist.data import Handle, from_parquet

Columns = dict[str, pa.Array]

_IMAGE_BYTES = 12 * 1024


def narrow(rng: np.random.Generator, rows: int) -> Columns:
    return {f"x{i}": pa.array(rng.random(rows, np.float32)) for i in range(20)}


def mixed(rng: np.random.Generator, rows: int) -> Columns:
    """Three of the strings repeat, as names of places and products do; the fourth is different in each row."""
    lists = pa.ListArray.from_arrays(
        np.arange(0, 64 * rows + 1, 64, dtype=np.int32), pa.array(rng.random(64 * rows, np.float32))
    )
    texts = {f"s{n}": pa.array([f"value {i}" for i in rng.integers(0, n, rows)]) for n in (10, 100, 1000)}
    own = pa.array([f"{i:016x}" for i in rng.integers(0, 2**62, rows)])
    return {**{f"x{i}": pa.array(rng.random(rows, np.float32)) for i in range(8)}, **texts, "own": own, "list": lists}


def images(rng: np.random.Generator, rows: int) -> Columns:
    return {"image": pa.array([rng.bytes(_IMAGE_BYTES) for _ in range(rows)])}


@dataclass(frozen=True)
class Table:
    """What is read.

    Attributes:
        columns: makes them, without the label.
        rows: how many, where the command line does not say.
        row_group: rows of a row group.
        batches: global batches to measure.
        dtypes: for ``from_parquet``.
    """

    columns: Callable[[np.random.Generator, int], Columns]
    rows: int
    row_group: int
    batches: tuple[int, ...]
    dtypes: dict[str, str]


TABLES = {
    "narrow": Table(narrow, 5_000_000, 32768, (4096, 256), {}),
    "mixed": Table(mixed, 500_000, 32768, (4096,), {"list": "float32[64]"}),
    "images": Table(images, 40_000, 1024, (256,), {}),
}


def write(folder: Path, table: Table, rows: int) -> Handle:
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, table.row_group):
        n = min(table.row_group, rows - start)
        columns = table.columns(rng, n) | {"label": pa.array(rng.integers(0, 2, n))}
        part = pa.table(columns)
        if writer is None:
            texts = [name for name in columns if name in ("s10", "s100", "s1000")]
            writer = pq.ParquetWriter(
                folder / "part.parquet", part.schema, compression="snappy", use_dictionary=texts or False
            )
        writer.write_table(part, row_group_size=table.row_group)
    if writer is not None:
        writer.close()
    return from_parquet(folder, label="label", dtypes=table.dtypes)


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
    parser.add_argument("--table", choices=[*TABLES], default="narrow")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    table = TABLES[arguments.table]
    rows = arguments.rows or table.rows
    with tempfile.TemporaryDirectory() as folder:
        handle = write(Path(folder), table, rows)
        contenders: dict[str, Contender] = {"raw scan": lambda: raw_scan(handle)}
        for batch in table.batches:
            contenders |= {f"{name}, batch {batch}": call for name, call in contenders_of(handle, batch).items()}
        if arguments.table == "images":
            pixels = from_parquet(folder, label="label", dtypes={"image": f"uint8[{_IMAGE_BYTES}]"})
            contenders |= {f"as pixels, {name}, batch 256": call for name, call in contenders_of(pixels, 256).items()}
        if arguments.table == "narrow":
            matrix = from_parquet(folder, label="label", pack={"x": [f"x{i}" for i in range(20)]})
            contenders |= {
                f"one matrix, {name}, batch 4096": call for name, call in contenders_of(matrix, 4096).items()
            }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for turn in range(arguments.turns + 1):
            for name, contender in contenders.items():
                took = measure(contender, rows)
                if turn:  # the first warms the page cache and TensorFlow
                    times[name].append(took)
        peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{rows:,} rows, row groups of {table.row_group:,}, median of {arguments.turns} turns")
    print(f"{'':48} {'M rows/s':>9} {'range':>17} {'CPU ns/row':>11} {'of raw scan':>12}")
    raw = statistics.median(wall for wall, _ in times["raw scan"])
    for name, took in times.items():
        walls = sorted(wall for wall, _ in took)
        wall, cpu = statistics.median(walls), statistics.median(c for _, c in took)
        speeds = [rows / w / 1e6 for w in (wall, walls[-1], walls[0])]
        span = f"{speeds[1]:.3f} - {speeds[2]:.3f}"
        print(f"{name:48} {speeds[0]:9.3f} {span:>17} {cpu / rows * 1e9:11.1f} {raw / wall:12.2f}")
    print(f"peak memory over the start, all contenders: {peak_mib:.0f} MiB")
    if arguments.table != "narrow":
        return
    with tempfile.TemporaryDirectory() as folder:
        sorted_rows = pa.table({"x": np.zeros(rows, np.float32), "row": np.arange(rows)})
        pq.write_table(sorted_rows, Path(folder) / "part.parquet", row_group_size=table.row_group)
        quality = spread(from_parquet(folder, label="row"), 4096)
    print(f"spread of the means of shuffled batches of sorted rows over the ideal: {quality:.2f}")


if __name__ == "__main__":
    main()
