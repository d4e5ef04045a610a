"""Columns in memory: numbers, texts by their codes, lists of varying length; cut, joined and gathered alike."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.data.texts import Raw, Text, is_text, joined_texts

ALIGNMENT = 64
"""TensorFlow takes over arrays at such addresses, in bytes, and copies others."""

_SMALLEST_REUSED = 2**14  # bytes; small memory comes from a heap that is warm anyhow
_REUSED_BYTES = 48 * 2**20


class Ragged(NamedTuple):
    """Lists of varying length.

    Args:
        values: of all lists, end to end; lists themselves where lists hold lists.
        splits: ``[rows + 1] int64``; row ``i`` holds the values from ``splits[i]`` to ``splits[i + 1]``, from 0 on.
    """

    values: Values
    splits: np.ndarray


Values = np.ndarray | Text | Raw | Ragged
"""A tensor of a column, its rows along the first dimension; ``[rows] object`` of ``bytes`` are texts too."""


def rows_of(values: Values) -> int:
    """How many rows there are."""
    if isinstance(values, Ragged):
        return len(values.splits) - 1
    if isinstance(values, Raw):
        return values.rows
    return len(values.codes if isinstance(values, Text) else values)


def part(values: Values, start: int, stop: int) -> Values:
    """The rows from ``start`` to ``stop``, as a view."""
    if isinstance(values, Ragged):
        splits = values.splits[start : stop + 1]
        first = int(splits[0])
        return Ragged(part(values.values, first, int(splits[-1])), splits - first if first else splits)
    if isinstance(values, Text):
        return Text(values.codes[start:stop], values.values)
    if isinstance(values, Raw):
        return values.part(start, stop)
    return values[start:stop]


def joined(parts: Sequence[Values]) -> Values:
    """The parts after one another; in new memory where there are several."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Ragged):
        lengths = [np.diff(p.splits) for p in parts if isinstance(p, Ragged)]
        return Ragged(joined([p.values for p in parts if isinstance(p, Ragged)]), _splits(np.concatenate(lengths)))
    if is_text(first):
        return joined_texts(parts)
    arrays = [p for p in parts if isinstance(p, np.ndarray)]
    out = aligned((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def gathered(values: Values, places: np.ndarray) -> Values:
    """The rows at ``places``, ``[n] int64``, all of which exist; in new memory."""
    if isinstance(values, Ragged):
        starts = values.splits[places]
        splits = _splits(values.splits[places + 1] - starts)
        flat = np.repeat(starts - splits[:-1], np.diff(splits)) + np.arange(splits[-1])
        return Ragged(gathered(values.values, flat), splits)
    if isinstance(values, Text):
        return Text(_taken(values.codes, places), values.values)
    if isinstance(values, Raw):
        return values.gathered(places)
    return _taken(values, places)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array, of any content, that TensorFlow can take over without a copy; nobody else holds its memory."""
    size = int(np.prod(shape)) * dtype.itemsize
    return _buffers.take(size).view(dtype).reshape(shape)


class _Buffers:
    """Memory that is used again once all arrays over it are gone.

    The first touch of new memory costs more than what is then done with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._bytes = 0

    def take(self, size: int) -> np.ndarray:
        """``[size] uint8``."""
        if size < _SMALLEST_REUSED:
            return _aligned_in(np.empty(size + ALIGNMENT, np.uint8), size)
        with self._lock:
            same = self._held.setdefault(size, [])
            self._held.move_to_end(size)
            # All views of an array name it, not each other, as their base; here only the list holds an unused one.
            for place in range(len(same)):
                if _references(same, place) == _REFERENCES_UNUSED:
                    return _aligned_in(same[place], size)
            same.append(np.empty(size + ALIGNMENT, np.uint8))
            self._bytes += size
            self._make_room(size)
            return _aligned_in(same[-1], size)

    def _make_room(self, kept: int) -> None:
        """Let go of memory, of sizes not asked for lately first; what is in use stays as long as its arrays."""
        for size in [*self._held]:
            while self._bytes > _REUSED_BYTES and len(self._held[size]) > (size == kept):
                self._held[size].pop(0)
                self._bytes -= size
            if not self._held[size]:
                del self._held[size]


def _references(held: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(held[place])


# Asked, since versions of Python differ in what they count for a call.
_REFERENCES_UNUSED = _references([np.empty(0)], 0)
_buffers = _Buffers()


def _aligned_in(raw: np.ndarray, size: int) -> np.ndarray:
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _taken(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    if array.dtype == object:
        return np.asarray(array[places])
    # Places are in range; with the mode "raise" numpy would gather into a copy first.
    out = aligned((len(places), *array.shape[1:]), array.dtype)
    return np.take(array, places, axis=0, out=out, mode="wrap")


def _splits(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits
