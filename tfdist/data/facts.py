"""What one pass over written files says of columns, as far as footers tell it not, and what must hold of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyspark.sql.functions as F
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame

from tfdist.data.arrow import null_error
from tfdist.data.casts import unfit
from tfdist.data.column import Column
from tfdist.data.schema import Schema
from tfdist.data.types import decimal_digits, tensor_type
from tfdist.errors import DataError

_BECOMES_INFINITE = {"float16": 65520.0, "float32": (2 - 2**-24) * 2.0**127}
"""From where on values are rounded to infinity (IEEE 754: half a unit of the last digit above the largest value)."""


Places = Callable[[Mapping[tuple[str, str], SparkColumn]], Mapping[tuple[str, str], str]]
"""From conditions of wrong rows, by (kind of fact, column), to words for how many there are and which is the first."""


@dataclass(frozen=True)
class Facts:
    """What one pass over rows says of their columns.

    Args:
        rows: how many there are.
        found: (kind of fact, column) to the fact, None where there is no value.
    """

    rows: int
    found: Mapping[tuple[str, str], Any]

    def of(self, kind: str, column: Column) -> Any:
        """The fact of a column; 0 for one that was not asked for."""
        return self.found.get((kind, column.name), 0)


def facts_of(written: DataFrame | None, schema: Schema) -> Facts:
    """One pass over written files.

    Args:
        written: their rows; None where there is no file.
        schema: of them.
    """
    wanted: dict[tuple[str, str], SparkColumn] = {}
    for column in schema.columns:
        name, values = column.name, F.col(column.file_name)
        if column.shape or column.dtype == "string":
            # Footers count the nulls of numbers; of long texts they do not, and of arrays they count the values.
            wanted["nulls", name] = F.count(F.when(values.isNull(), 1))
        if column.shape:
            size, inner, missing = _within(column)
            wanted["shortest", name], wanted["longest", name] = F.min(size), F.max(size)
            wanted["inner nulls", name] = F.sum(missing)
            if column.narrows:
                outside = F.filter(inner, partial(_is_outside, column))
                wanted["outside", name] = F.sum(F.when(values.isNotNull(), F.size(outside)))
                wanted["example", name] = F.max(F.array_max(outside))
        elif column.narrows:
            outside = F.when(_is_outside(column, values), values)
            wanted["outside", name], wanted["example", name] = F.count(outside), F.max(outside)
    aggregates = [F.count(F.lit(1)), *wanted.values()]
    row = written.agg(*aggregates).head() if written is not None else None
    values = list(row) if row is not None else [0, *(None for _ in wanted)]
    return Facts(values[0], dict(zip(wanted, values[1:], strict=True)))


def _within(column: Column) -> tuple[SparkColumn, SparkColumn, SparkColumn]:
    """Of each list of a column its length, its single values and how many of them are null; null for a null."""
    values = F.col(column.file_name)
    if column.item_bytes:
        return F.octet_length(values), values, F.when(values.isNotNull(), 0)
    if column.layout == "sparse":
        return values["size"], values["entries"]["value"], F.when(values.isNotNull(), 0)
    size, inner, missing = F.size(values), values, F.size(F.filter(values, _is_null))
    if len(column.shape) > 1:
        inner = F.flatten(F.filter(values, _is_there))
        missing += F.size(F.filter(inner, _is_null))
    return F.when(values.isNotNull(), size), inner, F.when(values.isNotNull(), missing)


def _is_wrong(column: Column, size: SparkColumn, low: int, high: int) -> SparkColumn:
    """Whether a list is one of those that do not have the length that they should."""
    length = _length(column)
    if length is None:  # no vector is more right than another: those that are larger than the smallest
        return size > low if low < high else size == low
    return size > length if column.layout == "padded" else size != length


def _is_outside(column: Column, value: SparkColumn) -> SparkColumn:
    """Whether the dtype of a column does not hold a value; null for a null."""
    if column.dtype in _BECOMES_INFINITE:
        size = F.abs(value.cast("double"))
        return (size >= _BECOMES_INFINITE[column.dtype]) & (size < float("inf"))  # Spark sorts NaN after it
    limits = np.iinfo(column.dtype)
    low, high = int(limits.min), int(limits.max)
    natural = tensor_type(column.spark_type)
    if decimal_digits(column.spark_type) is not None:
        fraction = value % F.lit(Decimal(1)) != 0
        return fraction | ~F.floor(value).between(F.lit(Decimal(low)), F.lit(Decimal(high)))
    if natural is not None and natural.dtype.startswith("float"):
        # The limits are powers of two, which floats hold exactly; NaN is above them.
        return (value < float(low)) | (value >= float(high + 1)) | (F.rint(value) != value)
    return ~value.between(F.lit(Decimal(low)), F.lit(Decimal(high)))


def checked_lengths(
    schema: Schema, counts: Mapping[str, int], facts: Facts, places: Places | None = None
) -> dict[str, int]:
    """The lengths of arrays and vectors, of those that have one.

    Args:
        schema: as declared.
        counts: nulls in each column.
        facts: of the files.
        places: asked for the rows that are wrong, by conditions, for the message; None where rows
            have no lasting place.

    Raises:
        DataError: nulls without a policy, arrays of other lengths or values of another range than declared.
    """
    problems, lengths = [], {}
    where = _asked(schema, facts, places)
    for column in schema.columns:
        if column.nulls == "error" and counts.get(column.name, 0):
            problems.append(str(null_error(column, counts[column.name])))
        if outside := facts.of("outside", column):
            (expected, remedy), example = unfit(column), facts.of("example", column)
            problems.append(f"{expected}, got {outside} that do not, for example {example}; {remedy}")
        if not column.shape:
            continue
        low, high = facts.of("shortest", column), facts.of("longest", column)
        if low is not None and not _fits(column, low, high):
            problems.append(_length_problem(column, low, high, where.get(("lengths", column.name), "")))
        if (missing := facts.of("inner nulls", column)) and column.nulls != "fill":
            problems.append(
                f"column {column.name!r}: expected no nulls inside its arrays, got {missing}"
                f"{where.get(('inner nulls', column.name), '')}; "
                f"say nulls={{{column.name!r}: ('fill', value)}} or fill them in Spark with transform"
            )
        if column.shape[0] is not None:
            lengths[column.name] = column.shape[0]
        elif column.layout != "ragged" and low == high and low != 0:  # TensorFlow cuts no batches out of size 0
            lengths[column.name] = low or 1
    if problems:
        raise DataError("\n".join(problems))
    return lengths


def _asked(schema: Schema, facts: Facts, places: Places | None) -> Mapping[tuple[str, str], str]:
    if places is None:
        return {}
    wrong = {}
    for column in schema.columns:
        if not column.shape:
            continue
        size, _, nulls = _within(column)
        low, high = facts.of("shortest", column), facts.of("longest", column)
        if low is not None and not _fits(column, low, high):
            wrong["lengths", column.name] = _is_wrong(column, size, low, high)
        if facts.of("inner nulls", column) and column.nulls != "fill":
            wrong["inner nulls", column.name] = nulls > 0
    return places(wrong) if wrong else {}


def _fits(column: Column, low: int, high: int) -> bool:
    """Whether arrays of ``low`` to ``high`` values are what was declared."""
    length = _length(column)
    if length is None:
        return column.spark_type != "vector" or low == high > 0
    return high <= length if column.layout == "padded" else low == high == length


def _length(column: Column) -> int | None:
    """The length that lists must have; of bytes that are numbers, in bytes."""
    length = column.shape[0]
    return None if length is None else length * (column.item_bytes or 1)


def _length_problem(column: Column, low: int, high: int, where: str) -> str:
    length = _length(column)
    wanted = "one length" if length is None else f"length {length}"
    name = f"dtypes={{{column.name!r}"
    remedy = (
        f"say {name}: '{column.dtype}[*]'}} for a ragged tensor, or {name}: '{column.dtype}[<={high}]'}} to pad them"
    )
    if column.spark_type == "vector":
        remedy = "the vectors of a column have one size"
    if column.item_bytes:
        remedy = f"{column.declared} takes {length} bytes; leave its dtype out for texts"
    return (
        f"column {column.name!r}: expected {column.spark_type} values of "
        f"{'at most ' if column.layout == 'padded' else ''}{wanted}, got lengths {low} to {high}{where}; {remedy}"
    )


def _is_null(value: SparkColumn) -> SparkColumn:
    return value.isNull()


def _is_there(value: SparkColumn) -> SparkColumn:
    return value.isNotNull()
