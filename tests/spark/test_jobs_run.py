"""Whole jobs: through the command line as a person types it, and in a session that is already there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from mlflow.entities import Run
from pyspark.sql import SparkSession
from tfdist_jobs.runner import run_job
from tfdist_jobs.spec import JobSpec

import tfdist
from tfdist.errors import DataError

ROWS, EPOCHS = 900, 6


def write_job(folder: Path, **changes: Any) -> Path:
    """A small table and a job that trains on it with two workers."""
    rng = np.random.default_rng(5)
    x, kind = rng.normal(size=ROWS), rng.choice(["red", "green"], size=ROWS)
    late = (x * np.where(kind == "red", 1, -1) > 0.2).astype("float32")  # a line cannot tell, a product can
    table = pd.DataFrame({"x.1": x.astype("float32"), "kind": kind, "part": np.arange(ROWS) % 3, "late": late})
    table.loc[7, "kind"] = None
    table.to_parquet(folder / "rows.parquet")
    job = {
        "name": "small",
        "source": {"path": str(folder / "rows.parquet")},
        "prepare": {"split": {"column": "part", "train": [0], "validation": [1], "test": [2]}},
        "task": {
            "label": "late",
            "numeric": ["x.1"],
            "categorical": ["kind"],
            "hidden": [16],
            "learning_rate": 0.03,
            "schedule": "cosine",
        },
        "nulls": {"kind": {"fill": ""}},
        "fit": {"epochs": EPOCHS, "global_batch": 20, "seed": 1},
        "compute": {"slots": 2},
        "spark": {"conf": {"spark.sql.shuffle.partitions": 2}},
        "output_dir": str(folder / "output"),
        "cache_dir": str(folder / "cache"),
        **changes,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def tfdist_command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command ``tfdist``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return subprocess.run(
        ["tfdist", *arguments], cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=900
    )


def stored_runs(folder: Path, experiment: str) -> list[Run]:
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


@dataclass(frozen=True)
class Done:
    """A job that the command ran."""

    folder: Path
    output: str
    run: Run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """``tfdist run`` on the small job, with a Spark session of its own."""
    folder = tmp_path_factory.mktemp("job")
    process = tfdist_command("run", write_job(folder), cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    (run,) = stored_runs(folder, "small")
    return Done(folder, process.stdout, run)


def test_a_job_shows_its_epochs_and_sums_up(done: Done) -> None:
    """A line per epoch with the metrics, then quality beside both baselines, rows, places, and how to see the run."""
    epochs = re.findall(r"epoch (\d)/6  .*loss \d\.\d{4}.*val_auc \d\.\d{4}.* rows/s", done.output)
    assert epochs == [str(e) for e in range(1, EPOCHS + 1)]
    for text in (
        "AUC",
        "log loss",
        "model",
        "class prior",
        "logistic regression",
        "300 train, 300 validation, 300 test",
    ):
        assert text in done.output
    assert str(done.folder / "output" / "model" / "model.keras") in done.output
    assert done.run.info.run_id in done.output
    assert f"{Path(sys.prefix, 'bin', 'mlflow')} ui --backend-store-uri sqlite:///mlflow.db" in done.output


def test_a_job_is_one_finished_run_with_one_point_per_step(done: Done) -> None:
    """The run has every epoch once, the test metrics of model and baselines, parameters and data sets."""
    assert done.run.info.status == "FINISHED"
    client = mlflow.MlflowClient(f"sqlite:///{done.folder / 'mlflow.db'}")
    for metric in ("loss", "auc", "val_loss", "val_auc"):
        history = client.get_metric_history(done.run.info.run_id, metric)
        assert [point.step for point in history] == list(range(EPOCHS))
    metrics = done.run.data.metrics
    assert metrics["test_auc"] > 0.9 > metrics["logistic_regression_auc"] > metrics["class_prior_auc"] - 0.2
    assert metrics["test_log_loss"] < metrics["class_prior_log_loss"]
    assert done.run.data.params["fit.global_batch"] == "20"
    inputs = {i.tags[0].value: i.dataset for i in done.run.inputs.dataset_inputs}
    assert set(inputs) == {"train", "validation"}
    assert "rows.parquet" in inputs["train"].source
    assert {a.path for a in client.list_artifacts(done.run.info.run_id)} >= {"training.png"}


def test_the_logged_model_predicts_from_raw_columns(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mlflow.pyfunc.load_model`` gives a model with a signature that takes raw columns and predicts as ours does."""
    monkeypatch.chdir(done.folder)
    mlflow.set_tracking_uri(f"sqlite:///{done.folder / 'mlflow.db'}")
    (output,) = done.run.outputs.model_outputs
    model = mlflow.pyfunc.load_model(f"models:/{output.model_id}")
    assert [(column.name, column.type.name) for column in model.metadata.signature.inputs] == [
        ("x.1", "float"),
        ("kind", "string"),
    ]
    rows = pd.DataFrame({"x.1": np.array([1.5, -1.5, 1.5], np.float32), "kind": ["red", "red", "never seen"]})
    predicted = model.predict(rows)
    assert predicted.shape == (3,)
    assert predicted[0] > 0.5 > predicted[1]


def test_an_interrupted_job_goes_on_in_its_run(tmp_path: Path) -> None:
    """Ctrl-C in the middle, then ``tfdist run --resume``: one finished run, each epoch once."""
    job = write_job(tmp_path, fit={"epochs": 20, "global_batch": 10, "seed": 1}, baselines=[])
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    with subprocess.Popen(
        ["tfdist", "run", job], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if "epoch 2/20" in line:
                first.send_signal(signal.SIGINT)
    assert first.returncode == 130
    (run,) = stored_runs(tmp_path, "small")
    assert run.info.status == "KILLED"
    second = tfdist_command("run", job, "--resume", cwd=tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "epoch 1/20" not in second.stdout
    assert "epoch 20/20" in second.stdout
    (run,) = stored_runs(tmp_path, "small")
    assert run.info.status == "FINISHED"
    history = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in history) == list(range(20))


def test_a_job_uses_the_session_that_is_there(spark: SparkSession, tmp_path: Path) -> None:
    """With an active session the job runs in it and leaves it; a job that fails leaves one FAILED run."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    path = write_job(tmp_path, tracking={"uri": uri, "experiment": "failing"}, nulls={})
    with pytest.raises(DataError, match="kind"):
        run_job(JobSpec.from_yaml(path))
    (run,) = stored_runs(tmp_path, "failing")
    assert run.info.status == "FAILED"
    assert spark.range(3).count() == 3


def test_a_check_reports_everything_at_once(tmp_path: Path) -> None:
    """``tfdist check`` finds nulls and too many slots together, in sentences, and exits with 1."""
    path = write_job(tmp_path, nulls={})
    process = tfdist_command("check", path, "--set", "compute.slots=5", "--set", "spark.master=local[2]", cwd=tmp_path)
    assert process.returncode == 1, process.stderr
    assert "compute.slots: 5 tasks must run at the same time" in process.stderr
    assert "nulls.kind: expected no nulls in 'kind', got 1" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "mlflow.db").exists()


def test_a_check_shows_what_the_model_is_given(tmp_path: Path) -> None:
    """``tfdist check`` of a good job prints each column, its type, tensor, nulls and policy, and trains nothing.

    The lines are not wrapped where the output is no terminal.
    """
    nulls = {"kind": {"fill": "a colour that no row of this table has"}, "x.1": "mask"}
    path = write_job(tmp_path, nulls=nulls)
    process = tfdist_command("check", path, "--set", "spark.master=local[2]", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "small: the training and validation data" in process.stdout
    table = re.sub("[┃│]", "|", process.stdout)
    for line in (
        "| column | Spark type | tensor of a row | nulls | policy |",
        "| x.1 | float | float32[] | 0 | mask |",
        "| x.1_is_null | nulls of x.1 | bool[] | | |",
        "| kind | string | string[] | 1 | fill 'a colour that no row of this table has' |",
        "| late (label) | float | float32[] | 0 | error |",
    ):
        assert line in [" ".join(found.split()) for found in table.splitlines()], line
    assert not (tmp_path / "output").exists()


def test_a_broken_job_file_is_explained_without_a_traceback(tmp_path: Path) -> None:
    """Problems of the file go to standard error, one a line; ``--traceback`` adds where they were raised."""
    path = write_job(tmp_path, fit={"epoch": 3}, trackin={})
    process = tfdist_command("run", path, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["tfdist", "fit.epoch"], ["tfdist", "trackin"]]
    assert "did you mean 'epochs'?" in lines[0]
    assert "Traceback" in tfdist_command("run", path, "--traceback", cwd=tmp_path).stderr


def test_the_command_says_its_version_and_refuses_nonsense(tmp_path: Path) -> None:
    """``--version`` prints the version; an unknown command and a missing file exit with 2."""
    assert tfdist_command("--version", cwd=tmp_path).stdout == f"tfdist {tfdist.__version__}\n"
    assert tfdist_command("trian", cwd=tmp_path).returncode == 2
    missing = tfdist_command("run", "nowhere.yaml", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nowhere.yaml: expected a readable job file" in missing.stderr
