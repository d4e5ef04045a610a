"""``tfdist.fit``: plans a training on the driver, launches it and brings back the result."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tfdist.config import ComputeConfig, FitConfig
from tfdist.data import Handle, Stream
from tfdist.errors import ConfigError, DivergenceError
from tfdist.launch.local import LocalLauncher
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import Event, LaunchPlan, OnEvent, new_run_id
from tfdist.train.console import print_event
from tfdist.train.publish import announced
from tfdist.train.task import BuildCallbacks, BuildModel, FitTask, TrainingData, epoch_rows
from tfdist.train.worker import fit_on_worker


@dataclass(frozen=True)
class FitResult:
    """A finished training.

    Attributes:
        history: for each metric its value after each epoch, over all rows of all workers.
        model_path: the trained model in Keras' own format, with its schema in the same folder.
        rows: training rows of an epoch.
        dropped_rows: rows that ``drop_remainder`` leaves out of each epoch (others in each where they are shuffled).
        rows_per_s: training rows per second over all workers, median of the epochs after the first (which also traces
            the graph), or of the only one.
        seconds: wall seconds by phase: ``launch``, ``build``, ``train``, ``save``, ``total``.
        workers: for each rank its ``rank``, ``host``, ``pid`` and ``devices``.
        run_id: identifies the launch.
    """

    history: Mapping[str, list[float]]
    model_path: Path
    rows: int
    dropped_rows: int
    rows_per_s: float
    seconds: Mapping[str, float]
    workers: tuple[Mapping[str, Any], ...]
    run_id: str

    def model(self) -> Any:
        """Load the trained model (a compiled ``keras.Model``) in this process."""
        import keras

        return keras.saving.load_model(self.model_path)


def fit(
    build_model: BuildModel,
    train: Handle | Stream,
    *,
    validation: Handle | None = None,
    compute: ComputeConfig | None = None,
    fit: FitConfig | None = None,
    callbacks: BuildCallbacks | None = None,
    spark: Any = None,
    on_event: OnEvent | None = None,
) -> FitResult:
    """Train a Keras model data-parallel on Spark.

    Args:
        build_model: called with the schema of ``train`` on every worker, inside the strategy; returns a compiled model.
        train: the training rows, with a label; of a stream with ``launcher="spark"`` only.
        validation: rows to evaluate after each epoch.
        compute: where to run; by default one slot.
        fit: how to train.
        callbacks: called on every worker, returns a list of Keras callbacks. All workers must get the same kinds of
            callbacks, since a stop on one is a stop on all.
        spark: the session to use; by default the active one.
        on_event: receives the events of the run in place of the printed lines.

    Returns:
        The history, the path of the model and what was measured.

    Raises:
        ConfigError: settings or data cannot be trained as asked; raised before a worker starts.
        WorkerError: the training failed on a worker; also of that exception's own type.
        DivergenceError: the workers ended with different weights.
    """
    compute, fit = compute or ComputeConfig(), fit or FitConfig()
    _check_arguments(build_model, train, validation, callbacks)
    compute = _with_rows_for_all(compute, train)
    run_id = new_run_id()
    output_dir = _output_dir(fit, train, run_id)
    _check(train, validation, compute, fit, output_dir)
    data, rows = _for_workers(train, compute, fit)
    task = FitTask(build_model, data, validation, compute, fit, callbacks, output_dir)
    program = dump_program(partial(_fit_as_json, task), "build_model and callbacks")
    log = _RunLog(on_event or print_event)
    launched = time.perf_counter()
    with announced(task.output_dir, run_id):
        texts = launch(program, compute, LaunchPlan.of(compute, run_id, results="all"), spark, log, rows)
    total_s = time.perf_counter() - launched
    outcomes = [json.loads(text) for text in texts]
    if len({o["digest"] for o in outcomes}) != 1:
        raise DivergenceError(
            f"run {run_id}: {len(outcomes)} workers ended with different weights; was the model built by build_model, "
            "and do all callbacks act alike on every worker?"
        )
    chief = outcomes[0]
    timed = sorted(chief["epoch_seconds"][1:] or chief["epoch_seconds"])
    phases, used = chief["seconds"], epoch_rows(data, fit)
    return FitResult(
        history=chief["history"],
        model_path=Path(chief["model_path"]),
        rows=used,
        dropped_rows=train.rows - used,
        rows_per_s=used / timed[len(timed) // 2],
        seconds={"launch": total_s - sum(phases.values()), **phases, "total": total_s},
        workers=tuple(log.workers[rank] for rank in sorted(log.workers)),
        run_id=run_id,
    )


def launch(
    program: bytes,
    compute: ComputeConfig,
    plan: LaunchPlan,
    spark: Any,
    on_event: Callable[[Event], None],
    rows: Any = None,
) -> list[bytes]:
    """Run ``program`` on the workers that ``compute`` asks for, which get the partitions of the frame ``rows``.

    Raises:
        ConfigError: the Spark launcher was asked for and there is no session.
    """
    if compute.launcher == "local":
        return LocalLauncher().launch(program, plan, on_event)
    from tfdist.launch.spark import SparkLauncher, active_session

    session = spark or (active_session() if rows is None else rows.sparkSession)
    return SparkLauncher(session, compute.startup_timeout_s).launch(program, plan, on_event, rows)


class _RunLog:
    """Notes who took part and passes every other event on."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event = on_event
        self.workers: dict[int, Mapping[str, Any]] = {}

    def __call__(self, event: Event) -> None:
        if event["kind"] == "joined":
            self.workers[event["rank"]] = {k: event[k] for k in ("rank", "host", "pid", "devices")}
        self.on_event(event)


def _fit_as_json(task: FitTask) -> bytes:
    return json.dumps(fit_on_worker(task)).encode()


def _output_dir(fit: FitConfig, train: Handle | Stream, run_id: str) -> Path:
    if fit.output_dir is not None:
        return Path(fit.output_dir).absolute()
    return train.model_root / run_id


def _check_arguments(build_model: Any, train: Any, validation: Any, callbacks: Any) -> None:
    problems = []
    if not isinstance(train, Handle | Stream):
        problems.append(
            "train: expected the handle of tfdist.data.from_dataframe or from_parquet, or a tfdist.data.stream, got "
            f"{type(train).__qualname__}"
        )
    if not isinstance(validation, Handle | None):
        hint = "; it is read anew after each epoch, and a job has one stream: use from_dataframe for it"
        problems.append(
            "validation: expected the handle of tfdist.data.from_dataframe or from_parquet, got "
            f"{type(validation).__qualname__}{hint if isinstance(validation, Stream) else ''}"
        )
    if not callable(build_model):
        problems.append(f"build_model: expected a function of the schema, got {type(build_model).__qualname__}")
    if callbacks is not None and not callable(callbacks):
        problems.append(
            f"callbacks: expected a function that returns a list, got {type(callbacks).__qualname__}; it is called on "
            "every worker, since callbacks do not travel"
        )
    if problems:
        raise ConfigError(problems)


def _for_workers(train: Handle | Stream, compute: ComputeConfig, fit: FitConfig) -> tuple[TrainingData, Any]:
    """What the workers are told of the data, and the frame whose partitions Spark hands to them, if any."""
    return (train, None) if isinstance(train, Handle) else train.dealt(compute.slots, fit.global_batch, fit.epochs)


def _with_rows_for_all(compute: ComputeConfig, train: Handle | Stream) -> ComputeConfig:
    """As many workers as there are rows at most: a worker without a row has nothing to normalise by."""
    slots = min(compute.slots, max(train.rows, 1))
    if slots < compute.slots:
        warnings.warn(
            f"compute.slots: {train.rows} rows train on {slots} workers instead of {compute.slots}", stacklevel=3
        )
    return replace(compute, slots=slots)


def _check(
    train: Handle | Stream, validation: Handle | None, compute: ComputeConfig, fit: FitConfig, output_dir: Path
) -> None:
    problems = []
    slots = compute.slots
    if compute.launcher == "local" and isinstance(train, Stream):
        problems.append(
            "train: a stream is handed to the workers by Spark, got compute.launcher='local'; use from_dataframe, or "
            "launcher='spark'"
        )
    if fit.drop_remainder and isinstance(train, Stream):
        problems.append(
            "fit.drop_remainder: a stream has no remainder, its rows are spread evenly over the steps; leave it out"
        )
    if train.schema.label is None:
        problems.append("train: expected a label; name it with from_dataframe(..., label=...)")
    if fit.global_batch < slots:
        problems.append(
            f"fit.global_batch: expected at least a row for each of {slots} workers, got {fit.global_batch}"
        )
    empty = (name for name, data in (("train", train), ("validation", validation)) if data and not data.rows)
    problems += [f"{name}: expected at least a row, got an empty data set; check its filters" for name in empty]
    if validation is not None and validation.element_spec_text != train.element_spec_text:
        wanted, got = train.element_spec_text.splitlines(), validation.element_spec_text.splitlines()
        missing, other = (", ".join(x for x in a if x not in b) for a, b in ((wanted, got), (got, wanted)))
        problems.append(
            f"validation: expected the columns and tensors of train ({missing or 'in that order'}), got "
            f"{other or 'fewer'}; dtypes decides how arrays are laid out"
        )
    if output_dir.is_file():
        problems.append(f"fit.output_dir: expected a folder, got the file {output_dir}")
    if problems:
        raise ConfigError(problems)
