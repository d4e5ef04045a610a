"""Trainings that are killed or stopped go on, and end exactly as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import ConfigError, WorkerError
from tfdist.testing import tiny_parquet

# 210 rows in batches of 16 are 14 steps, the last one with 2 rows.
ROWS, STEPS, EPOCHS = 210, 14, 4
FIT = tfdist.FitConfig(epochs=EPOCHS, global_batch=16, seed=5, checkpoint_every_steps=5)
ONE = tfdist.ComputeConfig(launcher="local", threads_per_worker=1, max_restarts=2)
TWO = replace(ONE, slots=2)


def build(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    total = keras.layers.Concatenate()([keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(total))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dropout(0.3)(hidden)))
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["mae", keras.metrics.AUC(name="auc")])
    return model


def build_with_more_state(schema: tfdist.data.Schema) -> Any:
    import keras

    model = build(schema)
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, use_ema=True)
    model.compile(
        keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=5),
        "binary_crossentropy",
        metrics=["mae"],
        steps_per_execution=4,
    )
    return model


def watching() -> list[Any]:
    """Callbacks whose decisions depend on what they saw in earlier epochs."""
    import keras

    return [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.001, restore_best_weights=True),
    ]


class Killed:
    """Callbacks that kill the process of a rank, once in the life of a training, after a step counted from its start.

    Args:
        mark: a file that says that it has happened.
        at_step: after which step.
        rank: whose process.
        watched: with callbacks that look at the validation.
    """

    def __init__(self, mark: Path, at_step: int, rank: int = 0, watched: bool = True) -> None:
        self.mark, self.at_step, self.rank, self.watched = mark, at_step, rank, watched

    def __call__(self) -> list[Any]:
        import keras

        killed = self

        class Kill(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.steps = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.steps += self.model.steps_per_execution
                due = self.steps >= killed.at_step and tfdist.worker_context().rank == killed.rank
                if due and not killed.mark.exists():
                    killed.mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return [*(watching() if killed.watched else ()), Kill()]


class Never(Killed):
    """The same callbacks, and nothing happens."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), 10**9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("rows")
    return tiny_parquet(folder / "train", ROWS, seed=1), tiny_parquet(folder / "validation", 50, seed=2)


@pytest.fixture(scope="module")
def undisturbed(data: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tfdist.FitResult]:
    """The same training without checkpoints, by one and by two workers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fit = replace(FIT, checkpoint_every_steps=None)
    results = {}
    for name, compute, model in (("one", ONE, build), ("two", TWO, build), ("more", TWO, build_with_more_state)):
        results[name] = tfdist.fit(
            model,
            data[0],
            validation=data[1],
            compute=replace(compute, max_restarts=0),
            fit=replace(fit, output_dir=folder / name),
            callbacks=Never(),
        )
    return results


def assert_same(result: tfdist.FitResult, wanted: tfdist.FitResult) -> None:
    """History, weights and optimizer, bit for bit."""
    assert result.history == wanted.history
    got, expected = result.model(), wanted.model()
    for a, b in zip(
        got.weights + got.optimizer.variables, expected.weights + expected.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)


SEED = int(os.environ.get("TFDIST_TEST_SEED", "20"))
CHANCE = random.Random(SEED)
KILLS = [
    ("one", ONE, build, 0, CHANCE.randrange(1, STEPS * 3)),
    ("two", TWO, build, 1, CHANCE.randrange(1, STEPS * 3)),
    ("more", TWO, build_with_more_state, 0, CHANCE.randrange(1, STEPS * 3)),
]


@pytest.mark.parametrize(("name", "compute", "model", "rank", "step"), KILLS, ids=lambda v: str(v)[:10])
def test_a_killed_process_costs_nothing_but_time(
    name: str,
    compute: tfdist.ComputeConfig,
    model: Any,
    rank: int,
    step: int,
    data: tuple[Any, Any],
    undisturbed: dict[str, tfdist.FitResult],
    tmp_path: Path,
) -> None:
    """After kill -9 at any step the training goes on from its last checkpoint, to exactly the weights and history."""
    events: list[dict[str, Any]] = []
    result = tfdist.fit(
        model,
        data[0],
        validation=data[1],
        compute=compute,
        fit=replace(FIT, output_dir=tmp_path / "model"),
        callbacks=Killed(tmp_path / "mark", step, rank),
        on_event=events.append,
    )
    assert_same(result, undisturbed[name])
    assert result.restarts == 1
    (restart,) = [e for e in events if e["kind"] == "restart"]
    assert restart["attempt"] == 1
    assert "SIGKILL" in restart["cause"]
    assert [e["epoch"] for e in events if e["kind"] == "epoch"] == list(range(len(result.history["loss"])))


def test_a_process_killed_on_spark_costs_nothing_but_time(
    spark: SparkSession, data: tuple[Any, Any], undisturbed: dict[str, tfdist.FitResult], tmp_path: Path
) -> None:
    """A barrier stage that lost a worker is launched again by the driver, and ends as the undisturbed one."""
    result = tfdist.fit(
        build,
        data[0],
        validation=data[1],
        compute=replace(TWO, launcher="spark"),
        fit=replace(FIT, output_dir=tmp_path / "model"),
        callbacks=Killed(tmp_path / "mark", 23, rank=1),
        spark=spark,
    )
    assert_same(result, undisturbed["two"])
    assert result.restarts == 1


def test_a_stream_begins_anew_and_cannot_be_gone_on_with(spark: SparkSession, tmp_path: Path) -> None:
    """Rows that arrive once are handed out again from their beginning; checkpoints of a stream are refused."""
    frame = spark.createDataFrame(pq.read_table(tiny_parquet(tmp_path, 60).root).to_pandas()).repartition(2)
    rows = tfdist.data.stream(frame, label="label", features=["x0", "x1", "x2"])
    with pytest.raises(ConfigError) as caught:
        tfdist.fit(build, rows, fit=replace(FIT, resume=True, output_dir=tmp_path / "model"), spark=spark)
    assert [p.partition(":")[0] for p in caught.value.problems] == ["fit.checkpoint_every_steps", "fit.resume"]
    events: list[dict[str, Any]] = []
    result = tfdist.fit(
        build,
        rows,
        compute=tfdist.ComputeConfig(max_restarts=1, threads_per_worker=1),
        fit=tfdist.FitConfig(epochs=3, global_batch=16, output_dir=tmp_path / "model"),
        callbacks=Killed(tmp_path / "mark", 6, watched=False),
        spark=spark,
        on_event=events.append,
    )
    assert [(e["attempt"], e["step"]) for e in events if e["kind"] == "restart"] == [(1, 0)]
    assert len(result.history["loss"]) == 3
    assert [e["epoch"] for e in events if e["kind"] == "epoch"] == [0, 1, 2]


def quiet(event: dict[str, Any]) -> None:
    """No lines."""


def trained(data: tuple[Any, Any], folder: Path, callbacks: Any, **changes: Any) -> tfdist.FitResult:
    """One worker on the common model; ``changes`` are of its settings."""
    compute = replace(ONE, max_restarts=changes.pop("max_restarts", 0))
    model = changes.pop("model", build)
    fit = replace(FIT, **{"output_dir": folder / "model", **changes})
    return tfdist.fit(model, data[0], validation=data[1], compute=compute, fit=fit, callbacks=callbacks, on_event=quiet)


def test_a_stopped_training_goes_on_when_it_is_asked_to(
    data: tuple[Any, Any], undisturbed: dict[str, tfdist.FitResult], tmp_path: Path
) -> None:
    """After an end in the middle ``resume`` takes the newest good checkpoint, past a damaged one, to the same end.

    Asked again, it finds nothing left to do and gives the same model.
    """
    ending = Killed(tmp_path / "mark", 34)
    with pytest.raises(WorkerError, match="SIGKILL"):
        trained(data, tmp_path, ending)
    folder = tmp_path / "model.checkpoints"
    # The write in flight may be lost with the process, all before it are there; so may be one that it was to remove.
    *_, before, newest = sorted(p for p in folder.glob("step-*") if not p.suffix)
    assert before.name >= "step-000000020"
    file = newest / "rank-00000.npz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        result = trained(data, tmp_path, ending, resume=True)
    assert_same(result, undisturbed["one"])
    again = trained(data, tmp_path, ending, resume=True)
    assert_same(again, undisturbed["one"])
    assert again.history == result.history


def test_a_finished_training_is_made_longer(
    data: tuple[Any, Any], undisturbed: dict[str, tfdist.FitResult], tmp_path: Path
) -> None:
    """Two epochs and then two more are four; what another training would need is refused by name."""
    every_epoch = {"checkpoint_every_steps": None, "checkpoint_dir": tmp_path / "kept", "keep_checkpoints": 1}
    trained(data, tmp_path, Never(), epochs=2, **every_epoch)
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["step-000000028"]
    with pytest.raises(ConfigError) as caught:
        trained(data, tmp_path, Never(), **every_epoch, resume=True, seed=6, global_batch=8)
    assert [p.partition(":")[0] for p in caught.value.problems] == ["fit.global_batch", "fit.seed"]
    with pytest.raises(
        ConfigError, match=r"of another model: expected dense/kernel \[3, 8\] float32, got dense_1/kernel \[3, 9\]"
    ):
        trained(data, tmp_path, Never(), **every_epoch, resume=True, model=build_wider)
    with pytest.raises(ConfigError, match="was written with the callbacks ReduceLROnPlateau, EarlyStopping, Kill"):
        trained(data, tmp_path, watching, **every_epoch, resume=True)
    assert_same(trained(data, tmp_path, Never(), **every_epoch, resume=True), undisturbed["one"])


def build_wider(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    total = keras.layers.Concatenate()([keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(9)(total)))
    model.compile("adam", "binary_crossentropy")
    return model


def failing_at_step_7() -> list[Any]:
    import keras

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) >= 7:
                raise OverflowError("too much")

    return [Fail()]


def test_an_error_that_returns_without_progress_is_raised(data: tuple[Any, Any], tmp_path: Path) -> None:
    """An error of the user's code is tried once more; the same error before the next checkpoint ends the training."""
    events: list[dict[str, Any]] = []
    fit = replace(FIT, output_dir=tmp_path / "model")
    with pytest.raises(OverflowError, match=r"too much[\s\S]*after 1 of 5 restarts"):
        tfdist.fit(
            build,
            data[0],
            compute=replace(ONE, max_restarts=5),
            fit=fit,
            callbacks=failing_at_step_7,
            on_event=events.append,
        )
    assert [(e["attempt"], e["step"]) for e in events if e["kind"] == "restart"] == [(1, 5)]


def test_what_restarts_cannot_mend_is_raised_at_once(data: tuple[Any, Any], tmp_path: Path) -> None:
    """A mistake in the settings, found on a worker, is not tried again; nor is anything after the last restart."""
    with pytest.raises(ConfigError, match="expected it to return a compiled Keras model, got None") as caught:
        trained(data, tmp_path, None, model=lambda schema: None, max_restarts=3)
    assert "restarts" not in str(caught.value)
    with pytest.raises(WorkerError, match=r"SIGKILL[\s\S]*after 1 of 1 restarts"):
        trained(data, tmp_path, killed_at_its_first_step, max_restarts=1)


def killed_at_its_first_step() -> list[Any]:
    import keras

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    return [Kill()]
