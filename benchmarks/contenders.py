"""The contenders of pipeline_peers.py. Each runs in a process of its own, under the Python of its environment.

    python contenders.py prepare NAME FOLDER    makes the files that the contender reads, from FOLDER/table
    python contenders.py serve NAME FOLDER      answers each line of standard input with a line of JSON

Nothing is imported before it is known whose turn it is, for no environment has the packages of all.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

BATCH = 4096
COLUMNS = tuple(f"x{i}" for i in range(20))
FIELDS = (*COLUMNS, "label")
TURN_SECONDS = 1.0  # a turn of a fast contender is several passes

Pass = Callable[..., int]  # reads every row once, with a setting as keywords, and returns how many it was


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        title: its first cell.
        environment: folder of its virtual environment among the peers'; "" for tfdist's own.
        packages: distributions whose releases are printed.
        imports: modules that are loaded before the memory is first looked at.
        open: what is done once, outside the clock; takes the folder.
        settings: keywords for the pass; the fastest in the first turn, which does not count, are kept.
        prepare: makes files beside the table, once, outside the clock; takes the folder.
    """

    title: str
    environment: str
    packages: tuple[str, ...]
    imports: tuple[str, ...]
    open: Callable[[Path], Pass]
    settings: tuple[dict[str, Any], ...] = ({},)
    prepare: Callable[[Path], None] | None = None


@functools.cache
def _drawing() -> Callable[[Any], Any]:
    import numpy as np
    import tensorflow as tf

    def label(batch: Any) -> Any:
        if hasattr(batch, "label"):
            return batch.label
        return batch["label"] if isinstance(batch, dict) else batch[1]

    return tf.function(
        lambda dataset: dataset.reduce(np.int64(0), lambda rows, batch: rows + tf.size(label(batch), tf.int64))
    )


def count(dataset: Any) -> int:
    """Every batch drawn by TensorFlow in a function that was traced before, as that of ``model.fit``."""
    return int(_drawing()(dataset))


def raw_scan(folder: Path) -> Pass:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)

    def scan() -> int:
        file = pq.ParquetFile(folder / "table" / "part.parquet")
        return sum(file.read_row_group(i, use_threads=True).num_rows for i in range(file.metadata.num_row_groups))

    return scan


def tfdist_in_order(folder: Path) -> Pass:
    from tfdist.data import from_parquet

    def read() -> int:
        handle = from_parquet(folder / "table", label="label")
        return count(handle.to_tf(global_batch=BATCH, shuffle=False))

    return read


def tfdist_shuffled(folder: Path) -> Pass:
    from tfdist.data import from_parquet

    dataset = from_parquet(folder / "table", label="label").to_tf(global_batch=BATCH, shuffle=True)
    count(dataset)  # the first epoch, which writes the cache
    return lambda: count(dataset)


def petastorm(folder: Path, *, rebatch: bool) -> Pass:
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    url = (folder / "table").as_uri()

    def read(**setting: Any) -> int:
        with make_batch_reader(url, num_epochs=1, shuffle_row_groups=False, **setting) as reader:
            dataset = make_petastorm_dataset(reader)
            dataset = dataset.rebatch(BATCH) if rebatch else dataset.unbatch().batch(BATCH)
            return count(dataset)

    return read


def arrow_file(folder: Path) -> Any:
    """The table as a Hugging Face dataset: an Arrow file, mapped into memory."""
    from datasets import Dataset

    return Dataset.from_parquet(str(folder / "table" / "part.parquet"), cache_dir=str(folder / "huggingface"))


def huggingface(folder: Path, *, num_workers: int) -> Pass:
    table = arrow_file(
        folder
    )  # its format is set by each pass: to_tf_dataset() empties a table in numpy's when it ends

    def read() -> int:
        dataset = table.with_format("numpy").to_tf_dataset(
            BATCH, columns=list(FIELDS), shuffle=False, num_workers=num_workers
        )
        return count(dataset)

    return read


def write_tfrecords(folder: Path, files: int = 4) -> None:
    import pyarrow.parquet as pq
    import tensorflow as tf

    (folder / "tfrecord").mkdir(exist_ok=True)
    example = tf.train.Example()
    for name in COLUMNS:
        example.features.feature[name].float_list.value.append(0.0)
    example.features.feature["label"].int64_list.value.append(0)
    values = [example.features.feature[name].float_list.value for name in COLUMNS]
    values.append(example.features.feature["label"].int64_list.value)
    table = pq.read_table(folder / "table")
    share = math.ceil(table.num_rows / files)
    for number in range(files):
        columns = [table.slice(number * share, share)[name].to_pylist() for name in FIELDS]
        with tf.io.TFRecordWriter(str(folder / "tfrecord" / f"{number}.tfrecord")) as writer:
            for row in zip(*columns, strict=True):
                for value, number_of_row in zip(values, row, strict=True):
                    value[0] = number_of_row
                writer.write(example.SerializeToString())


def tfrecord(folder: Path) -> Pass:
    import tensorflow as tf

    files = sorted(str(path) for path in (folder / "tfrecord").iterdir())
    features: dict[str, Any] = {name: tf.io.FixedLenFeature((), tf.float32) for name in COLUMNS}
    features["label"] = tf.io.FixedLenFeature((), tf.int64)
    options = tf.data.Options()
    options.deterministic = False

    def read(num_parallel_reads: int) -> int:
        dataset = tf.data.TFRecordDataset(files, num_parallel_reads=num_parallel_reads).batch(BATCH)
        dataset = dataset.map(lambda rows: tf.io.parse_example(rows, features), num_parallel_calls=tf.data.AUTOTUNE)
        return count(dataset.prefetch(tf.data.AUTOTUNE).with_options(options))

    return read


def tensor_slices(folder: Path) -> Pass:
    import pyarrow.parquet as pq
    import tensorflow as tf

    table = pq.read_table(folder / "table")
    tensors = {name: tf.constant(table[name].to_numpy()) for name in FIELDS}
    return lambda: count(tf.data.Dataset.from_tensor_slices(tensors).batch(BATCH))


_TFDIST = ("", ("tensorflow-cpu", "pyarrow", "numpy"), ("tensorflow", "tfdist.data.pipeline", "tfdist.data.footers"))
_TENSORFLOW = ("", ("tensorflow-cpu",), ("tensorflow", "pyarrow.parquet"))
_PETASTORM = (
    "petastorm",
    ("petastorm", "pyarrow", "tensorflow-cpu", "pandas", "numpy"),
    ("tensorflow", "petastorm", "petastorm.tf_utils"),
)
_DATASETS = ("datasets", ("datasets", "pyarrow", "tensorflow-cpu", "numpy"), ("tensorflow", "datasets"))
_WORKERS = tuple({"workers_count": n, "convert_early_to_numpy": early} for early in (False, True) for n in (2, 3, 4))

CONTENDERS = {
    "raw": Contender("pyarrow, raw scan, 2 threads", "", ("pyarrow",), ("pyarrow.parquet",), raw_scan),
    "tfdist": Contender("tfdist, in order", *_TFDIST, tfdist_in_order),
    "tfdist-shuffled": Contender("tfdist, shuffled, after the first epoch", *_TFDIST, tfdist_shuffled),
    "petastorm": Contender("petastorm, unbatch().batch()", *_PETASTORM, partial(petastorm, rebatch=False), _WORKERS),
    "petastorm-rebatch": Contender("petastorm, rebatch()", *_PETASTORM, partial(petastorm, rebatch=True), _WORKERS),
    "datasets": Contender("Hugging Face datasets", *_DATASETS, partial(huggingface, num_workers=0), prepare=arrow_file),
    "datasets-2": Contender(
        "Hugging Face datasets, 2 processes", *_DATASETS, partial(huggingface, num_workers=2), prepare=arrow_file
    ),
    "tfrecord": Contender(
        "TFRecord, parse_example of batches",
        *_TENSORFLOW,
        tfrecord,
        tuple({"num_parallel_reads": n} for n in (1, 2, 4)),
        write_tfrecords,
    ),
    "slices": Contender("from_tensor_slices().batch(), in memory", *_TENSORFLOW, tensor_slices),
}


def memory_mib(field: str) -> float:
    """``VmRSS``, the memory of this process, or ``VmHWM``, the most it was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) / 1024


def cpu_seconds() -> float:
    """Of all threads, and of the child processes that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(read: Callable[[], int], passes: int) -> dict[str, float]:
    gc.collect()
    wall, cpu = time.perf_counter(), cpu_seconds()
    rows = sum(read() for _ in range(passes))
    return {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu, "rows": rows}


def serve(contender: Contender, folder: Path) -> None:
    """Take turns until standard input ends; the first turn chooses the setting and how many passes a turn is."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    for module in contender.imports:
        importlib.import_module(module)
    if "tensorflow" in contender.imports:
        import tensorflow as tf

        tf.data.Dataset.range(1).reduce(0, lambda count, _: count + 1)
    before = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    read = contender.open(folder)
    chosen: dict[str, Any] | None = None
    passes = 1
    for _ in sys.stdin:
        if chosen is None:
            read(**contender.settings[0])
            tried = [(measure(partial(read, **setting), 1), setting) for setting in contender.settings]
            turn, chosen = min(tried, key=lambda one: one[0]["wall"])
            passes = max(1, math.ceil(TURN_SECONDS / turn["wall"]))
        else:
            turn = measure(partial(read, **chosen), passes)
        turn |= {"memory_mib": memory_mib("VmHWM") - before}
        versions = {name: version(name) for name in contender.packages}
        print(json.dumps({**turn, "passes": passes, "setting": chosen, "versions": versions}), file=answers)


def main() -> None:
    command, name, folder = sys.argv[1:]
    contender = CONTENDERS[name]
    if command == "serve":
        serve(contender, Path(folder))
    elif contender.prepare is not None:
        contender.prepare(Path(folder))


if __name__ == "__main__":
    main()
