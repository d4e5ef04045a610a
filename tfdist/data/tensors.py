"""Blocks of batches on their way into TensorFlow: as flat arrays, and as tensors again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.column import Tensor
from tfdist.data.schema import Schema
from tfdist.data.sources import Block
from tfdist.data.texts import as_text, compact, is_text, plain
from tfdist.data.values import Ragged, Values


def flat(block: Block, tensors: Sequence[Tensor], single: bool = False) -> list[np.ndarray]:
    """The arrays of a block, whose tensors are given, as :func:`flat_specs` lists them."""
    shape = (block.rows,) if single else (block.steps, block.rows)
    return [
        array
        for tensor, values in zip(tensors, block.tensors, strict=True)
        for array in _arrays(values, shape, _is_raw(tensor))
    ]


class Entries(NamedTuple):
    """Rows of a sparse tensor until it is put together: TensorFlow cuts no batches out of a sparse one.

    Args:
        places: ``[..., rows, *] int32``, ragged.
        values: ``[..., rows, *]``, ragged alike.
    """

    places: Any
    values: Any


def with_sparse(schema: Schema, transform: Callable[[Any], Any] | None = None) -> Callable[[Any], Any] | None:
    """A transform of features after their sparse tensors were put together; as it is where there are none."""
    sparse = [tensor for tensor in schema.inputs if tensor.sparse]
    if not sparse:
        return transform

    def whole(features: Any) -> Any:
        flat = {tensor.name: _found(features, tensor) for tensor in schema.inputs}
        made = schema.as_batch({**flat, **{tensor.name: _sparse(flat[tensor.name], tensor) for tensor in sparse}})
        return made if transform is None else transform(made)

    return whole


def _found(features: Any, tensor: Tensor) -> Any:
    for key in tensor.path or (tensor.name,):
        features = features[key]
    return features


def _sparse(rows: Entries, tensor: Tensor) -> Any:
    """``[rows, length]``."""
    numbers = rows.places.value_rowids()
    indices = tf.stack([numbers, tf.cast(rows.places.values, tf.int64)], axis=1)
    return tf.SparseTensor(indices, rows.values.values, tf.stack([rows.places.nrows(), *tensor.shape]))


def _is_raw(tensor: Tensor) -> bool:
    """Whether a block holds its texts themselves: to look them up by codes is one copy of each more."""
    return tensor.raw and not tensor.shape


def _arrays(values: Values, shape: tuple[int, ...], raw: bool = False) -> list[np.ndarray]:
    if isinstance(values, Ragged):
        return [np.diff(values.splits).reshape(shape), *_arrays(values.values, (-1,))]
    if raw:
        return [plain(values).reshape(shape)]
    if is_text(values):
        text = compact(as_text(values))
        return [*_arrays(text.codes, shape), text.values]
    assert isinstance(values, np.ndarray)
    if values.dtype.names:
        return [np.ascontiguousarray(values[name]) for name in values.dtype.names]
    return [values.reshape(*shape, *values.shape[1:])]


def flat_specs(tensor: Tensor, single: bool = False) -> list[Any]:
    """What a tensor's block consists of: lengths of lists, outer ones first, then values, of text codes and values
    unless it is raw.

    Of a sparse tensor it is the number of entries in each row, their places and values.

    Args:
        tensor: of a batch.
        single: whether a block is a single batch, ``[rows, ...]`` instead of ``[steps, rows, ...]``.
    """
    outer = (None,) if single else (None, None)
    if tensor.sparse:
        places = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None,), tensor.dtype)
        return [tf.TensorSpec(outer, tf.int64), *places]
    depth = len(tensor.shape) if None in tensor.shape else 0
    specs = [tf.TensorSpec((None,) if level else outer, tf.int64) for level in range(depth)]
    shape = (None,) if depth else (*outer, *tensor.shape)
    if tensor.dtype == "string" and not _is_raw(tensor):
        return [*specs, tf.TensorSpec(shape, "int32"), tf.TensorSpec((None,), "string")]
    return [*specs, tf.TensorSpec(shape, tensor.dtype)]


def structured(schema: Schema, arrays: list[Any]) -> Any:
    """The batches of a block, ``[steps, rows, *shape]``, or its single batch ``[rows, *shape]``, out of its arrays as
    :func:`flat_specs` lists them."""
    parts = iter(arrays)
    tensors = {tensor.name: _tensor(tensor, parts) for tensor in schema.tensors}
    batch = schema.as_batch(tensors)
    return batch if schema.label is None else (batch, tensors[schema.label])


def _tensor(tensor: Tensor, parts: Iterator[Any]) -> Any:
    """``[steps, rows, *shape]`` or ``[rows, *shape]`` out of the next arrays of a block."""
    if tensor.sparse:
        counts, places, numbers = (next(parts) for _ in range(3))
        return Entries(_lists(places, counts), _lists(numbers, counts))
    lengths = [next(parts) for _ in tensor.shape] if None in tensor.shape else []
    values = next(parts)
    if tensor.dtype == "string" and not _is_raw(tensor):
        values = tf.gather(next(parts), values)
    for inner in reversed(lengths[1:]):
        values = tf.RaggedTensor.from_row_lengths(values, inner, validate=False)
    if lengths:
        values = _lists(values, lengths[0])
    return values


def _lists(values: Any, lengths: Any) -> Any:
    """``[steps, rows, *]`` out of values and ``[steps, rows]`` lengths, or ``[rows, *]`` out of ``[rows]`` lengths."""
    if lengths.shape.rank == 1:
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    steps, rows = tf.unstack(tf.shape(lengths, tf.int64))
    values = tf.RaggedTensor.from_row_lengths(values, tf.reshape(lengths, [-1]), validate=False)
    return tf.RaggedTensor.from_uniform_row_length(values, rows, steps, validate=False)
