"""Runs a job from its spec to the summary."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

import tfdist
from tfdist.config import ComputeConfig
from tfdist.data import Handle, from_dataframe
from tfdist.data.location import open_storage
from tfdist.errors import ConfigError, PreflightError
from tfdist.train.console import shown

from .cluster import look_at_cluster
from .report import say, summary, training_curve
from .result import JobResult
from .session import job_session
from .source import Parts, open_source, prepare
from .spec import Fill, JobSpec
from .tasks import Task, task_of
from .tracking import Run, tracked_run

FIGURE = "training.png"


def run_job(spec: JobSpec, console: Console | None = None, *, resume: bool = False) -> JobResult:
    """Prepare, train, track and score as ``spec`` says, and print the summary.

    The active Spark session is used; without one the job makes its own and stops it.

    Args:
        spec: the job.
        console: where progress and summary go; by default standard output.
        resume: go on from the newest checkpoint of an earlier process with this job, in the same MLflow run.

    Returns:
        The outcome, as printed.

    Raises:
        ConfigError: something in the job is wrong.
        DataError: the rows do not fit the job.
        WorkerError: the training failed.
    """
    console = console or Console()
    clock = _Clock(console)
    clock.start("session", "starting Spark")
    with job_session(spec.spark, spec.name) as spark:
        found = look_at_cluster(spec, spark)
        if found.problems:
            raise PreflightError(found.problems)
        clock.start("prepare", f"preparing {spec.source.text}")
        task = task_of(spec)
        parts = prepared_parts(spark, spec, task)
        resume = resume or spec.fit.resume
        with tracked_run(spec, resume=resume) as run:
            result = _train_and_measure(spec, task, parts, run, clock, resume)
    summary(result, console)
    return result


def prepared_parts(spark: SparkSession, spec: JobSpec, task: Task) -> Parts:
    """The parts of a job with the task's columns; nothing is computed yet.

    Raises:
        ConfigError: the source cannot be read, or expressions, columns or types are wrong.
    """
    parts = prepare(source_of(spark, spec), spec, task.places)
    problems = task.check(parts.train.schema)
    if problems:
        raise ConfigError(problems)
    return parts


def source_of(spark: SparkSession, spec: JobSpec) -> DataFrame:
    """The source of a job.

    Raises:
        ConfigError: it cannot be read.
    """
    cache = None if spec.cache_dir is None else open_storage(spec.cache_dir, where="cache_dir").location
    return open_source(spark, spec.source, cache if isinstance(cache, Path) else None)


def null_policies(spec: JobSpec) -> dict[str, Any]:
    """The null policies of a job as :func:`tfdist.data.from_dataframe` takes them."""
    return {name: ("fill", value.fill) if isinstance(value, Fill) else value for name, value in spec.nulls.items()}


def _train_and_measure(spec: JobSpec, task: Task, parts: Parts, run: Run, clock: _Clock, resume: bool) -> JobResult:
    build_model = task.learn(parts.train)
    train = _handle(parts.train, spec, task, "train")
    validation = _handle(parts.validation, spec, task, "validation")
    rows = {"train": train.rows, "validation": validation.rows, "test": parts.test.count()}
    if not rows["test"]:
        raise ConfigError(f"prepare.split.test: expected rows, got none for {spec.prepare.split.test}")
    digests = {"train": train.manifest.fingerprint, "validation": validation.manifest.fingerprint}
    for part, digest in digests.items():
        run.log_input(spec.source.text, digest, part, rows[part])

    clock.start("train", f"training on {rows['train']:,} rows with {_wanted(spec.compute)} workers")

    output_dir = Path(spec.output_dir).absolute()
    fit = dataclasses.replace(
        spec.fit,
        output_dir=spec.fit.output_dir or output_dir / "model",
        checkpoint_dir=spec.fit.checkpoint_dir or output_dir / "checkpoints",
        resume=resume,
    )
    with shown(clock.console, indent="  ", workers=True) as display:

        def on_event(event: dict[str, Any]) -> None:
            display(event)
            run.on_event(event)

        fit = dataclasses.replace(fit, verbose=0) if display.live else fit  # the display takes the place of Keras' bar
        fitted = tfdist.fit(build_model, train, validation=validation, compute=spec.compute, fit=fit, on_event=on_event)
    run.log_missing(fitted.history)

    clock.start("score", f"scoring {rows['test']:,} test rows")
    test = task.measure(tfdist.score(parts.test, fitted))
    clock.start("baselines", f"computing {len(spec.baselines)} baselines")
    baselines: dict[str, dict[str, float]] = {
        name: task.measure(task.baselines[name](parts.train, parts.test)) for name in spec.baselines
    }

    clock.start("track", "logging the model")
    figure = training_curve(fitted.history, spec.name)
    output_dir.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_dir / FIGURE)
    run.log_figure(figure, FIGURE)
    run.log_model(fitted.model_path, train.schema)
    run.log_metrics({f"test_{metric}": value for metric, value in test.items()})
    run.log_metrics({f"{name}_{metric}": v for name, values in baselines.items() for metric, v in values.items()})
    return JobResult(
        name=spec.name,
        test=test,
        baselines=baselines,
        history=fitted.history,
        rows=rows,
        dropped_rows=fitted.dropped_rows,
        rows_per_s=fitted.rows_per_s,
        seconds=clock.stop(),
        workers=tuple(fitted.workers),
        world_sizes=fitted.world_sizes,
        model_path=fitted.model_path,
        figure_path=output_dir / FIGURE,
        tracking_uri=run.uri,
        experiment=run.experiment,
        run_id=run.run_id,
    )


def _wanted(compute: ComputeConfig) -> str:
    least = compute.min_slots
    return str(compute.slots) if least in (None, compute.slots) else f"{least} to {compute.slots}"


def _handle(part: DataFrame, spec: JobSpec, task: Task, name: str) -> Handle:
    return from_dataframe(
        part, cache_dir=spec.cache_dir, label=task.label, nulls=null_policies(spec), name=f"{spec.name}-{name}"
    )


class _Clock:
    """Wall seconds of phases that follow one another; says what begins."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begun: dict[str, float] = {}

    def start(self, phase: str, text: str) -> None:
        """End the phase before and begin ``phase``."""
        self._begun[phase] = time.perf_counter()
        say(self.console, text)

    def stop(self) -> dict[str, float]:
        """End the last phase; the seconds of each, and of all."""
        names, times = list(self._begun), [*self._begun.values(), time.perf_counter()]
        seconds = {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
        return {**seconds, "total": times[-1] - times[0]}
