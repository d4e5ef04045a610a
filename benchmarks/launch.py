"""Seconds from ``run()`` to the end of the first training step: two Spark workers against two plain processes.

    python benchmarks/launch.py [--rounds 5]

A round is: a new Spark session and its first run (which starts the processes that have TensorFlow imported), a second
run in that session, and the same program in two new Python processes with TF_CONFIG. Both sides train the same model
with the same corrections of Keras. The time ends at the end of the first step on the chief.
"""

from __future__ import annotations

import argparse
import time

from peers import print_table, run_bare, spark_cluster

import tfdist


def train() -> float:
    """Train a small model for one step under the strategy in force.

    Returns:
        The clock at the end of the first step, in seconds since the epoch.
    """
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    ended: list[float] = []

    class FirstStep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            ended.append(time.time())

    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    rows = np.random.default_rng(0).normal(size=(2, 64, 20)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((rows, rows.sum(-1))).repeat()
    data = tf.distribute.get_strategy().distribute_datasets_from_function(lambda _: batches)
    model.fit(data, steps_per_epoch=1, callbacks=[FirstStep()], shuffle=False, verbose=0)
    return ended[0]


def train_bare() -> float:
    """As :func:`train`, under a strategy made here."""
    from tfdist.strategies.builders import strategy_scope

    with strategy_scope("multi_worker_mirrored"):
        return train()


def seconds_on_spark() -> float:
    start = time.time()
    return tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train) - start


def seconds_bare() -> float:
    start = time.time()
    return float(run_bare("launch.train_bare", {})[0]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    first, second, bare = [], [], []
    for _ in range(arguments.rounds):
        with spark_cluster():
            first.append(seconds_on_spark())
            second.append(seconds_on_spark())
        bare.append(seconds_bare())
    rows = [("first run in a session", first), ("later run in a session", second), ("plain processes", bare)]
    print_table(rows, "seconds to the first step", "plain processes")


if __name__ == "__main__":
    main()
