"""Parquet files with dates of the calendar before 1582, as Spark 2 wrote them and Spark 3 and later still can."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

import pyarrow.compute as pc

from tfdist.data.column import Column
from tfdist.data.footers import Footer, chunks_of
from tfdist.data.storage import Storage
from tfdist.data.types import element_type
from tfdist.errors import DataError

# Until then the calendars, or the zones' offsets from UTC that go with them, differ; so does Spark (RebaseDateTime).
_DATES_AGREE, _TIMES_AGREE = date(1582, 10, 15), datetime(1900, 1, 1)


def check_calendar(storage: Storage, footers: Sequence[Footer], columns: Sequence[Column]) -> None:
    """Refuse old dates that a file holds in the hybrid Julian and Gregorian calendar: Spark would read others.

    Times of 96 bits have no statistics: they are read, of such a file.

    Raises:
        DataError: a column may hold some.
    """
    dated = [c for c in columns if element_type(c.spark_type) in ("date", "timestamp", "timestamp_ntz")]
    for footer in footers if dated else ():
        said = footer.metadata.metadata or {}
        version = said.get(b"org.apache.spark.version", b"3.1")
        dates = b"org.apache.spark.legacyDateTime" in said or version < b"3.0"
        int96 = b"org.apache.spark.legacyINT96" in said or version < b"3.1"
        for column in dated if dates or int96 else ():
            chunks = [c for c in chunks_of(footer, column) if (int96 if c.physical_type == "INT96" else dates)]
            if any(_is_old(least) for least in _least(storage, footer, column, chunks)):
                raise DataError(
                    f"column {column.name!r}: expected dates since {_DATES_AGREE} and times since {_TIMES_AGREE.date()}"
                    f" in a file of the calendar before, got {footer.path} with older ones, or which does not tell; "
                    "read it through Spark with from_dataframe(spark.read.parquet(...))"
                )


def _least(storage: Storage, footer: Footer, column: Column, chunks: Sequence[Any]) -> list[Any]:
    """The smallest value of each chunk that holds any; an empty text where nothing tells it."""
    if not column.shape and not column.member and any(c.physical_type == "INT96" for c in chunks):
        with storage.parquet(footer.path, coerce_int96_timestamp_unit="us") as opened:
            times = opened.read(columns=[column.file_name]).column(0)
        return [] if times.null_count == len(times) else [pc.min(times).as_py()]
    return [_told(c.statistics) for c in chunks if not _is_empty(c)]


def _is_empty(chunk: Any) -> bool:
    told = chunk.statistics
    return not chunk.num_values or bool(told and told.has_null_count and told.null_count == chunk.num_values)


def _told(statistics: Any) -> Any:
    try:
        return statistics.min if statistics is not None and statistics.has_min_max else ""
    except (ValueError, OverflowError):  # of a year that Python does not have
        return ""


def _is_old(least: Any) -> bool:
    if isinstance(least, datetime):
        return least.replace(tzinfo=None) < _TIMES_AGREE
    return not isinstance(least, date) or least < _DATES_AGREE
