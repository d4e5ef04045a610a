"""How long the lists of Parquet files are; footers do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow.compute as pc

from tfdist.data.arrow import member_of
from tfdist.data.column import Column
from tfdist.data.storage import Entry, Storage

_THREADS = 8
_MOST_REMEMBERED = 100_000

Range = tuple[int, int] | None
"""The shortest and the longest list; None where there is none."""

_remembered: dict[tuple[str, str, int, str, str], Range] = {}


def list_lengths(storage: Storage, files: Sequence[Entry], columns: Sequence[Column]) -> dict[str, int]:
    """The lengths of columns whose lists have one length; missing lists do not count.

    The lists are decoded once, a row group of one column at a time in each of 8 threads, until two differ. What was
    found is remembered while the process lives and the files stay as they are.

    Args:
        storage: holds the files.
        files: all of the data.
        columns: of lists.

    Returns:
        Column name to length, 1 where there is no list at all. Columns of which lists differ, or are all empty, are
        left out.
    """
    found = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for column in columns:
            whole: Range = None
            # In portions, so that few files are read in vain after two lists that differ.
            for start in range(0, len(files), _THREADS):
                part = files[start : start + _THREADS]
                for one in threads.map(lambda file, c=column: _range(storage, file, c), part):
                    whole = _together(whole, one)
                if whole is not None and whole[0] != whole[1]:
                    break
            low, high = whole or (1, 1)
            if low == high > 0:  # TensorFlow cuts no batch out of tensors of size 0
                found[column.name] = low
    return found


def _range(storage: Storage, file: Entry, column: Column) -> Range:
    key = (storage.url, file.path, file.size_bytes, file.version, column.name)
    if key not in _remembered:
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = _read_range(storage, file, column)
    return _remembered[key]


def _read_range(storage: Storage, file: Entry, column: Column) -> Range:
    whole: Range = None
    path = ".".join((column.file_name, *column.member))
    with storage.parquet(file.path) as opened:
        for group in range(opened.metadata.num_row_groups):
            lists = opened.read_row_group(group, columns=[path], use_threads=False).column(0)
            ends = pc.min_max(pc.list_value_length(member_of(lists, column.member))).as_py()
            if ends["min"] is not None:
                whole = _together(whole, (ends["min"], ends["max"]))
            if whole is not None and whole[0] != whole[1]:
                break
    return whole


def _together(one: Range, other: Range) -> Range:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
