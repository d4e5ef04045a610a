"""Trainings that are killed or stopped go on, and end exactly as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfdist
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
        how: called in that process.
    """

    def __init__(self, mark: Path, at_step: int, rank: int = 0, how: Callable[[], None] | None = None) -> None:
        self.mark, self.at_step, self.rank, self.how = mark, at_step, rank, how

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
                    killed.how() if killed.how else os.kill(os.getpid(), signal.SIGKILL)

        return [*watching(), Kill()]


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
