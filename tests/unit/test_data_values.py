"""Columns in memory: lists of varying length are cut, joined and gathered as Python's lists are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data.texts import Raw, Text, compact, plain
from tfdist.data.values import Ragged, Values, aligned, gathered, joined, part, rows_of

ROWS = st.lists(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3), max_size=3), min_size=1, max_size=8)


def made(rows: list[Any], depth: int) -> Values:
    """Nested lists of bytes as values."""
    if not depth:
        distinct = np.array(sorted(set(rows)), object)
        return Text(np.array([list(distinct).index(r) for r in rows], np.int32), distinct)
    splits = np.cumsum([0, *map(len, rows)])
    return Ragged(made([value for row in rows for value in row], depth - 1), splits)


def listed(values: Values) -> list[Any]:
    """The same back."""
    if isinstance(values, Ragged):
        inner = listed(values.values)
        return [inner[a:b] for a, b in zip(values.splits, values.splits[1:], strict=False)]
    assert isinstance(values, Text)
    return list(values.values[values.codes])


@given(ROWS, ROWS, st.data())
def test_lists_of_lists_behave_like_lists(one: list[Any], other: list[Any], data: st.DataObject) -> None:
    """Any part, any joining and any choice of rows, repeated or not, holds what Python's lists would."""
    rows = [*one, *other, *one]
    first = made(one, 2)
    values = joined([first, made(other, 2), first])
    assert listed(values) == rows
    assert rows_of(values) == len(rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert listed(part(values, start, stop)) == rows[start:stop]
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    assert listed(gathered(values, np.array(places, np.int64))) == [rows[i] for i in places]


def test_memory_is_used_again_only_when_no_array_is_over_it() -> None:
    """An array, or a part of one that is still held, keeps its memory; once they are gone the next array gets it."""
    shape, dtype = (3, 40_001), np.dtype(np.float32)
    first = aligned(shape, dtype)
    first[:] = 1
    part_of_first = first[1, 5:10]
    place = first.ctypes.data
    assert place % 64 == 0
    del first
    other = aligned(shape, dtype)
    other[:] = 2
    assert part_of_first.tolist() == [1] * 5
    assert other.ctypes.data != place
    del part_of_first
    assert aligned(shape, dtype).ctypes.data == place


@given(st.lists(st.integers(0, 9), max_size=12))
def test_a_compact_text_has_the_same_rows_and_no_value_too_many(codes: list[int]) -> None:
    """Texts of few rows out of many distinct values keep the values that they use, and no more values than rows."""
    text = Text(np.array(codes, np.int32), np.array([b"%d" % i for i in range(10)], object))
    found = compact(text)
    assert listed(found) == listed(text)
    assert len(found.values) <= len(codes)


@pytest.mark.parametrize("length", [3, 2000])
@given(st.data())
def test_raw_texts_behave_like_a_list(length: int, data: st.DataObject) -> None:
    """Any part, joining or choice of bytes in several Arrow arrays, short or long, holds what Python's lists would."""
    one = [bytes([i]) * length for i in range(5)]
    sliced = pa.array([b"x", *one], pa.large_binary()).slice(1)
    raw = joined([Raw(pa.chunked_array([sliced])), Raw(pa.chunked_array([pa.array([b"", b"z"], pa.large_binary())]))])
    rows = [*one, b"", b"z"]
    assert rows_of(raw) == len(rows)
    assert plain(raw).tolist() == rows
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert plain(part(raw, start, stop)).tolist() == rows[start:stop]
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    chosen = gathered(raw, np.array(places, np.int64))
    assert plain(chosen).tolist() == [rows[i] for i in places]
    assert plain(joined([part(chosen, 1, len(places)), raw])).tolist() == [*(rows[i] for i in places[1:]), *rows]
    text = Text(np.array([1, 0], np.int32), np.array([b"p", b"q"], object))
    assert plain(joined([raw, text])).tolist() == [*rows, b"q", b"p"]
