"""Median time of a training step: ``tfdist.fit`` on two Spark workers against plain MultiWorkerMirroredStrategy.

    python benchmarks/steptime.py [--rounds 5] [--steps 400] [--batch 1024] [--width 256]

Both sides train the same dense model on the same rows with the same corrections of Keras and one thread in each of two
processes. The plain side has its batches ready in memory; ours reads them from Parquet while it trains. The time is
taken on the chief from the end of a step to the end of the next.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peers import print_table, run_bare, spark_cluster

import tfdist

COLUMNS = 20
WARM_UP = 20


def build(width: int, schema: Any = None) -> Any:
    """A dense model of 20 columns."""
    import keras

    inputs = {f"x{i}": keras.Input((), name=f"x{i}") for i in range(COLUMNS)}
    x = keras.ops.stack(list(inputs.values()), axis=-1)
    for _ in range(2):
        x = keras.layers.Dense(width, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


def timer(report: Callable[[list[float]], None]) -> Any:
    """A Keras callback that reports the seconds of each step when the training ends."""
    import time

    import keras

    class Timer(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

        def on_train_end(self, logs: Any = None) -> None:
            report([later - earlier for earlier, later in zip(self.ends, self.ends[1:], strict=False)])

    return Timer()


def report_event(seconds: list[float]) -> None:
    from tfdist.launch.protocol import emit

    emit("steps", steps=seconds)


def timers() -> list[Any]:
    return [timer(report_event)]


def train_bare(path: str, batch: int, width: int, steps: int) -> list[float]:
    """The plain side: seconds of each step on this worker."""
    import tensorflow as tf

    from tfdist.strategies.builders import strategy_scope

    table = pq.read_table(path)
    share = batch // 2
    whole = table.num_rows // share
    columns = {name: table[name].to_numpy()[: whole * share].reshape(whole, share) for name in table.column_names}
    label = columns.pop("y")
    seconds: list[float] = []
    with strategy_scope("multi_worker_mirrored", threads=1, seed=1):
        batches = tf.data.Dataset.from_tensor_slices((columns, label)).repeat().prefetch(2)
        data = tf.distribute.get_strategy().distribute_datasets_from_function(lambda _: batches)
        build(width).fit(data, steps_per_epoch=steps, callbacks=[timer(seconds.extend)], shuffle=False, verbose=0)
    return seconds


def train_on_spark(path: str, batch: int, width: int) -> list[float]:
    """Our side: seconds of each step on the chief, over one epoch."""
    found: dict[int, list[float]] = {}

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "steps":
            found[event["rank"]] = event["steps"]

    tfdist.fit(
        partial(build, width),
        tfdist.data.from_parquet(path, label="y"),
        compute=tfdist.ComputeConfig(slots=2, threads_per_worker=1),
        fit=tfdist.FitConfig(global_batch=batch, seed=1),
        callbacks=timers,
        on_event=on_event,
    )
    return found[0]


def milliseconds(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP:]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("steps", 400), ("batch", 1024), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    batch, width, steps = arguments.batch, arguments.width, arguments.steps
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        values = np.random.default_rng(0).normal(size=(COLUMNS, steps * batch)).astype("float32")
        table = pa.table({**{f"x{i}": v for i, v in enumerate(values)}, "y": values.sum(0)})
        path = str(Path(folder, "rows.parquet"))
        pq.write_table(table, path, row_group_size=32768)
        with spark_cluster():
            for _ in range(arguments.rounds):
                ours.append(milliseconds(train_on_spark(path, batch, width)))
                plain = {"path": path, "batch": batch, "width": width, "steps": steps}
                bare.append(milliseconds(run_bare("steptime.train_bare", plain)[0]))
    rows = [("tfdist.fit on Spark", ours), ("plain processes", bare)]
    print_table(rows, f"ms a step of {batch} rows", "plain processes")


if __name__ == "__main__":
    main()
