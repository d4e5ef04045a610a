"""The mean of values over all replicas, in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError

_EXACT_IN_FLOAT32 = (tf.float16, tf.bfloat16, tf.float32, tf.bool)


def mean_over_replicas(strategy: Any, read: Callable[..., Sequence[Any]], args: tuple[Any, ...] = ()) -> list[Any]:
    """Mean over replicas of each value that ``read(*args)`` returns on a replica.

    Called in cross-replica context. All values go through one collective as one vector, where Keras takes one each.

    Args:
        strategy: the strategy in force.
        read: called on each replica; the values have the same shapes and dtypes on all.
        args: its arguments, per-replica values are unwrapped.

    Returns:
        The means, with the dtypes and shapes of the values.

    Raises:
        ConfigError: a value has no fixed shape, as one number a row.
    """
    like: list[Any] = []

    def pack(*local: Any) -> Any:
        values = [tf.convert_to_tensor(value) for value in read(*local)]
        if any(v.shape.num_elements() is None for v in values):
            raise ConfigError(
                f"train_step or test_step: expected values of fixed shapes, got {[str(v.shape) for v in values]}; "
                "return one number for the batch, for example a mean"
            )
        like[:] = values
        wide = tf.float32 if all(v.dtype in _EXACT_IN_FLOAT32 for v in values) else tf.float64
        return tf.concat([tf.reshape(tf.cast(v, wide), [-1]) for v in values], axis=0)

    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(pack, args=args), axis=None)
    parts = tf.split(mean, [v.shape.num_elements() for v in like])
    return [tf.cast(tf.reshape(part, v.shape), v.dtype) for part, v in zip(parts, like, strict=True)]
