"""What a finished job says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JobResult:
    """A finished job.

    Attributes:
        name: the job's name.
        test: quality of the model on the test rows, for example ``auc`` and ``log_loss``.
        baselines: the same for each baseline.
        history: for each metric its value after each epoch.
        rows: number of rows of each part.
        dropped_rows: training rows that ``drop_remainder`` leaves out of each epoch.
        rows_per_s: training rows per second over all workers.
        seconds: wall seconds by phase.
        workers: rank and host of each worker.
        world_sizes: number of workers of each launch; the last one trained to the end.
        model_path: the trained model.
        figure_path: the training curve.
        tracking_uri: where the run is tracked.
        experiment: name of its MLflow experiment.
        run_id: its MLflow run.
    """

    name: str
    test: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]]
    history: Mapping[str, list[float]]
    rows: Mapping[str, int]
    dropped_rows: int
    rows_per_s: float
    seconds: Mapping[str, float]
    workers: tuple[Mapping[str, Any], ...]
    world_sizes: tuple[int, ...]
    model_path: Path
    figure_path: Path
    tracking_uri: str
    experiment: str
    run_id: str
