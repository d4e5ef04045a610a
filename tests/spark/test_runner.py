"""The drop-in runner on real barrier tasks."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from spark_tensorflow_distributor import MirroredStrategyRunner as UpstreamRunner

import tfdist
from tfdist.data import Handle
from tfdist.errors import ConfigError, PreflightError, WorkerError
from tfdist.testing import tiny_parquet, tiny_table


def train_digits(learning_rate: float) -> dict[str, Any]:
    """The program of the old package's README, on scikit-learn's digits in place of downloaded ones."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    batch_size = 64

    def make_datasets() -> tf.data.Dataset:
        digits = load_digits()
        dataset = tf.data.Dataset.from_tensor_slices(
            (
                tf.cast(digits.images[..., tf.newaxis] / 16.0, tf.float32),
                tf.cast(digits.target, tf.int64),
            )
        )
        return dataset.repeat().shuffle(10000).batch(batch_size)

    def build_and_compile_cnn_model() -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            loss=tf.keras.losses.sparse_categorical_crossentropy,
            optimizer=tf.keras.optimizers.SGD(learning_rate=learning_rate),
            metrics=["accuracy"],
        )
        return model

    train_datasets = make_datasets()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    train_datasets = train_datasets.with_options(options)
    multi_worker_model = build_and_compile_cnn_model()
    history = multi_worker_model.fit(x=train_datasets, epochs=3, steps_per_epoch=5)
    weights = [float(abs(w).sum()) for w in multi_worker_model.get_weights()]
    return {
        "replicas": tf.distribute.get_strategy().num_replicas_in_sync,
        "loss": history.history["loss"],
        "w": weights,
    }


def test_the_old_readmes_program_trains_on_two_tasks(spark: SparkSession) -> None:
    """The old package's example runs to its end on two workers that stay equal, and its loss falls."""
    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, results="all")
    first, second = runner.run(train_digits, learning_rate=0.05)
    assert first == second
    assert first["replicas"] == 2
    assert first["loss"][-1] < first["loss"][0]


def test_every_argument_of_the_old_runner_is_taken_with_its_default() -> None:
    """The runner passes for the old one and has all of its arguments, with the same defaults."""
    assert issubclass(tfdist.MirroredStrategyRunner, UpstreamRunner)
    ours = inspect.signature(tfdist.MirroredStrategyRunner).parameters
    for name, parameter in inspect.signature(UpstreamRunner).parameters.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def add_rank(start: int) -> tuple[int, int, int]:
    context = tfdist.worker_context()
    return start + context.rank, context.world_size, len(context.addresses)


def test_runs_follow_each_other_and_leave_the_python_workers_clean(spark: SparkSession) -> None:
    """Three runs in one session, then one with another number of slots; a pandas UDF sees none of our variables."""
    for start in range(3):
        runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, results="all")
        assert runner.run(add_rank, start=start) == [(start, 2, 2), (start + 1, 2, 2)]
    alone = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False, results="all")
    assert alone.run(add_rank, start=7) == [(7, 1, 1)]

    @pandas_udf("string")
    def seen(batch: pd.Series) -> pd.Series:
        ours = sorted({"TF_CONFIG", "TFDIST_CONTEXT", "TFDIST_EVENT_FD"} & set(os.environ))
        return pd.Series([f"{ours} {os.environ.get('CUDA_VISIBLE_DEVICES')}"] * len(batch))

    rows = spark.range(0, 8, 1, 4).select(seen("id").alias("seen")).distinct().collect()
    # The devices are those that the executors were started with, by conftest.py.
    assert [row.seen for row in rows] == [f"[] {os.environ['CUDA_VISIBLE_DEVICES']}"]


def fail_on_rank_1(message: str) -> None:
    if tfdist.worker_context().rank == 1:
        raise LookupError(message)
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    # Rank 0 waits in a collective for a peer that never comes.
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(3)))


def test_an_error_on_rank_1_arrives_with_its_type_text_traceback_and_rank(spark: SparkSession) -> None:
    """The user's own exception on rank 1 is raised on the driver; conftest.py sees that no process is left."""
    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False)
    with pytest.raises(LookupError, match="no such column 'x'") as caught:
        runner.run(fail_on_rank_1, message="no such column 'x'")
    error = caught.value
    assert isinstance(error, WorkerError)
    assert error.rank == 1
    assert error.error_type == "LookupError"
    assert "in fail_on_rank_1" in error.worker_traceback
    assert "raise LookupError(message)" in error.worker_traceback
    assert tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(add_rank, start=1) == (1, 2, 2)


def test_more_slots_than_the_cluster_has_is_an_error_with_numbers_and_setting(spark: SparkSession) -> None:
    """Three slots on a cluster of two are refused before anything starts, saying how many there are and what to do."""
    runner = tfdist.MirroredStrategyRunner(num_slots=3, use_gpu=False)
    with pytest.raises(PreflightError, match=r"compute\.slots: 3 tasks .* runs 2 at most .*spark\.task\.cpus"):
        runner.run(add_rank, start=0)


def test_gpu_training_without_gpu_scheduling_names_the_setting(spark: SparkSession) -> None:
    """The default use_gpu=True on a cluster without GPU scheduling is refused with the keys to set."""
    with pytest.raises(PreflightError, match=r"spark\.task\.resource\.gpu\.amount"):
        tfdist.MirroredStrategyRunner(num_slots=2)


def fit_evaluate_and_predict(handle: Handle, single: Handle) -> dict[str, Any]:
    import keras

    keras.utils.set_random_seed(1)
    inputs = handle.schema.keras_inputs()
    x = keras.ops.stack([inputs[f"x{i}"] for i in range(3)], axis=-1)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(handle.to_tf(global_batch=8, seed=3), epochs=2, verbose=0).history
    in_order = {"global_batch": 8, "shuffle": False}
    return {
        "history": history,
        "evaluated": model.evaluate(handle.to_tf(**in_order), verbose=0, return_dict=True),
        "evaluated single": model.evaluate(single.to_tf(**in_order), verbose=0, return_dict=True),
        "predicted": model.predict(handle.to_tf(**in_order), verbose=0),
        "by steps": model.predict(handle.to_tf(repeat=True, **in_order), steps=handle.steps(8), verbose=0),
        "single": model.predict(single.to_tf(**in_order), verbose=0),
        "kernel": model.get_weights()[0],
        "bias": model.get_weights()[1],
    }


def test_keras_takes_the_pipeline_of_a_handle_and_predicts_in_the_order_of_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """fit, evaluate and predict on two workers give the values of one; each has the predictions of all rows, in order.

    101 rows end in batches of 7 and 6; of a data set of one row a worker has none.
    """
    handle, single = tiny_parquet(tmp_path / "many", 101), tiny_parquet(tmp_path / "single", 1)
    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, results="all")
    ranks = runner.run(fit_evaluate_and_predict, handle=handle, single=single)
    alone = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False)
    one = alone.run(fit_evaluate_and_predict, handle=handle, single=single)
    for got in ranks:
        for name in ("history", "evaluated", "evaluated single"):
            assert got[name].keys() == one[name].keys()
            for metric, value in one[name].items():
                np.testing.assert_allclose(got[name][metric], value, rtol=1e-5, err_msg=f"{name} {metric}")
        for name, rows in (("predicted", 101), ("by steps", 101), ("single", 1)):
            table = tiny_table(rows)
            x = np.stack([table[f"x{i}"].to_numpy() for i in range(3)], axis=1)
            np.testing.assert_allclose(got[name], x @ got["kernel"] + got["bias"], rtol=1e-4, err_msg=name)


def log_level_seen_by_tensorflow() -> str | None:
    return os.environ.get("TF_CPP_MAX_VLOG_LEVEL")


def test_env_is_set_in_the_training_process_and_nowhere_else(spark: SparkSession) -> None:
    """Variables of env= are there in the train function and not on the driver."""
    runner = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False, env={"TF_CPP_MAX_VLOG_LEVEL": "0"})
    assert runner.run(log_level_seen_by_tensorflow) == "0"
    assert "TF_CPP_MAX_VLOG_LEVEL" not in os.environ


def speak() -> None:
    print("a word from", tfdist.worker_context().rank)


def test_the_chiefs_output_reaches_the_driver_live(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    """What the chief prints appears on the driver with its rank as prefix; other ranks are quiet by default."""
    tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(speak)
    printed = capsys.readouterr().out.splitlines()
    assert "[0] a word from 0" in printed
    assert not any("a word from 1" in line for line in printed)


def test_local_mode_runs_on_the_driver(spark: SparkSession) -> None:
    """local_mode trains in one process on the driver's host, outside Spark, and returns the value itself."""
    runner = tfdist.MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False)
    assert runner.run(add_rank, start=3) == (3, 1, 1)


def test_wrong_arguments_are_refused_before_anything_starts(spark: SparkSession) -> None:
    """No slots, an unknown kind of result, several CPU slots in local mode: each is a ConfigError."""
    for wrong in ({"num_slots": 0}, {"num_slots": 1, "results": "some"}, {"num_slots": 2, "local_mode": True}):
        with pytest.raises(ConfigError):
            tfdist.MirroredStrategyRunner(use_gpu=False, **wrong)


def custom_strategy() -> tuple[int, bool]:
    import tensorflow as tf

    before = tf.distribute.has_strategy()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return strategy.num_replicas_in_sync, before


def test_a_train_function_may_make_its_own_strategy(spark: SparkSession) -> None:
    """With use_custom_strategy the train function runs outside any strategy and can build one from TF_CONFIG."""
    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
    assert runner.run(custom_strategy) == (2, False)


def leave_a_mark(folder: str) -> None:
    import time

    Path(folder, str(tfdist.worker_context().rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_an_interrupt_ends_the_training_processes(spark: SparkSession, tmp_path: Path) -> None:
    """When the driver is interrupted while a training runs, its processes end and the session can train again."""

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "sample" and len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    runner = tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, on_event=interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run(leave_a_mark, folder=str(tmp_path))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(alive, timeout=20)[1]
    assert tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(add_rank, start=1) == (1, 2, 2)
