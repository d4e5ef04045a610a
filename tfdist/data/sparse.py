"""Vectors that are mostly zeros: their other values, each with its place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tfdist.data.values import Ragged


class Sparse(NamedTuple):
    """A matrix by its entries; places that have none are 0.

    Args:
        indices: ``[entries, 2] int64``, row and place of each entry, in their order.
        values: ``[entries]``.
        shape: rows and length of a row.
    """

    indices: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]


def entry_type(dtype: Any) -> np.dtype[Any]:
    """An entry of a row: in memory and on the local disk a sparse row is a list of them."""
    return np.dtype([("place", np.int32), ("value", dtype)], align=True)


def entries_of(places: np.ndarray, values: np.ndarray, splits: np.ndarray) -> Ragged:
    """Rows of entries.

    Args:
        places: ``[entries] int32`` of all rows, end to end.
        values: ``[entries]``.
        splits: ``[rows + 1] int64``.
    """
    entries = np.empty(len(values), entry_type(values.dtype))
    entries["place"], entries["value"] = places, values
    return Ragged(entries, splits)


def entries_of_dense(matrix: np.ndarray) -> Ragged:
    """Rows of entries out of ``[rows, length]``."""
    there = matrix != 0
    splits = np.zeros(len(matrix) + 1, np.int64)
    np.cumsum(np.count_nonzero(there, axis=1), out=splits[1:])
    return entries_of(np.nonzero(there)[1], matrix[there], splits)


def dense_of_entries(rows: Ragged, length: int) -> np.ndarray:
    """``[rows, length]`` out of rows of entries."""
    sparse = matrix_of(rows, length)
    matrix = np.zeros(sparse.shape, sparse.values.dtype)
    matrix[tuple(sparse.indices.T)] = sparse.values
    return matrix


def matrix_of(rows: Ragged, length: int) -> Sparse:
    """Rows of entries as a matrix."""
    entries, count = rows.values, len(rows.splits) - 1
    assert isinstance(entries, np.ndarray)
    numbers = np.repeat(np.arange(count), np.diff(rows.splits))
    return Sparse(np.stack([numbers, entries["place"]], axis=1), entries["value"].copy(), (count, length))
