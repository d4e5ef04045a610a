"""``tfdist.fit``: plans a training on the driver, launches it and brings back the result."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from tfdist.config import ComputeConfig, FitConfig
from tfdist.data import Handle, Stream
from tfdist.errors import DivergenceError
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import Event, LaunchPlan, OnEvent, new_run_id
from tfdist.train.checks import check_arguments, check_training
from tfdist.train.console import print_outcome, shown
from tfdist.train.gang import gathered, launch
from tfdist.train.live import LiveDisplay
from tfdist.train.publish import announced
from tfdist.train.restarts import checkpoint_plan, with_restarts
from tfdist.train.task import BuildCallbacks, BuildModel, CheckpointPlan, FitTask, TrainingData, epoch_rows
from tfdist.train.worker import fit_on_worker
from tfdist.train.workers import count_workers, with_rows_for_all


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
        run_id: identifies the launch, the last one after restarts.
        restarts: how often the training was launched again.
        world_sizes: number of workers of each launch; the last one trained to the end.
    """

    history: Mapping[str, list[float]]
    model_path: Path
    rows: int
    dropped_rows: int
    rows_per_s: float
    seconds: Mapping[str, float]
    workers: tuple[Mapping[str, Any], ...]
    run_id: str
    restarts: int = 0
    world_sizes: tuple[int, ...] = ()

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
        on_event: receives the events of the run; nothing is shown then.

    Returns:
        The history, the path of the model and what was measured.

    Raises:
        ConfigError: settings or data cannot be trained as asked; raised before a worker starts.
        WorkerError: the training failed on a worker; also of that exception's own type.
        DivergenceError: the workers ended with different weights.
    """
    compute, fit = compute or ComputeConfig(), fit or FitConfig()
    check_arguments(build_model, train, validation, callbacks)
    compute = with_rows_for_all(compute, train)
    run_id = new_run_id()
    output_dir = _output_dir(fit, train, run_id)
    check_training(train, validation, compute, fit, output_dir)
    session = spark or (train.frame.sparkSession if isinstance(train, Stream) else None)
    wanted = count_workers(compute, session)
    checkpoints = checkpoint_plan(fit, compute, wanted, train, validation, output_dir, run_id)
    run_ids = chain([run_id], iter(new_run_id, None))
    rows_for = cache(partial(_for_workers, train, fit))
    laid_out_for = wanted if checkpoints is None else checkpoints.laid_out_for
    launched = time.perf_counter()

    def launch_from(plan: CheckpointPlan | None, workers: int) -> list[bytes]:
        nonlocal run_id
        run_id, placed = next(run_ids), compute.with_slots(compute.slots // wanted * workers)
        data, rows = rows_for(workers)
        task = FitTask(build_model, data, validation, placed, quiet, callbacks, output_dir, plan, laid_out_for)
        program = dump_program(partial(_fit_as_json, task), "build_model and callbacks")
        with ExitStack() as marks:
            marks.enter_context(announced(output_dir, run_id, "fit.output_dir"))
            if plan is not None:
                marks.enter_context(announced(plan.folder, run_id, "fit.checkpoint_dir"))
            asked = LaunchPlan.of(placed, run_id, results="all", tasks=workers)
            return launch(program, compute, asked, session, log, rows)

    with shown() if on_event is None else nullcontext(on_event) as receive:
        live = isinstance(receive, LiveDisplay)
        quiet = replace(fit, verbose=0) if live else fit  # Keras' bar would show the same a second time
        log = _RunLog(receive)
        gather = partial(gathered, compute, wanted, session)
        texts, world_sizes = with_restarts(launch_from, checkpoints, compute.max_restarts, wanted, gather, log)
    if checkpoints is not None and fit.checkpoint_dir is None and fit.output_dir is None:
        shutil.rmtree(checkpoints.folder, ignore_errors=True)  # nobody knows its name, so nobody goes on from it
    total_s = time.perf_counter() - launched
    outcomes = [json.loads(text) for text in texts]
    if len({o["digest"] for o in outcomes}) != 1:
        raise DivergenceError(
            f"run {run_id}: {len(outcomes)} workers ended with different weights; was the model built by build_model, "
            "and do all callbacks act alike on every worker?"
        )
    chief = outcomes[0]
    timed = sorted(chief["epoch_seconds"][1:] or chief["epoch_seconds"]) or [math.inf]
    phases, used = chief["seconds"], epoch_rows(rows_for(world_sizes[-1])[0], fit)
    result = FitResult(
        history=chief["history"],
        model_path=Path(chief["model_path"]),
        rows=used,
        dropped_rows=train.rows - used,
        rows_per_s=used / timed[len(timed) // 2],
        seconds={"launch": total_s - sum(phases.values()), **phases, "total": total_s},
        workers=tuple(log.workers[rank] for rank in sorted(log.workers)),
        run_id=run_id,
        restarts=len(world_sizes) - 1,
        world_sizes=world_sizes,
    )
    if live:
        print_outcome(result)
    return result


class _RunLog:
    """Notes who took part and passes events on; an epoch that is trained again after a restart is told once."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event = on_event
        self.workers: dict[int, Mapping[str, Any]] = {}
        self._epochs_told = 0

    def __call__(self, event: Event) -> None:
        if event["kind"] == "joined":
            self.workers[event["rank"]] = {k: event[k] for k in ("rank", "host", "pid", "devices")}
        elif event["kind"] == "restart":
            self.workers.clear()  # there may be fewer from now on
        elif event["kind"] == "epoch":
            if event["epoch"] < self._epochs_told:
                return
            self._epochs_told = event["epoch"] + 1
        self.on_event(event)


def _fit_as_json(task: FitTask) -> bytes:
    return json.dumps(fit_on_worker(task)).encode()


def _output_dir(fit: FitConfig, train: Handle | Stream, run_id: str) -> Path:
    if fit.output_dir is not None:
        return Path(fit.output_dir).absolute()
    return train.model_root / run_id


def _for_workers(train: Handle | Stream, fit: FitConfig, workers: int) -> tuple[TrainingData, Any]:
    """What the workers are told of the data, and the frame whose partitions Spark hands to them, if any."""
    return (train, None) if isinstance(train, Handle) else train.dealt(workers, fit.global_batch, fit.epochs)
