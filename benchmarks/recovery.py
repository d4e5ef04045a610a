"""What checkpoints cost, and how long a killed training stands still.

    ./run bench recovery [--rounds 5] [--every 50]

The training is that of the flights job, on a local Spark cluster of two executors. Both figures come from one session:

- An epoch with a checkpoint every so many steps, against one without; the two take turns. Each training has two epochs,
  of which the second counts.
- Worker 1 ends itself with SIGKILL in the middle of the first epoch. Seconds from there until the driver says that it
  launches again, and until the chief has taken its first step after the restart.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from peers import print_table, spark_cluster
from tfdist_jobs.runner import _handle, prepared_parts
from tfdist_jobs.spec import JobSpec
from tfdist_jobs.tasks import task_of

import tfdist

JOB = Path(__file__).resolve().parent.parent / "jobs" / "configs" / "flights.yaml"
KILLED_AT = 120


def watchers(marker: Path | None) -> list[Any]:
    """Callbacks: worker 1 kills itself once, at a step, and the chief reports its first step after that."""
    import keras

    from tfdist.cluster import worker_context
    from tfdist.launch.protocol import emit

    class Watcher(keras.callbacks.Callback):
        keeps_no_state = True

        def on_train_begin(self, logs: Any = None) -> None:
            self.reported = marker is None or not marker.exists()
            self.steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            import os
            import signal
            import time

            if not self.reported:
                self.reported = True
                if worker_context().is_chief:
                    emit("first-step-again", time=time.time())
            self.steps += 1
            if marker is not None and worker_context().rank == 1 and batch == KILLED_AT and not marker.exists():
                marker.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    return [Watcher()]


def epoch_seconds(call: Any) -> float:
    """Seconds of the training steps of the last epoch."""
    seconds: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "epoch":
            seconds.append(event["train_seconds"])

    call(on_event=on_event)
    return seconds[-1]


def stood_still(call: Any, marker: Path) -> tuple[float, float]:
    """Seconds from the kill until the driver knew, and until the next step."""
    times: dict[str, float] = {}

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "restart":
            times["known"] = time.time()
        elif event["kind"] == "first-step-again":
            times["again"] = event["time"]

    call(on_event=on_event, callbacks=partial(watchers, marker))
    killed = float(marker.read_text())
    return times["known"] - killed, times["again"] - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, spark_cluster() as spark:
        spec = JobSpec.from_yaml(JOB)
        spec = dataclasses.replace(spec, cache_dir=f"{folder}/cache")
        task = task_of(spec)
        parts = prepared_parts(spark, spec, task)
        build = task.learn(parts.train)
        train = _handle(parts.train, spec, task, "train")
        compute = dataclasses.replace(spec.compute, threads_per_worker=1)
        plain = dataclasses.replace(spec.fit, epochs=2)
        print(f"{train.rows:,} rows, {train.steps(plain.global_batch)} steps in an epoch, batch {plain.global_batch}")
        without, with_checkpoints, known, again = [], [], [], []
        for number in range(arguments.rounds):
            kept = {"checkpoint_every_steps": arguments.every, "checkpoint_dir": f"{folder}/c{number}"}
            written = dataclasses.replace(plain, **kept)
            one = partial(tfdist.fit, build, train, spark=spark)
            without.append(epoch_seconds(partial(one, compute=compute, fit=plain)))
            with_checkpoints.append(epoch_seconds(partial(one, compute=compute, fit=written)))
            restarting = dataclasses.replace(compute, max_restarts=1)
            killed = dataclasses.replace(written, checkpoint_dir=f"{folder}/k{number}", epochs=1)
            seconds = stood_still(partial(one, compute=restarting, fit=killed), Path(folder) / f"killed-{number}")
            known.append(seconds[0])
            again.append(seconds[1])
    every = f"checkpoint every {arguments.every} steps"
    print_table([("no checkpoints", without), (every, with_checkpoints)], "seconds of an epoch", "no checkpoints")
    print_table([("kill -9 known on the driver", known), ("next step", again)], "seconds", "next step")


if __name__ == "__main__":
    main()
