"""Blocks of batches on their way into TensorFlow: as flat arrays, and as tensors again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.column import Tensor
from tfdist.data.schema import Schema
from tfdist.data.sources import Block
from tfdist.data.values import Ragged, Text, Values


def flat(block: Block) -> list[np.ndarray]:
    """The arrays of a block, as :func:`flat_specs` lists them."""
    return [array for tensor in block.tensors for array in _arrays(tensor, (block.steps, block.rows))]


def _arrays(values: Values, shape: tuple[int, ...]) -> list[np.ndarray]:
    if isinstance(values, Ragged):
        return [np.diff(values.splits).reshape(shape), *_arrays(values.values, (-1,))]
    if isinstance(values, Text):
        return [*_arrays(values.codes, shape), values.values]
    return [values.reshape(*shape, *values.shape[1:])]


def flat_specs(tensor: Tensor) -> list[Any]:
    """What a tensor's block consists of: lengths of lists, outer ones first, then values, of text codes and values."""
    depth = len(tensor.shape) if None in tensor.shape else 0
    specs = [tf.TensorSpec((None,) * (1 if level else 2), tf.int64) for level in range(depth)]
    shape = (None,) if depth else (None, None, *tensor.shape)
    if tensor.dtype == "string":
        return [*specs, tf.TensorSpec(shape, "int32"), tf.TensorSpec((None,), "string")]
    return [*specs, tf.TensorSpec(shape, tensor.dtype)]


def structured(schema: Schema, arrays: list[Any]) -> Any:
    """The batches of a block, ``[steps, rows, *shape]``, out of its arrays as :func:`flat_specs` lists them."""
    parts = iter(arrays)
    tensors = {tensor.name: _tensor(tensor, parts) for tensor in schema.tensors}
    batch = schema.as_batch(tensors)
    return batch if schema.label is None else (batch, tensors[schema.label])


def _tensor(tensor: Tensor, parts: Iterator[Any]) -> Any:
    """``[steps, rows, *shape]`` out of the next arrays of a block."""
    lengths = [next(parts) for _ in tensor.shape] if None in tensor.shape else []
    values = next(parts)
    if tensor.dtype == "string":
        values = tf.gather(next(parts), values)
    for inner in reversed(lengths[1:]):
        values = tf.RaggedTensor.from_row_lengths(values, inner, validate=False)
    if lengths:
        steps, rows = tf.unstack(tf.shape(lengths[0], tf.int64))
        values = tf.RaggedTensor.from_row_lengths(values, tf.reshape(lengths[0], [-1]), validate=False)
        values = tf.RaggedTensor.from_uniform_row_length(values, rows, steps, validate=False)
    return values
