"""Losses: the mean over all rows of the global batch, however the workers share it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import tensorflow as tf

from tfdist.strategies.corrections.patch import Patch
from tfdist.strategies.corrections.step import Step, current_step, sum_over_replicas


def correct_losses(patch: Patch) -> None:
    """Weight each replica's loss by its rows.

    Keras divides the mean over a replica's own rows by the number of replicas, so a row counts more where there are
    fewer. It also leaves losses that return one number undivided, which multiplies their gradient by the replicas, and
    divides by the valid entries or the sample weights of a replica where those of the global batch are meant.
    """
    from keras.src.losses import loss as loss_module
    from keras.src.trainers.compile_utils import CompileLoss

    patch(loss_module, "scale_loss_for_distribution", _scaled)
    patch(loss_module, "unscale_loss_for_distribution", _unscaled)
    patch(loss_module, "reduce_values", _reduced)
    patch(loss_module, "apply_mask", _masked)
    patch(CompileLoss, "call", _marking_compile_loss)


def _scaled(original: Any) -> Any:
    def scale_loss_for_distribution(value: Any) -> Any:
        step = current_step()
        return original(value) if step is None else _weighted(value, step)

    return scale_loss_for_distribution


def _weighted(value: Any, step: Step) -> Any:
    step.weighted = True
    # The mean over the rows of an empty share is no number.
    return tf.math.multiply_no_nan(value, tf.cast(step.weight * (1.0 / step.replicas), value.dtype))


def _unscaled(original: Any) -> Any:
    def unscale_loss_for_distribution(value: Any) -> Any:
        step = current_step()
        if step is None:
            return original(value)
        # The losses of single outputs are recorded with the weight of a whole step, unless the shape tells the rows.
        counts_steps = step.inside_compile_loss and step.static_rows is None
        weight = step.mean_weight() if counts_steps else step.weight
        return value * tf.cast(tf.math.divide_no_nan(float(step.replicas), weight), value.dtype)

    return unscale_loss_for_distribution


def _reduced(original: Any) -> Any:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        result = original(values, sample_weight, reduction)
        step = current_step()
        if step is None:
            return result
        if reduction in ("sum", "none", None):
            # A sum needs no weight: this takes out beforehand what the gradients are divided by later.
            step.weighted = True
            return result * tf.cast(step.mean_weight(), result.dtype)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            step.weighted = True
            weights = sum_over_replicas(tf.reduce_sum(tf.cast(sample_weight, tf.float32)))
            return tf.reduce_sum(values) * tf.cast(tf.math.divide_no_nan(step.mean_weight(), weights), values.dtype)
        if values.shape.rank == 0:
            warnings.warn(
                "a loss function returns one number for the whole batch: it is taken as the mean over the rows of this "
                "worker's share; return one value per row to make that sure",
                stacklevel=2,
            )
            return _weighted(result, step)
        return result

    return reduce_values


def _masked(original: Any) -> Any:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        step = current_step()
        if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        # Keras multiplies by entries / valid entries of the replica; those of the global batch take their place.
        here = tf.stack([tf.cast(tf.size(mask), tf.float32), tf.reduce_sum(tf.cast(mask, tf.float32))])
        everywhere = sum_over_replicas(here)
        ratio = tf.math.divide_no_nan(everywhere[0] * here[1], everywhere[1] * here[0])
        return weights * tf.cast(ratio, weights.dtype)

    return apply_mask


def _marking_compile_loss(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return original(self, *args, **kwargs)
        step.inside_compile_loss = True
        try:
            return original(self, *args, **kwargs)
        finally:
            step.inside_compile_loss = False

    return call
