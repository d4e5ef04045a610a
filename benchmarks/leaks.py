"""What many runs in one session leave behind: processes, threads, open files, listening ports and memory.

    python benchmarks/leaks.py [--runs 20]

Each run trains a small model on two Spark workers through MirroredStrategyRunner. The first run is before the first
count, since it starts what stays: Spark's Python workers, and the warm parent from which training processes are forked.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import numpy as np
import psutil
from peers import spark_cluster
from rich.console import Console
from rich.table import Table

import tfdist
from tfdist.environ import adopt

_KINDS = {
    "org.apache.spark.executor": "executors (JVM)",
    "java": "driver (JVM)",
    "tfdist.launch": "warm parent and training",
    "pyspark": "Python workers",
}
_FIGURES = ("processes", "threads", "open files", "listening ports", "MiB")


def train() -> float:
    import keras

    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return float(model.fit(x, x.sum(axis=1), batch_size=32, verbose=0).history["loss"][0])


def kind_of(process: psutil.Process) -> str:
    text = " ".join(process.cmdline())
    return next((kind for mark, kind in _KINDS.items() if mark in text), "others")


def count() -> dict[str, list[float]]:
    """By kind of process the figures of this program and of everything below it."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_FIGURES))
    driver = psutil.Process()
    for process in (driver, *driver.children(recursive=True)):
        try:
            kind = "driver (Python)" if process == driver else kind_of(process)
            ports = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
            memory = process.memory_info().rss / 2**20
            figures = (1, process.num_threads(), process.num_fds(), len(ports), memory)
        except psutil.Error:  # it has ended
            continue
        found[kind] = [a + b for a, b in zip(found[kind], figures, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    adopt({"CUDA_VISIBLE_DEVICES": "-1"})
    with spark_cluster() as spark:
        runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, spark=spark, on_event=lambda event: None)
        runner.run(train)
        time.sleep(2)  # what ends by itself has ended
        before = count()
        for _ in range(runs):
            runner.run(train)
        time.sleep(2)
        after = count()
    table = Table("before → after", *_FIGURES, title=f"{runs} runs in one session", title_justify="left")
    for kind in sorted({*before, *after}):
        pairs = zip(before[kind], after[kind], strict=True)
        table.add_row(kind, *(f"{a:.0f} → {b:.0f}" for a, b in pairs))
    Console().print(table)


if __name__ == "__main__":
    main()
