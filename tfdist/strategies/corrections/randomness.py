"""Random numbers: other ones on each replica, the same ones in each run."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.corrections.patch import Patch
from tfdist.strategies.corrections.step import replica_context

# Odd, so that no two replicas meet modulo a power of two; the golden ratio of 32 bits, as in Fibonacci hashing.
_STRIDE = 0x9E3779B1


def correct_randomness(patch: Patch) -> None:
    """Give each replica its own stream of random numbers.

    The state of a Keras seed generator is a variable, equal on all replicas: dropout then removes the same units for
    the rows of every worker. The first replica keeps the stream of one process.
    """
    patch(keras.random.SeedGenerator, "next", _per_replica)


def _per_replica(original: Any) -> Any:
    @functools.wraps(original)
    def next_seed(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = original(self, *args, **kwargs)
        context = replica_context()
        if context is None:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64) * _STRIDE
        return seed + tf.cast(tf.stack([replica, tf.zeros_like(replica)]), seed.dtype)

    return next_seed


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy, TensorFlow and Keras.

    Initial weights depend on ``seed`` alone and are equal on all workers. TensorFlow's own stateful operations
    (``tf.random.uniform`` in a layer) take ``(seed, rank)``; Keras layers differ by replica through
    :func:`correct_randomness`.

    Args:
        seed: from 0 to 2**32 - 1.
        rank: number of this worker.
    """
    keras.utils.set_random_seed(seed)
    tf.random.set_seed((seed + rank * _STRIDE) % 2**32)
