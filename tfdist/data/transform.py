"""Functions of batches between the columns and the model: traced once, the same in training and in scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import tensorflow as tf

from tfdist.data.column import Tensor
from tfdist.data.manifest import Manifest
from tfdist.data.pipeline import batch_spec
from tfdist.data.schema import Schema
from tfdist.errors import ConfigError

Transform = Callable[[dict[str, Any]], Any]

_reading: ContextVar[Manifest | None] = ContextVar("reading", default=None)


class Deferred:
    """A transform that is unpickled where it is first called.

    Unpickling a Keras layer runs operations, before which a worker must have made its strategy.

    Args:
        function: the transform.
    """

    def __init__(self, function: Transform) -> None:
        self._function: Transform | None = function
        self._content: bytes | None = None

    def __call__(self, features: dict[str, Any]) -> Any:
        """The features after the transform."""
        if self._function is None:
            assert self._content is not None
            with tf.init_scope():
                self._function = cloudpickle.loads(self._content)
        return self._function(features)

    def __getstate__(self) -> bytes:
        return self._content or bytes(cloudpickle.dumps(self._function))

    def __setstate__(self, content: bytes) -> None:
        self._function, self._content = None, content


@dataclass(frozen=True)
class Chain:
    """Transforms one after another."""

    links: tuple[Transform, ...]

    def __call__(self, features: dict[str, Any]) -> Any:
        """The features after all of them."""
        given = next(iter(tf.nest.flatten(features, expand_composites=False)))
        for link in self.links:
            features = link(features)
        for value in tf.nest.flatten(features, expand_composites=False):
            if isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and value.shape.rank:
                told = "transform: expected a row for each row of the batch, got another number of rows; keep the first"
                tf.debugging.assert_equal(_rows(value), _rows(given), f"{told} dimension")
        return features


def _rows(values: Any) -> Any:
    if isinstance(values, tf.RaggedTensor):
        return values.nrows(tf.int64)
    return tf.shape(values, tf.int64)[0]


@dataclass(frozen=True)
class PerRow:
    """A function of one row as a function of batches.

    Args:
        function: takes the features of a row, returns those that the model reads.
    """

    function: Transform

    def __call__(self, features: dict[str, Any]) -> Any:
        """The features of each row of a batch."""
        row = tf.nest.map_structure(_row_spec, features, expand_composites=False)
        traced = tf.function(self.function).get_concrete_function(row)
        signature = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
        return tf.map_fn(self.function, features, fn_output_signature=signature)


def per_row(function: Transform) -> PerRow:
    """A transform out of a function of a single row: ``function(features) -> features`` without the batch dimension.

    It runs row by row inside TensorFlow, which costs some microseconds a row; a function of batches costs less.
    """
    return PerRow(function)


def transformed(
    schema: Schema, transform: Transform | Sequence[Transform], manifest: Manifest | None = None
) -> tuple[Schema, Transform]:
    """A schema that tells what a transform gives, and the transform as workers get it.

    Args:
        schema: with the lengths of arrays decided.
        transform: a function of the features of a batch, or a list of them.
        manifest: the files that will be read, where there are files.

    Raises:
        ConfigError: the transform fails on the columns, or gives something else than a dict of tensors with a row each.
    """
    links = tuple(transform) if isinstance(transform, list | tuple) else (transform,)
    for link in links:
        if not callable(link):
            raise ConfigError(f"transform: expected a function of the features or a list of them, got {link!r}")
    chain = Deferred(Chain(links))
    schema = replace(schema, outputs=None)
    specs = schema.as_batch({t.name: batch_spec(t) for t in schema.inputs})
    try:
        with reading(manifest):
            traced = tf.function(chain).get_concrete_function(specs).structured_outputs
            cloudpickle.dumps(chain)
    except ConfigError:
        raise
    except Exception as error:
        first = next(iter(schema.inputs))
        raise ConfigError(
            f"transform: expected a function of a batch of features, such as {first.name!r} {first.text}; it fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    return replace(schema, outputs=tuple(_tensors(traced, ()))), chain


@contextmanager
def reading(manifest: Manifest | None) -> Iterator[None]:
    """Let transforms that are traced inside know which files they will read."""
    token = _reading.set(manifest)
    try:
        yield
    finally:
        _reading.reset(token)


def manifest_read() -> Manifest | None:
    """The files that a transform which is traced now will read; None for a stream and while scoring."""
    return _reading.get()


def save_transform(transform: Transform, path: Path) -> None:
    """Keep a transform in a file, for :func:`load_transform`."""
    path.write_bytes(cloudpickle.dumps(transform))


def load_transform(content: bytes) -> Transform:
    """The transform of a file's content. Loading it runs code of whoever wrote it."""
    loaded: Transform = cloudpickle.loads(content)
    return loaded


def _row_spec(values: Any) -> Any:
    if isinstance(values, tf.SparseTensor):
        return tf.SparseTensorSpec(values.shape[1:], values.dtype)
    if isinstance(values, tf.RaggedTensor):
        if values.ragged_rank == 1:
            return tf.TensorSpec(values.shape[1:], values.dtype)
        return tf.RaggedTensorSpec(values.shape[1:], values.dtype, values.ragged_rank - 1, tf.int64)
    return tf.TensorSpec(values.shape[1:], values.dtype)


def _tensors(traced: Any, outer: tuple[str, ...]) -> Iterator[Tensor]:
    if not isinstance(traced, Mapping) or not traced:
        raise ConfigError(f"transform: expected it to return a dict of tensors, got {traced!r}")
    for key, value in traced.items():
        path = (*outer, str(key))
        if isinstance(value, Mapping):
            yield from _tensors(value, path)
            continue
        shape = getattr(value, "shape", None)
        kinds = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
        if not isinstance(value, kinds) or shape is None or shape.rank in (None, 0):
            raise ConfigError(
                f"transform: expected a tensor with a row for each row of a batch, got {key!r}: {value!r}"
            )
        if shape[0] is not None:
            raise ConfigError(
                f"transform: expected as many rows as a batch has, got {shape[0]} in {key!r}; keep the first dimension"
            )
        unknown = [n for n in shape[1:] if n is None]
        if unknown and not isinstance(value, tf.RaggedTensor):
            raise ConfigError(
                f"transform: expected a known shape of a row, got {tuple(shape[1:])} in {key!r}; say it with "
                "tf.ensure_shape"
            )
        sparse = isinstance(value, tf.SparseTensor)
        yield Tensor(".".join(path), value.dtype.name, tuple(shape[1:]), path if outer else (), sparse)
