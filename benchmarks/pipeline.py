"""Rows per second of the data pipeline against a raw scan of the same Parquet file.

    ./run bench pipeline [--table narrow|mixed|images] [--rows N] [--turns 7] [--only WORD ...]

Both read every row once: of 20 float32 columns (narrow); of 8 float32 columns, 4 strings and lists of 64 float32
(mixed); or of byte strings of 12 KiB (images); and an int64 label. The clock starts before the reader is made; the
contenders, each a process of its own, take turns, and the median of all turns counts. CPU time is of all threads of the
process, memory the most it had over what it had before it read, the mapped part of a cache on disk included. The narrow
table is also read as the one matrix that ``pack=`` makes of its features, the images also as pixels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tfdist.data import Handle, from_parquet

Columns = dict[str, pa.Array]
Turn = tuple[float, float, float]
"""Wall seconds, CPU seconds, and the most memory so far in MiB."""

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
        others: further choices for it, by what they make of the columns.
    """

    columns: Callable[[np.random.Generator, int], Columns]
    rows: int
    row_group: int
    batches: tuple[int, ...]
    dtypes: dict[str, str]
    others: dict[str, dict[str, Any]] = field(default_factory=dict)


TABLES = {
    "narrow": Table(
        narrow, 5_000_000, 32768, (4096, 256), {}, {"one matrix": {"pack": {"x": [f"x{i}" for i in range(20)]}}}
    ),
    "mixed": Table(mixed, 500_000, 32768, (4096,), {"list": "float32[64]"}),
    "images": Table(images, 40_000, 1024, (256,), {}, {"as pixels": {"dtypes": {"image": f"uint8[{_IMAGE_BYTES}]"}}}),
}


def write(folder: Path, table: Table, rows: int) -> None:
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


def raw_scan(handle: Handle) -> int:
    """The limit: every row group decoded, by Arrow's threads."""
    file = pq.ParquetFile(handle.root / handle.manifest.fragments[0].path)
    return sum(file.read_row_group(i, use_threads=True).num_rows for i in range(file.metadata.num_row_groups))


@tf.function
def _rows(dataset: Any) -> Any:
    return dataset.reduce(np.int64(0), lambda rows, batch: rows + tf.size(batch[1], tf.int64))


def batches(dataset: Any) -> int:
    """Every batch drawn by TensorFlow in a function that was traced before, as that of ``model.fit``."""
    return int(_rows(dataset))


@dataclass(frozen=True)
class Contender:
    """One way to read a table.

    Attributes:
        way: ``raw scan``, or how tfdist reads.
        batch: rows of a batch.
        choice: for ``from_parquet``.
        title: what the choice makes of the columns.
    """

    way: str
    batch: int = 0
    choice: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.title, self.way, f"batch {self.batch}" if self.batch else "") if part)

    def reader(self, folder: Path) -> Callable[[], int]:
        """Reads all rows: files with a new reader each time, a cache again, as over the epochs of a training."""
        handle = from_parquet(folder, label="label", **self.choice)
        options = {
            "in order": {"shuffle": False},
            "pool": {"shuffle": "pool"},
            "from the cache, in order": {"shuffle": False, "cache": True},
            "from the cache, shuffled": {},
        }
        if self.way == "raw scan":
            return partial(raw_scan, handle)
        if "cache" in self.way:
            return partial(batches, handle.to_tf(global_batch=self.batch, **options[self.way]))
        return lambda: batches(handle.to_tf(global_batch=self.batch, **options[self.way]))


WAYS = ("in order", "pool", "from the cache, in order", "from the cache, shuffled")


def contenders_of(table: Table) -> list[Contender]:
    contenders = [Contender("raw scan", choice={"dtypes": table.dtypes})]
    contenders += [Contender(way, batch, {"dtypes": table.dtypes}) for batch in table.batches for way in WAYS]
    contenders += [
        Contender(way, table.batches[0], choice, title) for title, choice in table.others.items() for way in WAYS
    ]
    return contenders


def serve(turns: Connection, contender: Contender, folder: Path, rows: int) -> None:
    """The process of a contender: a turn for each request. The first warms the page cache and TensorFlow."""
    read = contender.reader(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measure(read, rows)
    turns.send(None)
    while turns.recv():
        took = measure(read, rows)
        turns.send((*took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


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


def take_turns(contenders: Sequence[Contender], folder: Path, rows: int, turns: int) -> list[list[Turn]]:
    """The turns of each contender, which are processes of their own and wait while another reads."""
    spawn = multiprocessing.get_context("spawn")
    children = []
    for contender in contenders:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, contender, folder, rows), daemon=True)
        process.start()
        ours.recv()
        children.append((process, ours))
    taken: list[list[Turn]] = [[] for _ in contenders]
    for _ in range(turns):
        for (_, child), own in zip(children, taken, strict=True):
            child.send(True)
            own.append(child.recv())
    for process, child in children:
        child.send(False)
        process.join()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=[*TABLES], default="narrow")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="*", metavar="WORD", help="contenders whose names have one of these words")
    arguments = parser.parse_args()
    table = TABLES[arguments.table]
    rows = arguments.rows or table.rows
    contenders = contenders_of(table)
    contenders = contenders[:1] + [
        c for c in contenders[1:] if not arguments.only or any(word in c.name for word in arguments.only)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), table, rows)
        taken = take_turns(contenders, Path(folder), rows, arguments.turns)
    print(f"{rows:,} rows, row groups of {table.row_group:,}, median of {arguments.turns} turns")
    print(f"{'':48} {'M rows/s':>9} {'range':>17} {'CPU ns/row':>11} {'MiB':>6} {'of raw scan':>12}")
    raw = statistics.median(wall for wall, *_ in taken[0])
    for contender, turns in zip(contenders, taken, strict=True):
        walls = sorted(wall for wall, *_ in turns)
        wall, cpu = statistics.median(walls), statistics.median(cpu for _, cpu, _ in turns)
        speeds = [rows / w / 1e6 for w in (wall, walls[-1], walls[0])]
        span = f"{speeds[1]:.3f} - {speeds[2]:.3f}"
        mib = max(mib for *_, mib in turns)
        print(f"{contender.name:48} {speeds[0]:9.3f} {span:>17} {cpu / rows * 1e9:11.1f} {mib:6.0f} {raw / wall:12.2f}")
    if arguments.table != "narrow" or arguments.only:
        return
    with tempfile.TemporaryDirectory() as folder:
        sorted_rows = pa.table({"x": np.zeros(rows, np.float32), "row": np.arange(rows)})
        pq.write_table(sorted_rows, Path(folder) / "part.parquet", row_group_size=table.row_group)
        quality = spread(from_parquet(folder, label="row"), 4096)
    print(f"spread of the means of shuffled batches of sorted rows over the ideal: {quality:.2f}")


if __name__ == "__main__":
    main()
