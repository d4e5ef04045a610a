"""What a worker needs to train: one picklable value, made on the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tfdist.config import ComputeConfig, FitConfig
from tfdist.data import Handle, Schema
from tfdist.data.handle import Shuffle
from tfdist.train.checkpoint import Checkpoint, Position

BuildModel = Callable[[Schema], Any]
"""Returns a compiled Keras model for the schema of the training data; called on every worker, inside the strategy."""

BuildCallbacks = Callable[[], Sequence[Any]]
"""Returns Keras callbacks; called on every worker."""


class TrainingData(Protocol):
    """The training rows as a worker gets them: a :class:`Handle`, or what is dealt out of a stream."""

    @property
    def rows(self) -> int: ...

    @property
    def schema(self) -> Schema: ...

    @property
    def transform(self) -> Callable[[Any], Any] | None: ...

    def steps(self, global_batch: int, drop_remainder: bool = False) -> int: ...

    def to_tf(
        self,
        *,
        global_batch: int,
        shuffle: Shuffle,
        seed: int,
        epoch: int,
        start_step: int,
        repeat: bool,
        drop_remainder: bool,
    ) -> Any: ...


@dataclass(frozen=True)
class CheckpointPlan:
    """Where and when a training is written down.

    Args:
        folder: holds the checkpoints; the driver and every worker see it.
        training: identifies the training over all its launches.
        every_steps: steps between two checkpoints; None writes one at the end of each epoch.
        keep: how many are kept.
        settings: what must be equal for a training to go on from a checkpoint.
        start: the one to go on from, or None.
        laid_out_for: the number of workers with which the training began, whose batches it keeps.
    """

    folder: Path
    training: str
    every_steps: int | None
    keep: int
    settings: Mapping[str, Any]
    start: Checkpoint | None = None
    laid_out_for: int | None = None

    @property
    def position(self) -> Position:
        """Where a launch begins."""
        return Position() if self.start is None else self.start.manifest.position


def epoch_rows(train: TrainingData, fit: FitConfig) -> int:
    """The rows that an epoch trains on: all, or those of its full batches."""
    return train.rows // fit.global_batch * fit.global_batch if fit.drop_remainder else train.rows


@dataclass(frozen=True)
class FitTask:
    """One training.

    Args:
        build_model: makes the compiled model.
        train: the training rows.
        validation: the validation rows, or None.
        compute: where it runs.
        fit: how it is trained.
        callbacks: makes the callbacks, or None.
        output_dir: where the chief publishes the model.
        checkpoints: where it is written down and what it goes on from, or None.
        laid_out_for: the number of workers whose batches it keeps; None: that of now.
    """

    build_model: BuildModel
    train: TrainingData
    validation: Handle | None
    compute: ComputeConfig
    fit: FitConfig
    callbacks: BuildCallbacks | None
    output_dir: Path
    checkpoints: CheckpointPlan | None = None
    laid_out_for: int | None = None
