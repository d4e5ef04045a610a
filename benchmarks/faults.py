"""What a user sees when things go wrong: each fault is put into a training of two Spark workers, on real processes.

    python benchmarks/faults.py [NAME ...] [--recover [NAME ...]] [--json FILE]

Rank 1 meets its fault after 12 steps of a training that would go on for hours. The table tells when the driver's call
had ended, what its error says, and which processes of the training were left ten seconds later. Those of which a
training can recover are met again by one with ``max_restarts=1`` and checkpoints: the table tells when the chief made
its next step, and whether the weights in the end are exactly those of the undisturbed training. All faults share one
Spark session, so each also shows that the one before did no harm. Only processes started here are killed, by their id.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import pandas as pd
import psutil
from peers import spark_cluster
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from rich.console import Console
from rich.table import Table

import tfdist
from tfdist.environ import adopt
from tfdist.errors import WorkerError
from tfdist.launch.protocol import Event, new_run_id
from tfdist.testing import tiny_parquet

_MARK = "TFDIST_FAULTS"
_AFTER_STEPS = 12
_STALL_S = 5.0
_LEFT_AFTER_S = 10.0
_HOURS = 10**6  # epochs
_EPOCHS = 30  # of a training that recovers


@dataclass
class Outcome:
    """What one fault led to.

    Args:
        name: of the fault.
        noticed_s: seconds from the fault to the end of the driver's call; None where nothing should be noticed.
        recovered_s: seconds from the fault to the next step, where the training was launched again.
        exact: whether the training that recovered has the weights and the history of the undisturbed one.
        error_type: of the error that the call raised; empty for none.
        rank: that the error names.
        host: that the error names.
        message: the text of the error.
        left: processes of the training that were left.
        seen: what a pandas UDF saw afterwards: variables of ours, by name.
        daemons_lost: how many of the processes ended from which Spark forks its Python workers.
    """

    name: str
    noticed_s: float | None = None
    recovered_s: float | None = None
    exact: bool | None = None
    error_type: str = ""
    rank: int | None = None
    host: str = ""
    message: str = ""
    left: list[str] | None = None
    seen: list[str] | None = None
    daemons_lost: int = 0


class Crash(keras.callbacks.Callback):
    """Does ``how`` on rank 1 after some steps, and writes the time into ``folder`` just before.

    After a restart it does nothing but write the time of the chief's first step.
    """

    keeps_no_state = True

    def __init__(self, how: Callable[[], Any] | None, folder: Path) -> None:
        super().__init__()
        self.how, self.folder, self.steps = how, folder, 0

    def on_train_begin(self, logs: object = None) -> None:
        self.again = (self.folder / "time").exists()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.steps += 1
        if self.again:
            if self.steps == 1 and tfdist.worker_context().is_chief:
                (self.folder / "again").write_text(str(time.time()))
            return
        if self.steps == _AFTER_STEPS and self.how is not None and tfdist.worker_context().rank == 1:
            print("last words of rank 1", flush=True)
            (self.folder / "time").write_text(str(time.time()))
            self.how()


def raise_error() -> None:
    raise LookupError("no such column 'x'")


# What rank 1 does to itself, inside the training process.
INSIDE: dict[str, Callable[[], Any]] = {
    "raise": raise_error,
    "kill -9 of a training process": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "sleep": lambda: time.sleep(3600),
    "SIGSTOP of a training process": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def executor_of(pid: int) -> psutil.Process:
    """The JVM of the executor that a Spark Python worker belongs to."""
    return next(p for p in psutil.Process(pid).parents() if "java" in p.name())


# What is done to rank 1 from outside, given the process id of its Spark Python worker.
OUTSIDE: dict[str, Callable[[int], Any]] = {
    "kill -9 of a Spark Python worker": lambda pid: os.kill(pid, signal.SIGKILL),
    "kill -9 of an executor's JVM": lambda pid: executor_of(pid).kill(),
}


def build_model(schema: Any) -> Any:
    inputs = schema.keras_inputs()
    x = keras.ops.stack([inputs[f"x{i}"] for i in range(3)], axis=-1)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def train(handle: Any, folder: Path, name: str, restarts: int = 0) -> tfdist.FitResult:
    """Train on two Spark workers until fault ``name`` ends it, or with ``restarts`` to the end."""
    how = INSIDE.get(name)
    pids: dict[int, int] = {}
    done: list[float] = []

    def on_event(event: Event) -> None:
        if event["kind"] == "joined":
            pids[event["rank"]] = event["pid"]
        if event["kind"] == "epoch" and event["epoch"] == 2 and name in OUTSIDE and not done:
            done.append(time.time())
            (folder / "time").write_text(str(done[0]))
            OUTSIDE[name](pids[1])

    kept = {"checkpoint_every_steps": 10} if restarts else {}
    return tfdist.fit(
        build_model,
        handle,
        compute=tfdist.ComputeConfig(slots=2, stall_timeout_s=_STALL_S, threads_per_worker=1, max_restarts=restarts),
        fit=tfdist.FitConfig(
            epochs=_EPOCHS if restarts else _HOURS, global_batch=20, output_dir=folder / "out", **kept
        ),
        callbacks=lambda: [Crash(how, folder)],
        on_event=on_event,
    )


@dataclass
class Squatter:
    """Takes the port of rank 1, once, when the program is unpickled: before TensorFlow listens on it."""

    folder: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        context = tfdist.worker_context()
        mark = Path(self.folder, "squatted")
        if context.rank == 1 and not mark.exists():
            mark.touch()
            self.squat = socket.socket()
            self.squat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.squat.bind(("", int(context.addresses[1].rpartition(":")[2])))
            self.squat.listen()

    def __call__(self) -> int:
        import tensorflow as tf

        return int(tf.distribute.get_strategy().num_replicas_in_sync)


def take_port(spark: SparkSession, folder: Path) -> None:
    """A port is taken by somebody else between its choice and TensorFlow's binding."""
    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, results="all", spark=spark)
    assert runner.run(Squatter(str(folder))) == [2, 2]
    assert (folder / "squatted").exists()


def two_at_once(spark: SparkSession, folder: Path) -> None:
    """Two runs at the same time in one application, each of one worker."""
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        runner = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False, spark=spark)
        try:
            found[number] = runner.run(lambda: (time.sleep(1), number)[1])
        except Exception as error:  # noqa: BLE001  of a thread; shown below
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1}, found


def python_daemons() -> list[psutil.Process]:
    """The processes from which the executors of this session fork their Python workers."""
    below = [p for p in psutil.Process().children(recursive=True) if "pyspark.daemon" in command_line(p)]
    return [p for p in below if p.ppid() not in {other.pid for other in below}]


UNSEEN: dict[str, Callable[[SparkSession, Path], None]] = {
    "a port is taken": take_port,
    "two runs at once": two_at_once,
}
FAULTS = (*INSIDE, *OUTSIDE, *UNSEEN)
RECOVERABLE = tuple(name for name in (*INSIDE, *OUTSIDE) if name != "raise")


def command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:  # it has ended
        return None


def ours() -> list[psutil.Process]:
    """Processes that tfdist started for this program, wherever they are in the tree of processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if "tfdist.launch" in " ".join(command_line(process)) and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def training_processes() -> list[psutil.Process]:
    """Of ours those that train; a warm parent may stay."""
    found = ours()
    warm = {p.pid for p in found if "tfdist.launch.warm" in command_line(p)}
    cold = {p.pid for p in found if "tfdist.launch.child" in command_line(p)}
    return [p for p in found if p.pid in cold or parent_of(p) in warm]


def look_around(spark: SparkSession) -> list[str]:
    """Variables of ours that a pandas UDF sees on the executors."""

    @pandas_udf("string")
    def seen(batch: pd.Series) -> pd.Series:
        names = {"TF_CONFIG", "TFDIST_CONTEXT", "TFDIST_EVENT_FD", "no_grpc_proxy"} & set(os.environ)
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "-1":  # what the executors were started with
            names.add("CUDA_VISIBLE_DEVICES")
        return pd.Series([json.dumps(sorted(names))] * len(batch))

    rows = [json.loads(row[0]) for row in spark.range(0, 8, 1, 4).select(seen("id")).distinct().collect()]
    return sorted({name for names in rows for name in names})


def run_fault(spark: SparkSession, handle: Any, name: str) -> Outcome:
    """Put one fault into a training and tell what it led to."""
    outcome = Outcome(name)
    before = {p.pid for p in python_daemons()}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        try:
            if name in UNSEEN:
                UNSEEN[name](spark, place)
            else:
                train(handle, place, name)
        except Exception as error:  # noqa: BLE001  whatever the user sees is what is looked for
            outcome.error_type, outcome.message = type(error).__name__, str(error)
            if isinstance(error, WorkerError):
                outcome.rank, outcome.host = error.rank, error.host
        if name not in UNSEEN:
            began = place / "time"
            outcome.noticed_s = round(time.time() - float(began.read_text()), 1) if began.exists() else None
    left = psutil.wait_procs(training_processes(), timeout=_LEFT_AFTER_S)[1]
    outcome.left = [f"{p.pid} {' '.join(command_line(p))}" for p in left]
    outcome.seen = look_around(spark)
    outcome.daemons_lost = len(before - {p.pid for p in python_daemons()})
    return outcome


def recover(handle: Any, outcome: Outcome, undisturbed: tfdist.FitResult) -> None:
    """Put the fault into a training that is launched again; note when it went on, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(handle, Path(folder), outcome.name, restarts=1)
        assert result.restarts == 1, f"{outcome.name}: {result.restarts} restarts"
        times = (float(Path(folder, name).read_text()) for name in ("again", "time"))
        outcome.recovered_s = round(next(times) - next(times), 1)
        weights = zip(result.model().get_weights(), undisturbed.model().get_weights(), strict=True)
        outcome.exact = result.history == undisturbed.history and all((a == b).all() for a, b in weights)


def report(outcomes: list[Outcome]) -> Table:
    headings = ("fault", "noticed after", "next step after", "exact", "what the user sees", "processes left")
    table = Table(*headings, show_lines=True)
    for o in outcomes:
        first = o.message.splitlines()[0] if o.message else "nothing"
        noticed, recovered = ("" if s is None else f"{s:.1f} s" for s in (o.noticed_s, o.recovered_s))
        exact = "" if o.exact is None else "yes" if o.exact else "NO"
        seen = f"{o.error_type}: {first}" if o.error_type else first
        table.add_row(o.name, noticed, recovered, exact, seen, str(len(o.left or ())))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(FAULTS)}")
    parser.add_argument(
        "--recover", nargs="*", metavar="NAME", default=None, help="of which to recover; by default all that can be"
    )
    parser.add_argument("--json", type=Path, help="write the outcomes to this file instead of a table")
    arguments = parser.parse_args()
    names = arguments.names or FAULTS
    recovered = arguments.recover if arguments.recover is not None else [n for n in names if n in RECOVERABLE]
    for asked, known in ((names, FAULTS), (recovered, RECOVERABLE)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
    adopt({_MARK: new_run_id(), "CUDA_VISIBLE_DEVICES": "-1"})
    with tempfile.TemporaryDirectory() as folder:
        handle = tiny_parquet(folder, 100)
        outcomes = []
        with spark_cluster() as spark:
            look_around(spark)  # Python is there
            undisturbed = train(handle, Path(folder, "undisturbed"), "", restarts=1) if recovered else None
            for name in names:
                print(name, file=sys.stderr, flush=True)
                outcomes.append(run_fault(spark, handle, name))
                if undisturbed is not None and name in recovered:
                    recover(handle, outcomes[-1], undisturbed)
        after_stop = psutil.wait_procs(ours(), timeout=_LEFT_AFTER_S)[1]
    if arguments.json:
        found = {"outcomes": [asdict(o) for o in outcomes], "left": [p.pid for p in after_stop]}
        arguments.json.write_text(json.dumps(found, indent=1))
    else:
        Console().print(report(outcomes), f"processes left after the session: {len(after_stop)}")


if __name__ == "__main__":
    main()
