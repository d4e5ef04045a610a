"""One training or test step as one replica sees it: how many rows it holds and how they weigh."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


def replica_context() -> Any | None:
    """TensorFlow's replica context where there are several replicas, else None."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and context.num_replicas_in_sync > 1 else None


@dataclass
class Step:
    """The step that this thread is in.

    Replica r holds ``n_r`` rows. Its losses carry the weight ``w_r = n_r / reference``, and the sum of the gradients
    is divided by the mean weight afterwards: so the result is the mean over all rows whatever the shares, and with
    equal shares every weight is exactly 1.

    Attributes:
        rows: ``n_r``, [] float32.
        static_rows: ``n_r`` where the shape of the data tells it, else None.
        reference: rows of a usual share, the same on all replicas; any number is right, a near one keeps the
            gradients of half precision in range.
        replicas: number of replicas.
        weighted: whether a loss of this step carries the weight.
        inside_compile_loss: whether Keras' container of compiled losses is being called.
    """

    rows: Any
    static_rows: int | None
    reference: float
    replicas: int
    weighted: bool = False
    inside_compile_loss: bool = False
    _all_rows: Any = None

    @property
    def weight(self) -> Any:
        """``w_r``, [] float32."""
        return self.rows / self.reference

    def mean_weight(self) -> Any:
        """Mean of the weights over replicas, [] float32; takes a collective of one number, once a step."""
        if self._all_rows is None:
            self._all_rows = sum_over_replicas(self.rows)
        return self._all_rows / (self.reference * self.replicas)


def sum_over_replicas(value: Any) -> Any:
    """Sum of a tensor over replicas, in replica context."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


def current_step() -> Step | None:
    """The step that this thread is in; None outside Keras' own steps, as in a hand-written training loop."""
    return _current.step


def count_rows(data: Any) -> tuple[Any, int | None]:
    """Rows of a batch as this replica sees it: [] int32, and the same as a number where the shape tells it."""
    from keras import tree

    first = next(leaf for leaf in tree.flatten(data) if leaf is not None)
    shape = tf.TensorShape(first.shape)
    return tf.shape(first)[0], shape[0] if shape.rank else None


@contextmanager
def entered_step(data: Any, reference: float) -> Iterator[None]:
    """Make the step on ``data`` the current one of this thread."""
    context = replica_context()
    if context is None:
        yield
        return
    rows, static_rows = count_rows(data)
    before = _current.step
    _current.step = Step(tf.cast(rows, tf.float32), static_rows, reference, context.num_replicas_in_sync)
    try:
        yield
    finally:
        _current.step = before
