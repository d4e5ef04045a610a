"""Updates of weights: gradients are all-reduced first, then every replica applies the same update by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.strategies.corrections.patch import Patch
from tfdist.strategies.corrections.step import current_step, replica_context

# Each has a version in Keras' base class that assigns in place, and one for TensorFlow that enters a merge call.
_LOCAL_METHODS = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)


def correct_updates(patch: Patch) -> None:
    """All-reduce before anything looks at the gradients.

    Keras all-reduces in the last moment. Clipping then sees the gradients of one worker (other weights, in silence);
    accumulation and EMA put the all-reduce and merge calls inside a ``cond``, which TensorFlow refuses; and the test
    for finite gradients of LossScaleOptimizer differs between workers, which deadlocks them. With equal gradients
    everywhere nothing after the all-reduce has to talk to other replicas.
    """
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    for owner in (TFOptimizer, LossScaleOptimizer):
        patch(owner, "apply", _reducing_first)
    patch(LossScaleOptimizer, "_stateful_handle_finite_grads", _on_reduced_gradients)
    for name in _LOCAL_METHODS:
        patch(TFOptimizer, name, _local_inside_replica(getattr(BaseOptimizer, name)))


class _State(threading.local):
    reduced = False


_state = _State()


@contextmanager
def _reduced_gradients() -> Iterator[None]:
    before, _state.reduced = _state.reduced, True
    try:
        yield
    finally:
        _state.reduced = before


def _reducing_first(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        unknown = trainable_variables is None and not self.built  # Keras says what is wrong
        if _state.reduced or unknown or replica_context() is None:
            return original(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = _sum_over_replicas(list(grads), variables)
        with _reduced_gradients():
            return original(self, grads, variables)

    return apply


def _on_reduced_gradients(original: Any) -> Any:
    # Called in threads that TensorFlow starts, one a replica, so the mark of the caller's thread is not seen there.
    def handle(self: Any, grads: Any, trainable_variables: Any) -> Any:
        with _reduced_gradients():
            return original(self, grads, trainable_variables)

    return handle


def _local_inside_replica(generic: Any) -> Any:
    def make(original: Any) -> Any:
        def method(self: Any, *args: Any) -> Any:
            return (original if replica_context() is None else generic)(self, *args)

        return method

    return make


def _sum_over_replicas(grads: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Sum of the gradients over replicas, divided by the mean weight; the weights travel in the same all-reduce."""
    # Gradients that overwrite their variable (the scales of float8) are values, not something to add up.
    reduced = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]
    step = current_step()
    weighted = step is not None and step.weighted
    tensors = [grads[i] for i in reduced]
    if step is not None and weighted:
        tensors.append(step.weight)
    sums = _all_reduce(tensors)
    if step is not None and weighted:
        factor = tf.math.divide_no_nan(float(step.replicas), sums.pop())
        sums = _multiplied(sums, factor)
    grads = list(grads)
    for i, value in zip(reduced, sums, strict=True):
        grads[i] = value
    return grads


def _all_reduce(tensors: list[Any]) -> list[Any]:
    """Sum over replicas, one collective for each dtype (TensorFlow concatenates what it is given together)."""
    context = tf.distribute.get_replica_context()
    sums: list[Any] = [None] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        together = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[i] for i in members])
        for i, value in zip(members, together, strict=True):
            sums[i] = value
    return sums


def _multiplied(grads: list[Any], factor: Any) -> list[Any]:
    """``grads`` times ``factor``; with equal shares it is 1, and a pass over all gradients is saved."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
    values = tf.cond(
        tf.equal(factor, 1.0),
        lambda: [tf.identity(v) for v in values],
        lambda: [v * tf.cast(factor, v.dtype) for v in values],
    )
    return [
        tf.IndexedSlices(v, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else v
        for g, v in zip(grads, values, strict=True)
    ]
