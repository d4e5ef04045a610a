"""Keras callbacks that belong to a training of ours."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.launch.protocol import emit
from tfdist.launch.pulse import At, mark, note
from tfdist.train.checkpoint import Position

_NOTE_EVERY_S = 0.5


class EpochEvents(keras.callbacks.Callback):  # type: ignore[misc]
    """Sends ``start``, ``first-step``, ``step`` and ``epoch`` events to the driver; used on the chief.

    Args:
        rows: training rows of an epoch over all workers.
        epochs: how many epochs there are.
        begin: where this launch of the training begins.
        steps: of an epoch.
    """

    keeps_no_state = True  # seconds of another process mean nothing here

    def __init__(self, rows: int, epochs: int, begin: Position, steps: int) -> None:
        super().__init__()
        self.rows, self.epochs = rows, epochs
        self._begin, self._steps = begin, steps
        self.epoch_seconds: list[float] = []
        self._epoch_start = 0.0
        self._trained_until: float | None = None
        self._first_step = True
        self._epoch, self._logs = 0, dict[str, float]()
        self._speed_from: tuple[float, int] | None = None
        self._next_note = 0.0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        begin = {"epoch": self._begin.epoch, "step": self._begin.total}
        emit("start", epochs=self.epochs, rows=self.rows, steps=self._steps, **begin)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        self._epoch, self._epoch_start = epoch, time.perf_counter()
        self._trained_until = self._speed_from = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._first_step:
            self._first_step = False
            emit("first-step")
        now = time.perf_counter()
        if self._speed_from is None:
            self._speed_from = (now, batch)  # without the first step, which may trace and open files
        if now >= self._next_note:
            self._next_note = now + _NOTE_EVERY_S
            self._logs = _numbers(logs)
            self._note(batch + 1, now)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        self._trained_until = time.perf_counter()
        self._note(self._steps, self._trained_until, validating=True)

    def _note(self, step: int, now: float, validating: bool = False) -> None:
        since_s, since = self._speed_from or (now, step - 1)
        steps = step - 1 - since
        note(
            "step",
            epoch=self._epoch,
            epochs=self.epochs,
            step=step,
            steps=self._steps,
            logs=self._logs,
            rows_per_s=self.rows / self._steps * steps / (now - since_s) if steps > 0 else None,
            seconds=now - self._epoch_start,
            validating=validating,
        )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        now = time.perf_counter()
        trained_s = (self._trained_until or now) - self._epoch_start
        done_before = self._begin.data_step if self._begin.executions and epoch == self._begin.epoch else 0
        share = 1 - done_before / self._steps
        self.epoch_seconds.append(trained_s / share)
        note(None)  # no step of this epoch is told after its end
        emit(
            "epoch",
            epoch=epoch,
            epochs=self.epochs,
            logs=_numbers(logs),
            seconds=now - self._epoch_start,
            train_seconds=trained_s,
            rows_per_s=self.rows * share / trained_s,
        )


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


class StepMarks(keras.callbacks.Callback):  # type: ignore[misc]
    """Marks where this worker is, for its supervisor; used on every worker, before the callbacks of the user.

    In the first epoch, and in the first validation, functions are traced and rows are read for the first time, so work
    counts as a sign of life there; afterwards a step is a step.
    """

    keeps_no_state = True  # functions are traced anew after a restart

    def __init__(self) -> None:
        super().__init__()
        self._base = 0
        self._step = self._test_step = At.WORKING

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        mark(At.WORKING)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        self._base = epoch * ((self.params or {}).get("steps") or 0)
        mark(At.WORKING, self._base)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        del batch, logs
        mark(self._step)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        mark(At.WORKING, self._base + batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        del epoch, logs
        self._step = At.STEP
        mark(At.WORKING)

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        del batch, logs
        mark(self._test_step)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        del batch, logs
        mark(At.WORKING)

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        del logs
        self._test_step = At.STEP
        mark(At.WORKING)
