"""A training goes on with other workers than it began with: the same batches, and the same result up to rounding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import ConfigError, PreflightError, WorkerError
from tfdist.testing import tiny_parquet

ROOT = Path(__file__).parents[2]
# 210 rows in batches of 16 are 14 steps, the last two with 9 rows each.
ROWS, STEPS, EPOCHS = 210, 14, 3
SEED = int(os.environ.get("TFDIST_TEST_SEED", "20"))
FIT = tfdist.FitConfig(epochs=EPOCHS, global_batch=16, seed=5, checkpoint_every_steps=5)
TWO = tfdist.ComputeConfig(slots=2, launcher="local", threads_per_worker=1)


def build(schema: tfdist.data.Schema) -> Any:
    """Nothing in it depends on which worker a row is on; sums and means are among what a checkpoint keeps."""
    import keras

    inputs = schema.keras_inputs()
    total = keras.layers.Concatenate()([keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)])
    # A bias here has no gradient but rounding, which Adam makes large.
    hidden = keras.layers.Dense(8, use_bias=False)(total)
    hidden = keras.layers.Activation("relu")(keras.layers.BatchNormalization(synchronized=True)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["mae", keras.metrics.AUC(name="auc")])
    return model


class Killed:
    """Callbacks that kill the process of a rank after some steps of the whole training, each once.

    Args:
        folder: where what has happened is noted.
        kills: step and rank.
    """

    def __init__(self, folder: Path, *kills: tuple[int, int]) -> None:
        self.folder, self.kills = folder, kills

    def __call__(self) -> list[Any]:
        import keras

        folder, kills = self.folder, self.kills

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                step, rank = int(self.model.optimizer.iterations.numpy()), tfdist.worker_context().rank
                mark = folder / f"{step}-{rank}"
                if (step, rank) in kills and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return [Kill()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("rows")
    return tiny_parquet(folder / "train", ROWS, seed=1), tiny_parquet(folder / "validation", 50, seed=2)


def trained(data: tuple[Any, Any], folder: Path, kills: Any = (), **changes: Any) -> tfdist.FitResult:
    """One training in ``folder``; ``changes`` are of its settings."""
    compute = replace(TWO, **{k: changes.pop(k) for k in ("slots", "max_restarts", "min_slots") if k in changes})
    fit = replace(FIT, **{"output_dir": folder / "model", **changes})
    return tfdist.fit(
        build,
        data[0],
        validation=data[1],
        compute=compute,
        fit=fit,
        callbacks=Killed(folder, *kills),
        on_event=lambda event: None,
    )


@pytest.fixture(scope="module")
def undisturbed(data: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> tfdist.FitResult:
    return trained(data, tmp_path_factory.mktemp("undisturbed"), checkpoint_every_steps=None)


def weights(result: tfdist.FitResult) -> list[tuple[str, np.ndarray]]:
    model = result.model()
    return [(v.path, np.asarray(v)) for v in model.weights + model.optimizer.variables]


@seed(SEED)
@settings(max_examples=2, phases=[Phase.generate], database=None)
@given(
    st.lists(
        st.tuples(st.integers(1, STEPS * EPOCHS), st.integers(0, 1)), min_size=2, max_size=2, unique_by=lambda k: k[0]
    )
)
def test_kills_at_any_steps_change_no_digit(
    data: tuple[Any, Any],
    undisturbed: tfdist.FitResult,
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[tuple[int, int]],
) -> None:
    """Whichever process is killed with kill -9 after whichever steps: the same number of workers ends exactly alike."""
    result = trained(data, tmp_path_factory.mktemp("killed"), kills, max_restarts=2)
    assert (result.restarts, result.world_sizes) == (2, (2, 2, 2))
    assert result.history == undisturbed.history
    for (path, got), (_, wanted) in zip(weights(result), weights(undisturbed), strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=path)


def test_other_numbers_of_workers_go_on_in_the_middle_of_an_epoch(
    data: tuple[Any, Any], undisturbed: tfdist.FitResult, tmp_path: Path
) -> None:
    """Two workers, then three, then one: weights, optimizer and metrics are those of two up to rounding.

    The metrics are those of whole epochs, of which each number of workers has seen a part.
    """
    with pytest.raises(WorkerError, match="SIGKILL"):
        trained(data, tmp_path, [(22, 1), (37, 2)])
    told = r"step-0000000\d\d was written by 2 workers, and 3 go on with it"
    with pytest.warns(UserWarning, match=told), pytest.raises(WorkerError, match="SIGKILL"):
        trained(data, tmp_path, [(22, 1), (37, 2)], slots=3, resume=True)
    with pytest.warns(UserWarning, match=r"step-0000000\d\d was written by 3 workers, and 1 go on with it"):
        result = trained(data, tmp_path, slots=1, resume=True)
    assert result.world_sizes == (1,)
    assert len(result.workers) == 1
    assert result.history.keys() == undisturbed.history.keys()
    for name, values in result.history.items():
        np.testing.assert_allclose(values, undisturbed.history[name], rtol=1e-5, err_msg=name)
    for (path, got), (_, wanted) in zip(weights(result), weights(undisturbed), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6, err_msg=path)


def test_more_workers_than_rows_of_the_last_batch_are_refused(data: tuple[Any, Any], tmp_path: Path) -> None:
    """The batches are those of the first launch; workers for which these have too few rows do not start."""
    trained(data, tmp_path, slots=1, epochs=1)
    with (
        pytest.warns(UserWarning, match="go on with it"),
        pytest.raises(ConfigError, match="slots: expected at most 9"),
    ):
        trained(data, tmp_path, slots=10, resume=True)


def test_a_lost_host_costs_a_worker_and_a_new_one_brings_it_back(tmp_path: Path) -> None:
    """Three workers, two after a Worker of the cluster is killed for good, three when another one has joined.

    Each step sees exactly the rows of an undisturbed training by one process, whenever it is computed; the losses are
    that one's up to rounding; the result and the lines say with how many workers it went on.
    """
    file = tmp_path / "outcome.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    command = [sys.executable, "benchmarks/elastic.py", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    outcome = json.loads(file.read_text())
    # On a host that is busy Spark may lose one more executor, and get it back.
    assert [size for size, _ in groupby(outcome["world_sizes"])] == [3, 2, 3], outcome["told"]
    assert outcome["ranks"] == [0, 1, 2]
    assert (outcome["steps"], outcome["same_rows"]) == (57, True)
    assert outcome["steps_again"] >= 1
    assert outcome["loss_difference"] < 1e-5
    told = "\n".join(outcome["told"])
    assert "waiting for the cluster: 2/3 slots, since rank 2 on 127.0.0.1" in told
    assert "with 2 of 3 workers: rank 2 on 127.0.0.1: SparkExecutorLost" in told
    assert "with 3 of 3 workers: rank 0 on 127.0.0.1: SIGKILL" in told


def test_a_launch_begins_with_the_slots_that_are_there(
    spark: SparkSession, data: tuple[Any, Any], undisturbed: tfdist.FitResult, tmp_path: Path
) -> None:
    """A session of two slots trains three workers' training with two, where these will do; else it is refused."""
    events: list[dict[str, Any]] = []
    compute = tfdist.ComputeConfig(slots=3, min_slots=2, threads_per_worker=1)
    fit = replace(FIT, output_dir=tmp_path / "model", checkpoint_every_steps=None)
    result = tfdist.fit(
        build, data[0], validation=data[1], compute=compute, fit=fit, spark=spark, on_event=events.append
    )
    assert result.world_sizes == (2,)
    assert [(e["workers"], e["slots"]) for e in events if e["kind"] == "world"] == [(2, 3)]
    assert result.history == undisturbed.history
    with pytest.raises(PreflightError, match=r"compute\.min_slots: 3 tasks must run at the same time"):
        tfdist.fit(build, data[0], compute=replace(compute, slots=4, min_slots=3), fit=fit, spark=spark)
