"""Texts and bytes in memory: by codes into their distinct values, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

_LONG_BYTES = 512  # where to copy a text costs more than to make a Python object of it


class Text(NamedTuple):
    """Strings as codes into distinct values, which is how Parquet keeps them.

    Args:
        codes: ``[rows, ...] int32``.
        values: ``[distinct] object``, each ``bytes``.
    """

    codes: np.ndarray
    values: np.ndarray


class Raw(NamedTuple):
    """Strings that rarely repeat, such as images, where Arrow has read them.

    Args:
        chunks: ``large_binary`` without nulls.
        places: ``[rows] int64``, which of them; None for all.
    """

    chunks: pa.ChunkedArray
    places: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.chunks) if self.places is None else len(self.places)

    def part(self, start: int, stop: int) -> Raw:
        """The rows from ``start`` to ``stop``."""
        if self.places is None:
            return Raw(self.chunks.slice(start, stop - start))
        return Raw(self.chunks, self.places[start:stop])

    def gathered(self, places: np.ndarray) -> Raw:
        """The rows at ``places``, ``[n] int64``."""
        return Raw(self.chunks, places if self.places is None else self.places[places])

    def plain(self) -> np.ndarray:
        """``[rows] object``, each ``bytes``."""
        if self.places is None:
            return np.asarray(self.chunks.to_numpy())
        if self.chunks.nbytes < _LONG_BYTES * len(self.chunks):
            return np.asarray(self.chunks.take(pa.array(self.places)).to_numpy())
        # To take them, Arrow would lay all chunks together.
        bounds = np.cumsum([0, *map(len, self.chunks.chunks)])
        numbers = np.searchsorted(bounds, self.places, "right") - 1
        found = np.empty(len(self.places), object)
        for number in np.unique(numbers):
            own = np.flatnonzero(numbers == number)
            array = self.chunks.chunk(number)
            _, offsets, content = array.buffers()
            ends = np.frombuffer(offsets, np.int64)[array.offset :]
            at, view = self.places[own] - bounds[number], memoryview(content)
            found[own] = [bytes(view[a:b]) for a, b in zip(ends[at].tolist(), ends[at + 1].tolist(), strict=True)]
        return found


def is_text(values: object) -> bool:
    """Whether they are texts, in whatever form: ``[rows] object`` of ``bytes`` too."""
    return isinstance(values, Text | Raw) or (isinstance(values, np.ndarray) and values.dtype == object)


def plain(texts: object) -> np.ndarray:
    """The texts themselves, ``[rows, ...] object``, each ``bytes``."""
    if isinstance(texts, Text):
        return np.asarray(texts.values[texts.codes])
    if isinstance(texts, Raw):
        return texts.plain()
    assert isinstance(texts, np.ndarray)
    return texts


def as_text(texts: object) -> Text:
    """The texts by codes."""
    if isinstance(texts, Text):
        return texts
    values = plain(texts)
    return Text(np.arange(len(values), dtype=np.int32), values)


def compact(text: Text) -> Text:
    """The text with no more distinct values than places, since TensorFlow copies all of them."""
    if len(text.values) <= text.codes.size:
        return text
    codes, used = pd.factorize(text.codes.reshape(-1))
    return Text(codes.reshape(text.codes.shape).astype(np.int32), text.values[used])


def joined_texts(parts: Sequence[object]) -> Text | Raw | np.ndarray:
    """The parts after one another."""
    raw = [p for p in parts if isinstance(p, Raw) and p.places is None]
    if len(raw) == len(parts):
        return Raw(pa.chunked_array([chunk for p in raw for chunk in p.chunks.chunks], pa.large_binary()))
    if any(isinstance(p, Text) for p in parts):
        return _by_codes([as_text(p) for p in parts])
    return np.concatenate([plain(p) for p in parts])


def _by_codes(parts: Sequence[Text]) -> Text:
    """Codes into the distinct values of all parts; those of one row group are the same array."""
    starts: dict[int, int] = {}
    distinct: list[np.ndarray] = []
    codes = []
    for text in parts:
        if id(text.values) not in starts:
            starts[id(text.values)] = sum(map(len, distinct))
            distinct.append(text.values)
        start = np.int32(starts[id(text.values)])
        codes.append(text.codes + start if start else text.codes)
    return Text(np.concatenate(codes), distinct[0] if len(distinct) == 1 else np.concatenate(distinct))
