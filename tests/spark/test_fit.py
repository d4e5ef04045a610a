"""``tfdist.fit`` from a DataFrame to a trained model, on Spark and on local processes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tfdist
from tfdist.errors import ConfigError, DataError, WorkerError
from tfdist.testing import as_worker, tiny_parquet
from tfdist.train.publish import announced, check_announced

ROWS, VALIDATION_ROWS = 1100, 333


def make_frame(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    """A table that a model can learn from: four floats, a text, an int64, a label that follows from the first two."""
    frame = spark.range(0, rows, 1, 3).select(
        *[F.rand(seed * 10 + i).cast("float").alias(f"x.{i}") for i in range(4)],
        F.element_at(F.array(*map(F.lit, "abc")), (F.col("id") % 3 + 1).cast("int")).alias("kind"),
        F.expr("id % 24").alias("hour"),
    )
    return frame.withColumn("late", F.expr("int(`x.0` + `x.1` * int(kind = 'a') > 0.8)"))


@pytest.fixture(scope="module")
def handles(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    cache = tmp_path_factory.mktemp("cache")
    return tuple(  # type: ignore[return-value]
        tfdist.data.from_dataframe(make_frame(spark, rows, seed), label="late", cache_dir=cache)
        for rows, seed in ((ROWS, 1), (VALIDATION_ROWS, 2))
    )


def build_tabular(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    numbers = keras.layers.Concatenate()([keras.ops.expand_dims(inputs[f"x.{i}"], -1) for i in range(4)])
    scaled = keras.layers.Normalization(mean=[0.5] * 4, variance=[1 / 12] * 4)(numbers)
    index = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(inputs["kind"])
    kind = keras.layers.Embedding(4, 3)(index)
    hour = keras.layers.Embedding(24, 2)(inputs["hour"])
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([scaled, kind, hour]))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(
        keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
    )
    return model


FIT = tfdist.FitConfig(epochs=3, global_batch=96, seed=7)


def weights(result: tfdist.FitResult) -> list[np.ndarray]:
    return [np.asarray(v) for v in result.model().trainable_variables]


@pytest.fixture(scope="module")
def on_spark(spark: SparkSession, handles: tuple[Any, Any]) -> tfdist.FitResult:
    train, validation = handles
    return tfdist.fit(
        build_tabular, train, validation=validation, compute=tfdist.ComputeConfig(slots=2), fit=FIT, spark=spark
    )


def assert_equal(one: tfdist.FitResult, many: tfdist.FitResult) -> None:
    for a, b in zip(weights(one), weights(many), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6 * np.abs(a).max())
    assert one.history.keys() == many.history.keys()
    for name, values in one.history.items():
        np.testing.assert_allclose(many.history[name], values, rtol=1e-6, err_msg=name)


def test_a_training_on_spark_learns_and_tells_what_it_did(on_spark: tfdist.FitResult) -> None:
    """Two barrier workers train from a DataFrame; history, model, speed and workers come back."""
    assert len(on_spark.history["loss"]) == 3
    assert on_spark.history["val_auc"][-1] > max(0.8, on_spark.history["val_auc"][0])
    assert (on_spark.rows, on_spark.dropped_rows) == (ROWS, 0)
    assert on_spark.rows_per_s > 0
    assert [w["rank"] for w in on_spark.workers] == [0, 1]
    assert on_spark.seconds["total"] >= on_spark.seconds["train"] > 0
    assert (Path(on_spark.model_path).parent / "schema.json").exists()


@pytest.mark.parametrize("slots", [1, 3])
def test_any_number_of_workers_trains_to_the_same_weights(
    slots: int, handles: tuple[Any, Any], on_spark: tfdist.FitResult
) -> None:
    """One process and three unevenly loaded ones end with the weights and history of two Spark workers, to 1e-6.

    The inputs are a text with a lookup inside the model, an int64 with an embedding, and floats.

    1,100 rows in batches of 96 leave 44 for the last step, which three workers share as 14, 15 and 15.
    """
    train, validation = handles
    compute = tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1)
    other = tfdist.fit(build_tabular, train, validation=validation, compute=compute, fit=FIT)
    assert_equal(on_spark, other)


def build_bags(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(inputs["ids"]))
    model = keras.Model(inputs, keras.layers.Dense(1)(words))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def test_lists_of_varying_length_train_and_are_scored(spark: SparkSession, tmp_path: Path) -> None:
    """Ragged ids in an embedding, unequally long on each worker: one and two workers agree, and Spark scores them."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, 20, rng.integers(1, 6)).tolist() for _ in range(101)]
    df = spark.createDataFrame([(i, float(sum(i) / 10)) for i in ids], "ids array<int>, y float").coalesce(1)
    train = tfdist.data.from_dataframe(df, label="y", cache_dir=tmp_path)
    fit = tfdist.FitConfig(epochs=2, global_batch=16, seed=1)
    one, two = (
        tfdist.fit(
            build_bags,
            train,
            compute=tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1),
            fit=fit,
        )
        for slots in (1, 2)
    )
    assert_equal(one, two)
    lengths = []
    for rank in range(2):
        with as_worker(rank, 2):
            lengths.append([int(tf.size(x["ids"].flat_values)) for x, _ in train.to_tf(global_batch=16, seed=1)])
    assert any(one != other for one, other in zip(*lengths, strict=True))
    (features,) = (x for x, _ in train.to_tf(global_batch=101, shuffle=False))
    wanted = two.model().predict(features, verbose=0)[:, 0]
    scored = [row["prediction"] for row in tfdist.score(df, two).collect()]
    np.testing.assert_allclose(scored, wanted, rtol=1e-5)


def build_small(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    total = keras.layers.Concatenate()([keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(total))
    metrics = ["mae", keras.metrics.AUC(), keras.metrics.TruePositives()]
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    return model


def test_fewer_rows_than_workers_train_and_validate_alike(tmp_path: Path) -> None:
    """Two rows of validation on three workers are counted once each; two rows of training take two workers."""
    train, validation = (tiny_parquet(tmp_path / str(n), n) for n in (40, 2))
    results = []
    for slots in (1, 3):
        compute = tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1)
        fit = tfdist.FitConfig(epochs=2, global_batch=8, output_dir=tmp_path / f"model{slots}")
        results.append(tfdist.fit(build_small, train, validation=validation, compute=compute, fit=fit))
    assert_equal(*results)
    with pytest.warns(UserWarning, match=r"compute\.slots: 2 rows train on 2 workers instead of 3"):
        few = tfdist.fit(build_small, validation, compute=compute, fit=fit)
    assert np.isfinite(few.history["loss"]).all()


def build_convolution(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    image = keras.layers.Reshape((8, 8, 1))(keras.ops.cast(inputs["image"], "float32") / 16.0)
    x = keras.layers.Conv2D(8, 3, activation="relu")(image)
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D()(x))
    model = keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_a_convolutional_net_trains_to_the_same_weights(spark: SparkSession, tmp_path: Path) -> None:
    """A small image model on 1, 2 and 3 workers: equal weights and history to 1e-6."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = [(image.ravel().tolist(), int(target)) for image, target in zip(digits.images, digits.target, strict=True)]
    frame = spark.createDataFrame(rows[:700], "image array<double>, digit int")
    train = tfdist.data.from_dataframe(frame, label="digit", cache_dir=tmp_path, dtypes={"image": "float32"})
    fit = tfdist.FitConfig(epochs=2, global_batch=60, seed=3)
    results = [
        tfdist.fit(
            build_convolution,
            train,
            compute=tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1),
            fit=fit,
        )
        for slots in (1, 2, 3)
    ]
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    assert results[0].history["accuracy"][-1] > 2 * results[0].history["accuracy"][0]


def fail_in_epoch_2() -> list[Any]:
    import keras

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and tfdist.worker_context().rank == 1:
                raise OverflowError("epoch 2 of rank 1")

    return [Fail()]


def test_an_error_in_a_callback_of_rank_1_is_raised_on_the_driver(handles: tuple[Any, Any], tmp_path: Path) -> None:
    """An error in the middle of a training arrives as itself with its rank, and no model is published."""
    output = tmp_path / "model"
    fit = tfdist.FitConfig(epochs=3, global_batch=96, output_dir=output)
    with pytest.raises(OverflowError, match="epoch 2 of rank 1") as caught:
        tfdist.fit(build_tabular, handles[0], compute=tfdist.ComputeConfig(slots=2), fit=fit, callbacks=fail_in_epoch_2)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1
    assert not output.exists()


def test_data_that_changed_behind_a_training_is_named_by_our_own_error(
    handles: tuple[Any, Any], tmp_path: Path
) -> None:
    """What goes wrong inside the pipeline is a DataError of the worker, not TensorFlow's wrapping of it."""
    copied = tfdist.data.from_parquet(shutil.copytree(handles[0].root, tmp_path / "copy"))
    (one, *_) = copied.manifest.fragments
    pq.write_table(pq.read_table(copied.root / one.path).slice(0, 5), copied.root / one.path)
    compute = tfdist.ComputeConfig(slots=2, launcher="local", threads_per_worker=1)
    with pytest.raises(DataError, match="the file was changed") as caught:
        tfdist.fit(build_tabular, copied, compute=compute, fit=tfdist.FitConfig(output_dir=tmp_path / "model"))
    assert isinstance(caught.value, WorkerError)


def test_events_tell_the_driver_each_epoch_once(handles: tuple[Any, Any]) -> None:
    """The events of a run name its start, its first step, and each epoch once with its metrics."""
    events: list[dict[str, Any]] = []
    compute = tfdist.ComputeConfig(slots=2)
    result = tfdist.fit(build_tabular, handles[0], compute=compute, fit=FIT, on_event=events.append)
    kinds = [e["kind"] for e in events if e["kind"] in ("start", "first-step", "epoch")]
    assert kinds == ["start", "first-step", "epoch", "epoch", "epoch"]
    epochs = [e for e in events if e["kind"] == "epoch"]
    assert [e["epoch"] for e in epochs] == [0, 1, 2]
    assert [e["logs"]["loss"] for e in epochs] == result.history["loss"]
    assert all(math.isfinite(e["rows_per_s"]) for e in epochs)


def test_threads_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    """A worker has as many threads after hundreds of steps with a peer as after the first epoch."""

    def count() -> list[Any]:
        import keras

        def note(_epoch: int, _logs: Any) -> None:
            with open(tmp_path / str(tfdist.worker_context().rank), "a") as file:
                file.write(f"{len(list(Path('/proc/self/task').iterdir()))}\n")

        return [keras.callbacks.LambdaCallback(on_epoch_end=note)]

    compute = tfdist.ComputeConfig(slots=2, launcher="local", threads_per_worker=1)
    fit = tfdist.FitConfig(global_batch=2, epochs=5, output_dir=tmp_path / "model")
    tfdist.fit(build_small, tiny_parquet(tmp_path / "data", 200), compute=compute, fit=fit, callbacks=count)
    for rank in "01":
        first, *_, last = map(int, (tmp_path / rank).read_text().split())
        assert last - first < 50


def test_a_dropped_remainder_is_reported(tmp_path: Path) -> None:
    """43 rows in batches of 8 without the remainder: an epoch trains on 40, and 3 are said to be left out."""
    compute = tfdist.ComputeConfig(launcher="local", threads_per_worker=1)
    fit = tfdist.FitConfig(global_batch=8, drop_remainder=True, output_dir=tmp_path / "model")
    result = tfdist.fit(build_small, tiny_parquet(tmp_path / "data", 43), compute=compute, fit=fit)
    assert (result.rows, result.dropped_rows) == (40, 3)


def test_what_cannot_be_trained_is_refused_with_all_reasons(handles: tuple[Any, Any]) -> None:
    """A batch smaller than the workers and foreign validation columns are reported together, before any launch."""
    train, _ = handles
    other = tfdist.data.from_parquet(train.root, label="late", features=["kind"])
    with pytest.raises(ConfigError) as caught:
        tfdist.fit(
            build_tabular,
            train,
            validation=other,
            compute=tfdist.ComputeConfig(slots=2),
            fit=tfdist.FitConfig(global_batch=1),
        )
    assert [p.partition(":")[0] for p in caught.value.problems] == ["fit.global_batch", "validation"]


def test_wrong_arguments_are_named(handles: tuple[Any, Any]) -> None:
    """A DataFrame in place of a handle, callbacks as a list and a forgotten return are called what they are."""
    with pytest.raises(ConfigError) as caught:
        tfdist.fit("model", {"x": [1]}, callbacks=[])  # type: ignore[arg-type]
    assert [p.partition(":")[0] for p in caught.value.problems] == ["train", "build_model", "callbacks"]
    compute = tfdist.ComputeConfig(launcher="local", threads_per_worker=1)
    with pytest.raises(ConfigError, match="build_model: expected it to return a compiled Keras model, got None"):
        tfdist.fit(lambda schema: None, handles[0], compute=compute)


def test_an_output_folder_that_the_chief_does_not_see_is_refused_before_training(tmp_path: Path) -> None:
    """A chief that does not find the driver's mark in output_dir refuses it by the setting's name."""
    with announced(tmp_path / "model", "run-1", "fit.output_dir"):
        check_announced(tmp_path / "model", "run-1")
        with pytest.raises(ConfigError, match=r"fit\.output_dir: expected a folder that the driver"):
            check_announced(tmp_path / "elsewhere", "run-1")
    assert not (tmp_path / "model").exists()
