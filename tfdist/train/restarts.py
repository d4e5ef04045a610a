"""On the driver: which checkpoint a training goes on from, and launching it again when a worker died."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tfdist.config import ComputeConfig, FitConfig
from tfdist.data import Handle, Stream
from tfdist.data.batches import plan_batches
from tfdist.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    LaunchError,
    PreflightError,
    ResultError,
    StallError,
    TfdistError,
    UnsupportedVersionError,
    WorkerError,
)
from tfdist.launch.protocol import OnEvent
from tfdist.train.checkpoint import Checkpoint, checkpoints, newest
from tfdist.train.task import CheckpointPlan

T = TypeVar("T")

_FINAL = (ConfigError, DataError, DivergenceError, ResultError, UnsupportedVersionError)
_SIGNALS = frozenset(s.name for s in signal.Signals)
# What TensorFlow raises when a peer is gone, and what a process that ended by itself leaves.
_LOST = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "SystemExit")
_LOST_BY_SPARK = ("SparkTaskLost", "SparkExecutorLost")


def checkpoint_plan(
    fit: FitConfig,
    compute: ComputeConfig,
    workers: int,
    train: Handle | Stream,
    validation: Handle | None,
    output_dir: Path,
    training: str,
) -> CheckpointPlan | None:
    """Where a training is written down and what it goes on from; None for one that is not.

    Args:
        fit: how it is trained.
        compute: where.
        workers: how many are wanted.
        train: its rows.
        validation: the validation rows.
        output_dir: where its model goes.
        training: identifies it, unless it goes on with an earlier one.

    Raises:
        ConfigError: the checkpoint to go on from is of another training or of a newer version.
    """
    asked = fit.checkpoint_every_steps or fit.checkpoint_dir or fit.resume or compute.max_restarts
    if not asked or isinstance(train, Stream):
        return None
    folder = output_dir.with_name(f"{output_dir.name}.checkpoints")
    if fit.checkpoint_dir is not None:
        folder = Path(fit.checkpoint_dir).absolute()
    settings = _settings(fit, compute, workers, train, validation)
    plan = CheckpointPlan(
        folder, training, fit.checkpoint_every_steps, fit.keep_checkpoints, settings, laid_out_for=workers
    )
    if not fit.resume:
        _warn_of_older(folder)
        return plan
    start = newest(folder)
    if start is None:
        warnings.warn(f"fit.resume: no checkpoint in {folder}; the training begins anew", stacklevel=4)
        return plan
    _check_settings(start, settings, fit)
    _tell_of_other_workers(start, compute, workers)
    kept = start.manifest.settings
    began_with = kept.get("order", {}).get("laid_out_for") or kept["compute"]["slots"]
    plan_batches(train.rows, fit.global_batch, workers, fit.drop_remainder, began_with)
    settings["order"]["laid_out_for"] = began_with
    return replace(plan, training=start.manifest.training, start=start, laid_out_for=began_with)


def _settings(
    fit: FitConfig, compute: ComputeConfig, workers: int, train: Handle, validation: Handle | None
) -> dict[str, dict[str, Any]]:
    data = {"train": train, "validation": validation}
    return {
        "fit": {
            name: getattr(fit, name)
            for name in ("global_batch", "seed", "shuffle", "drop_remainder", "validation_batch")
        },
        "compute": {"slots": compute.slots, "strategy": compute.strategy_in_force},
        "order": {"laid_out_for": workers},
        "until": {"epochs": fit.epochs},
        "rows": {name: None if handle is None else handle.rows for name, handle in data.items()},
        "data": {name: None if handle is None else handle.manifest.fingerprint for name, handle in data.items()},
    }


def _check_settings(start: Checkpoint, settings: Mapping[str, Mapping[str, Any]], fit: FitConfig) -> None:
    kept = start.manifest.settings
    # Which strategy is in force follows from the slots, which may be others.
    same_slots = kept["compute"].get("slots") == settings["compute"]["slots"]
    problems = [
        f"{part}.{name}: expected {kept[part].get(name)!r} to go on from {start.folder}, got {value!r}; set it so, or "
        "start anew with fit.resume=False"
        for part in ("fit", *(["compute"] if same_slots else []), "rows")
        for name, value in settings[part].items()
        if kept[part].get(name) != value
    ]
    done = start.manifest.position.epoch
    if done > fit.epochs:
        problems.append(f"fit.epochs: expected at least {done}, which {start.folder} has behind it, got {fit.epochs}")
    if problems:
        raise ConfigError(problems)
    for name, value in settings["data"].items():
        if kept["data"].get(name) != value:
            warnings.warn(
                f"{name}: it cannot be known whether these are the rows of {start.folder}, since they were written "
                "anew; the training goes on with them",
                stacklevel=5,
            )


def _tell_of_other_workers(start: Checkpoint, compute: ComputeConfig, workers: int) -> None:
    """Exactness needs as many workers as before; who has asked for an elastic training knows that."""
    before = start.manifest.world_size
    if compute.min_slots is None and workers != before:
        warnings.warn(
            f"compute.slots: {start.folder} was written by {before} workers, and {workers} go on with it; the "
            "batches are the same, and the result is that of an undisturbed training up to rounding, not bit for bit",
            stacklevel=5,
        )


def _warn_of_older(folder: Path) -> None:
    for older in checkpoints(folder)[:1]:
        position, until = older.manifest.position, older.manifest.settings.get("until", {}).get("epochs", 0)
        if position.stopped or position.epoch >= until:
            continue
        warnings.warn(
            f"fit.checkpoint_dir: {folder} holds an unfinished training, at epoch {position.epoch + 1}, step "
            f"{position.total}; a new one begins, and its checkpoints take their place. To go on say fit.resume=True",
            stacklevel=5,
        )


def with_restarts(
    launch: Callable[[CheckpointPlan | None, int], T],
    plan: CheckpointPlan | None,
    max_restarts: int,
    wanted: int,
    gather: Callable[[OnEvent], int],
    on_event: OnEvent,
) -> tuple[T, tuple[int, ...]]:
    """Launch a training, and again from its last checkpoint while workers die.

    Spark never retries a barrier stage, and a collective whose peer is gone cannot be mended: all workers start anew.
    An error of the user's code is tried again too, since it may have come of a disk or a server; when it returns
    before the next checkpoint it is raised.

    Args:
        launch: trains from ``plan.start`` to the end; gets the plan and the number of workers.
        plan: where it is written down; None always begins at the beginning.
        max_restarts: how often it is launched again.
        wanted: how many workers are wanted.
        gather: before each launch, the number of workers that there are for it; may wait, and send events.
        on_event: receives ``restart`` events, and ``world`` where the first launch gets fewer workers than wanted.

    Returns:
        What ``launch`` returned, and the number of workers of each launch.

    Raises:
        TfdistError: the last error, which says how many restarts there were.
    """
    own_error: tuple[str, int] | None = None
    sizes = [gather(on_event)]
    if sizes[0] < wanted:
        on_event({"kind": "world", "rank": 0, "workers": sizes[0], "slots": wanted})
    for attempt in range(max_restarts + 1):
        try:
            return launch(plan, sizes[-1]), tuple(sizes)
        except TfdistError as error:
            interrupted = getattr(error, "error_type", "") == "KeyboardInterrupt"
            if isinstance(error, _FINAL) or interrupted or not max_restarts:
                raise
            plan = _from_newest(plan)
            at = 0 if plan is None else plan.position.total
            again = None if _is_lost(error) else (getattr(error, "error_type", ""), at)
            if attempt == max_restarts or (again is not None and again == own_error):
                raise _with_count(error, attempt, max_restarts) from error.__cause__
            own_error = again
            sizes.append(_gather_again(gather, on_event, error))
            on_event(_restart_event(error, (attempt + 1, max_restarts), wanted, plan, sizes))
    raise AssertionError("unreachable")


def _gather_again(gather: Callable[[OnEvent], int], on_event: OnEvent, error: TfdistError) -> int:
    cause = _first_line(error)
    try:
        return gather(lambda event: on_event({**event, "cause": cause}))
    except PreflightError as few:
        raise PreflightError([*few.problems, f"the training was to be launched again, since {cause}"]) from error


def _from_newest(plan: CheckpointPlan | None) -> CheckpointPlan | None:
    if plan is None:
        return None
    found = newest(plan.folder, plan.training)
    return replace(plan, start=found or plan.start)


def _is_lost(error: TfdistError) -> bool:
    """Whether a worker was lost, rather than code of the user's failed."""
    if isinstance(error, LaunchError | StallError):
        return True
    if not isinstance(error, WorkerError) or error.rank is None:
        return isinstance(error, WorkerError)
    kind = error.error_type.rpartition(".")[2]
    return kind in _SIGNALS or kind in (*_LOST, *_LOST_BY_SPARK) or "ollective" in str(error).partition("\n")[0]


def _restart_event(
    error: TfdistError, attempt: tuple[int, int], wanted: int, plan: CheckpointPlan | None, sizes: Sequence[int]
) -> dict[str, Any]:
    position = None if plan is None else plan.position
    return {
        "kind": "restart",
        "rank": getattr(error, "rank", None) or 0,
        "attempt": attempt[0],
        "of": attempt[1],
        "cause": _first_line(error),
        "workers": sizes[-1],
        "workers_before": sizes[-2],
        "slots": wanted,
        "epoch": 0 if position is None else position.epoch,
        "step": 0 if position is None else position.total,
    }


def _first_line(error: TfdistError) -> str:
    return str(error).partition("\n")[0]


def _with_count(error: TfdistError, restarts: int, of: int) -> TfdistError:
    if not restarts:
        return error
    told = f"\n(after {restarts} of {of} restarts)"
    if isinstance(error, WorkerError):
        error.message += told
    error.args = (f"{error.args[0] if error.args else ''}{told}", *error.args[1:])
    return error
