"""The driver of ``hosts.py``, on the host ``head``: python hosts_driver.py MASTER OWN_ADDRESS FOLDER; prints JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import TfdistError, WorkerError
from tfdist.launch.protocol import Event
from tfdist.testing import tiny_parquet

_STALL_S = 15.0  # of trainings that are cut off; a machine that is busy with other things may seem to stand still
_EPOCHS = 24
_BACK_AFTER_S = 10.0
_CUT_AT_EPOCH = 7
_ENDED_WITHIN_S = 120.0


@contextmanager
def session(master: str, own: str) -> Iterator[SparkSession]:
    """Both executors are there."""
    is_v6 = ":" in own
    host = f"[{own}]" if is_v6 else own
    java = f"-Djava.net.preferIPv6Addresses={'true' if is_v6 else 'false'}"
    conf = {
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master(master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        spark.range(1).count()
        yield spark
    finally:
        spark.stop()


def build_model(schema: Any) -> Any:
    inputs = schema.keras_inputs()
    x = keras.ops.stack([inputs[f"x{i}"] for i in range(3)], axis=-1)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, activation="tanh")(x)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Slow(keras.callbacks.Callback):
    """Leaves time to pull a cable."""

    keeps_no_state = True

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(0.04)


@dataclass
class Cable:
    """That of host ``two``; pulled once a training is in its middle, and put back some seconds after it was noticed."""

    back_after_s: float | None
    pulled: float | None = None
    back: float | None = None
    again: float | None = None
    noticed: str = ""
    timers: list[threading.Timer] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if event["kind"] == "epoch" and self.back is not None:
            self.again = self.again or now
        if event["kind"] == "epoch" and event["epoch"] == _CUT_AT_EPOCH and self.pulled is None:
            self.pulled = now
            self.set("down")
        if event["kind"] == "restart" and self.back_after_s is not None:
            self.noticed = event["cause"]
            self.timers.append(threading.Timer(self.back_after_s, self.put_back))
            self.timers[-1].start()

    def put_back(self) -> None:
        self.set("up")
        self.back = time.monotonic()

    def set(self, state: str) -> None:
        subprocess.run(["ip", "-n", "switch", "link", "set", "to-two", state], check=True)


def train(handle: Any, folder: Path, cable: Cable | None = None, **compute: Any) -> tfdist.FitResult:
    limit = {} if cable is None else {"stall_timeout_s": _STALL_S}
    compute = {"slots": 2, "threads_per_worker": 1, **limit, **compute}
    return tfdist.fit(
        build_model,
        handle,
        compute=tfdist.ComputeConfig(**compute),
        fit=tfdist.FitConfig(epochs=_EPOCHS, global_batch=20, output_dir=folder, checkpoint_every_steps=10),
        callbacks=lambda: [Slow()],
        on_event=cable or (lambda event: None),
    )


def training_processes() -> list[psutil.Process]:
    """On all hosts; a warm parent may stay."""
    ours = [p for p in psutil.process_iter(["cmdline", "ppid"]) if "tfdist.launch" in " ".join(p.info["cmdline"] or ())]
    warm = {p.pid for p in ours if "tfdist.launch.warm" in p.info["cmdline"]}
    return [p for p in ours if p.info["ppid"] in warm or "tfdist.launch.child" in p.info["cmdline"]]


def difference(a: tfdist.FitResult, b: tfdist.FitResult) -> float:
    """The largest between two weights of the models."""
    pairs = zip(a.model().get_weights(), b.model().get_weights(), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


def pull(handle: Any, folder: Path) -> dict[str, Any]:
    """A training that nobody mends."""
    cable, found = Cable(None), {"error": "", "host": None}
    try:
        train(handle, folder, cable)
    except TfdistError as error:
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found["host"] = error.host if isinstance(error, WorkerError) else None
    now = time.monotonic()
    assert cable.pulled is not None, "the training had ended before its cable was pulled"
    left = psutil.wait_procs(training_processes(), timeout=_ENDED_WITHIN_S)[1]
    ended = time.monotonic()
    cable.set("up")
    return {
        "pulled: error": found["error"],
        "pulled: host": found["host"],
        "pulled: noticed after (s)": round(now - cable.pulled, 1),
        "pulled: processes ended, the cable still out, after (s)": round(ended - cable.pulled, 1),
        "pulled: processes left": len(left),
    }


def main() -> None:
    master, own, place = sys.argv[1:]
    folder = Path(place)
    handle = tiny_parquet(folder / "data", 100)
    with session(master, own) as spark:
        result = train(handle, folder / "two")
        alone = train(handle, folder / "alone", slots=1, launcher="local")
        found: dict[str, Any] = {
            "hosts": [worker["host"] for worker in result.workers],
            "difference to one process": difference(result, alone),
        }
        found |= pull(handle, folder / "pulled")
        spark.range(0, 2, 1, 2).count()  # both executors answer again
        cable = Cable(_BACK_AFTER_S)
        again = train(handle, folder / "restarted", cable, max_restarts=1)
        assert cable.back is not None
        assert cable.again is not None
        found |= {
            "back: what was noticed": cable.noticed,
            "back: restarts": again.restarts,
            "back: next epoch after (s)": round(cable.again - cable.back, 1),
            "back: difference to the undisturbed training": difference(again, result),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
