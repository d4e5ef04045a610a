"""Tables of Arrow as the tensors of a batch, by the same rules in training and in scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tfdist.data.arrow import member_of, values_of
from tfdist.data.column import Column, Tensor
from tfdist.data.schema import Schema
from tfdist.data.sparse import Sparse, matrix_of
from tfdist.data.texts import Raw, Text, plain
from tfdist.data.values import Ragged, Values, aligned
from tfdist.errors import DataError

Plain = np.ndarray | Ragged | Sparse
"""The values of a tensor, texts as bytes."""

_PACKED_TOGETHER = 512  # rows, which stay in the processor's cache


def batch_from_arrow(table: pa.Table | pa.RecordBatch, schema: Schema) -> dict[str, Plain]:
    """Rows as the tensors that a model reads, with null policies and casts applied as in training.

    Rows that a ``drop`` policy leaves out are left out; :func:`rows_kept` says which ones stay.

    Args:
        table: holds at least the feature columns, by the user's names; others are ignored.
        schema: of the training data.

    Returns:
        Tensor name to array ``[rows, *shape]``; ``object`` arrays of ``bytes`` for strings; values and splits for
        lists of varying length; indices and values for sparse tensors. The label is left out.

    Raises:
        DataError: a column is missing, has nulls that its policy refuses, or values of another type or length.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    kept = rows_kept(table, schema)
    if kept is not None:
        table = table.filter(pa.array(kept))
    columns = {name: values_of(_field(table, schema.column(name)), schema.column(name)) for name in schema.features}
    values = tensors_of(schema, columns)
    return {tensor.name: _decoded(v, tensor) for tensor, v in zip(schema.inputs, values, strict=True)}


def tensors_of(schema: Schema, columns: Mapping[str, tuple[Values, ...]]) -> list[Values]:
    """The values of ``schema.tensors`` out of those of its columns (:func:`values_of`); the label may be left out."""
    packed = {name for pack in schema.packs for name in pack.members}
    tensors = [v for name in schema.features for v in columns[name][name in packed :]]
    tensors += [_packed([columns[name][0] for name in pack.members]) for pack in schema.packs]
    return tensors + [v for name, values in columns.items() if name == schema.label for v in values]


def _packed(columns: Sequence[Values]) -> np.ndarray:
    """Columns as the matrix ``[rows, columns]``."""
    arrays = [c for c in columns if isinstance(c, np.ndarray)]
    rows = len(arrays[0])
    matrix = aligned((rows, len(arrays)), arrays[0].dtype)
    for start in range(0, rows, _PACKED_TOGETHER):
        stop = start + _PACKED_TOGETHER
        matrix[start:stop] = np.stack([a[start:stop] for a in arrays]).T
    return matrix


def _decoded(values: Values, tensor: Tensor) -> Plain:
    if isinstance(values, Ragged):
        if tensor.sparse:
            return matrix_of(values, tensor.shape[0] or 0)
        inner = _decoded(values.values, tensor)
        assert not isinstance(inner, Sparse)
        return Ragged(inner, values.splits)
    return plain(values) if isinstance(values, Text | Raw) else values


def rows_kept(table: pa.Table, schema: Schema) -> np.ndarray | None:
    """Which rows the ``drop`` policies of the features keep: ``[rows] bool``, or None when all stay."""
    kept = None
    for name in schema.features:
        if schema.column(name).nulls == "drop" and (values := _field(table, schema.column(name))).null_count:
            valid = np.asarray(values.is_valid())
            kept = valid if kept is None else kept & valid
    return kept


def _field(table: pa.Table, column: Column) -> pa.ChunkedArray:
    """A column by its name; of a struct also out of the column that holds it."""
    name, member = column.name, column.path[1:]
    if member and name not in table.column_names:
        name = column.path[0]
    places = table.schema.get_all_field_indices(name)
    if len(places) != 1:
        raise DataError(
            f"column {column.name!r}: expected once in the rows, got {len(places)} times; they have "
            f"{', '.join(map(repr, table.column_names[:20]))}"
        )
    return member_of(table.column(places[0]), member if name != column.name else ())
