"""What an elastic training does when a host is lost for good and another one comes: real processes, killed for real.

    python benchmarks/elastic.py [--json FILE]

A standalone cluster with three Workers trains on the handwritten digits of scikit-learn, with ``slots=3`` and
``min_slots=2``. In the middle of the second epoch the Worker and the executor of rank 2 are killed: the training goes
on with two workers. Then a new Worker joins, and a training process is killed: it goes on with three. The table tells
how long each change took, whether each step saw exactly the rows of an undisturbed training by one process, and how far
its losses are from that one's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from peers import spark_session
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from standalone import MASTER, WORKER, daemon, daemon_environ

import tfdist
from tfdist.environ import adopt
from tfdist.launch.protocol import Event, emit
from tfdist.launch.slots import wait_for_slots
from tfdist.train.console import describe

_LOSE_AFTER, _GROW_AFTER = 25, 40  # steps, of 57
_START_TIMEOUT_S = 120.0
_PLACE = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
FIT = tfdist.FitConfig(epochs=3, global_batch=96, seed=3, checkpoint_every_steps=4)


@dataclass
class Outcome:
    """What the training came to.

    Args:
        world_sizes: number of workers of each launch.
        ranks: of the last launch.
        told: lines that a user sees of it.
        changed_s: seconds from each loss to the next step.
        same_rows: whether each step, whenever it was computed, saw the rows of the undisturbed training.
        steps: how many different steps were seen.
        steps_again: how many computations of a step came after its first.
        loss_difference: largest relative difference of a loss from the undisturbed one.
    """

    world_sizes: list[int]
    ranks: list[int]
    told: list[str]
    changed_s: list[float]
    same_rows: bool
    steps: int
    steps_again: int
    loss_difference: float


def master() -> Any:
    """A Master on a free port."""
    return daemon(MASTER, *_PLACE, ready=r"spark://\S+:\d+", environ=daemon_environ())


def worker(master_url: str, folder: str) -> Any:
    """A Worker with one core."""
    given = ("--work-dir", folder, "--cores", "1", "--memory", "1g", master_url)
    return daemon(WORKER, *_PLACE, *given, ready="Successfully registered with master", environ=daemon_environ())


def digits(folder: Path) -> tfdist.data.Handle:
    """1,797 images of 8 by 8 pixels, each with its number."""
    images, labels = load_digits(return_X_y=True)
    table = {
        "row": np.arange(len(labels)),
        "x": list((images / 16).astype(np.float32)),
        "label": labels.astype(np.int64),
    }
    pq.write_table(pa.table(table), folder / "digits.parquet", row_group_size=200)
    return tfdist.data.from_parquet(folder, label="label")


def file_of_rank(folder: Path) -> Path:
    """Where this worker of this launch writes what it sees."""
    worker = tfdist.worker_context()
    return folder / f"{worker.run_id}.{worker.rank}.rank"


def build_model(folder: Path, schema: Any) -> Any:
    """A small network; a layer writes the numbers of the rows of each step into a file of the process."""
    import keras
    import tensorflow as tf

    class Seen(keras.layers.Layer):
        def call(self, x: Any, row: Any) -> Any:
            tf.print(row, summarize=-1, output_stream=f"file://{file_of_rank(folder)}")
            return x

    inputs = schema.keras_inputs()
    x = Seen()(inputs["x"], inputs["row"])
    x = keras.layers.Dense(32, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def callbacks(folder: Path) -> list[Any]:
    """Write each step beside its rows, and meet the faults."""
    import keras

    class Steps(keras.callbacks.Callback):
        keeps_no_state = True

        def on_train_begin(self, logs: Any = None) -> None:
            self.rank, self.began = tfdist.worker_context().rank, True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = int(self.model.optimizer.iterations.numpy())
            with file_of_rank(folder).open("a") as file:
                file.write(f"{step}\n")
            if self.began and self.rank == 0:
                emit("began", step=step)
            self.began = False
            lost, grown = folder / "lost", folder / "grown"
            if (self.rank, step) == (2, _LOSE_AFTER) and not lost.exists():
                lost.touch()
                emit("lose")
                time.sleep(_START_TIMEOUT_S)  # the end comes from outside
            if (self.rank, step) == (0, _GROW_AFTER) and lost.exists() and not grown.exists():
                emit("grow")
                while not grown.exists():
                    time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)

    return [Steps()]


def steps_seen(folder: Path) -> dict[int, list[list[int]]]:
    """Of each step the sorted rows that it saw over all workers, once for each launch that computed it."""
    launches: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*.rank"):
        rows: list[int] = []
        for line in file.read_text().splitlines():
            if line.startswith("["):
                rows = [int(number) for number in line.strip("[]").split()]
            else:
                launches[file.name.partition(".")[0]][int(line)] += rows
    found: dict[int, list[list[int]]] = defaultdict(list)
    for launch in launches.values():
        for step, rows in launch.items():
            found[step].append(sorted(rows))
    return found


def undisturbed(handle: Any, folder: Path) -> tuple[tfdist.FitResult, dict[int, list[list[int]]]]:
    """The same training by one process, and the rows of each step."""
    (folder / "seen").mkdir(parents=True)
    result = tfdist.fit(
        partial(build_model, folder / "seen"),
        handle,
        compute=tfdist.ComputeConfig(launcher="local", threads_per_worker=1),
        fit=replace(FIT, checkpoint_every_steps=None, output_dir=folder / "out"),
        callbacks=partial(callbacks, folder / "seen"),
        on_event=lambda event: None,
    )
    return result, steps_seen(folder / "seen")


class Cluster:
    """A standalone cluster that loses a host and gets another one, as the events of a training ask for it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.opened = time.monotonic()
        self.url = stack.enter_context(master())
        self.spark: SparkSession | None = None
        self.pids: dict[int, int] = {}
        self.told: list[str] = []
        self.began: list[float] = []
        self.broken: list[float] = []

    def grow(self, name: str) -> None:
        self._stack.enter_context(worker(self.url, str(self._folder / name)))

    def open(self, workers: int) -> None:
        with ExitStack() as starting:  # daemons of Java take seconds, so all at once
            for thread in [threading.Thread(target=self.grow, args=(f"worker{n}",)) for n in range(workers)]:
                thread.start()
                starting.callback(thread.join)
        self.spark = self._stack.enter_context(
            spark_session(self.url, {"spark.executor.memory": "512m", "spark.log.level": "OFF"})
        )
        wait_for_slots(self.spark, workers, _START_TIMEOUT_S, lambda event: None)

    def on_event(self, event: Event) -> None:
        if event["kind"] != "line" and (text := describe(event)):
            self.told.append(f"{time.monotonic() - self.opened:6.1f} s  {text}")
        match event["kind"]:
            case "joined":
                self.pids[event["rank"]] = event["pid"]
            case "began":
                self.began.append(time.time())
            case "lose":
                executor, worker_of_it = [p for p in psutil.Process(self.pids[2]).parents() if "java" in p.name()][:2]
                for process in (worker_of_it, executor):
                    process.kill()
                self.broken.append(time.time())
            case "grow":
                assert self.spark is not None
                self.grow("later")
                wait_for_slots(self.spark, 3, _START_TIMEOUT_S, lambda event: None)
                self.broken.append(time.time())
                (self._folder / "seen" / "grown").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the outcome to this file instead of a table")
    arguments = parser.parse_args()
    adopt({"CUDA_VISIBLE_DEVICES": "-1", "SPARK_LOCAL_IP": "127.0.0.1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        handle = digits(folder)
        wanted, wanted_rows = undisturbed(handle, folder / "undisturbed")
        (folder / "seen").mkdir()
        cluster = Cluster(stack, folder)
        cluster.open(3)
        result = tfdist.fit(
            partial(build_model, folder / "seen"),
            handle,
            compute=tfdist.ComputeConfig(
                slots=3, min_slots=2, last_call_timeout_s=3.0, max_restarts=4, threads_per_worker=1
            ),
            fit=replace(FIT, output_dir=folder / "out"),
            callbacks=partial(callbacks, folder / "seen"),
            spark=cluster.spark,
            on_event=cluster.on_event,
        )
        seen = steps_seen(folder / "seen")
    losses, wanted_losses = (np.array(r.history["loss"]) for r in (result, wanted))
    outcome = Outcome(
        world_sizes=list(result.world_sizes),
        ranks=[one["rank"] for one in result.workers],
        told=cluster.told,
        changed_s=[next(t for t in cluster.began if t > at) - at for at in cluster.broken],
        same_rows=all([rows] == wanted_rows[step] for step, each in seen.items() for rows in each),
        steps=len(seen),
        steps_again=sum(len(each) - 1 for each in seen.values()),
        loss_difference=float(np.max(np.abs(losses / wanted_losses - 1))),
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(outcome)))
        return
    table = Table("", "")
    for what, value in asdict(outcome).items():
        table.add_row(what.replace("_", " "), "\n".join(value) if what == "told" else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
