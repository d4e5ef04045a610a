"""What must be known of rows before a training: their number, nulls, lengths of arrays, values out of range."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdist.data.columns import null_error, values_of
from tfdist.data.schema import Column, Schema
from tfdist.data.types import tensor_type
from tfdist.errors import DataError


@dataclass(frozen=True)
class Facts:
    """What one pass over the rows says of columns.

    Args:
        rows: how many there are.
        found: (kind of fact, column) to the fact, None where there is no value.
    """

    rows: int
    found: Mapping[tuple[str, str], Any]

    def to_json(self) -> str:
        return json.dumps({"rows": self.rows, "found": [[*key, value] for key, value in self.found.items()]})

    @staticmethod
    def from_json(text: str) -> Facts:
        raw = json.loads(text)
        return Facts(raw["rows"], {(kind, name): value for kind, name, value in raw["found"]})

    def of(self, kind: str, column: Column) -> Any:
        """The fact of a column; 0 for one that was not asked for."""
        return self.found.get((kind, column.name), 0)


def limits_of(column: Column) -> tuple[Decimal, Decimal]:
    """The least and the largest whole number that its dtype holds."""
    limits = np.iinfo(column.dtype)
    return Decimal(int(limits.min)), Decimal(int(limits.max))


def facts_of(batch: pa.RecordBatch, schema: Schema) -> Facts:
    """The facts of some rows, whose columns are named as in files."""
    found: dict[tuple[str, str], Any] = {("bytes", ""): batch.nbytes}
    for column in schema.columns:
        name, values = column.name, batch.column(column.file_name)
        found["nulls", name] = values.null_count
        if column.shape:
            length = pc.min_max(pc.list_value_length(values)).as_py()
            found["shortest", name], found["longest", name] = length["min"], length["max"]
            found["inner nulls", name] = 0
            for _ in column.shape:
                values = values.flatten()
                found["inner nulls", name] += values.null_count
        elif column.narrows:
            outside = _outside(values, column)
            found["outside", name], found["example", name] = (
                len(outside),
                outside.max().item() if len(outside) else None,
            )
    return Facts(batch.num_rows, found)


def _outside(values: pa.Array, column: Column) -> np.ndarray:
    """The values that the column's dtype does not hold; NaN is one, a null is none."""
    natural = tensor_type(column.spark_type)
    assert natural is not None
    (numbers,) = values_of(values, replace(column, dtype=natural.dtype, nulls="fill", fill=None))
    assert isinstance(numbers, np.ndarray)
    limits = np.iinfo(column.dtype)
    return numbers[~((numbers >= limits.min) & (numbers <= limits.max))]


def together(parts: Sequence[Facts]) -> Facts:
    """The facts of the rows of all parts."""
    found: dict[tuple[str, str], Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part.found):
        values = [v for part in parts if (v := part.found.get(key)) is not None]
        combine: Any = {"shortest": min, "longest": max, "example": max}.get(key[0], sum)
        found[key] = combine(values) if values else None
    return Facts(sum(part.rows for part in parts), found)


def checked(schema: Schema, counts: Mapping[str, int], facts: Facts) -> dict[str, int]:
    """The lengths of arrays and vectors.

    Raises:
        DataError: nulls without a policy, arrays of other lengths or values of another range than declared.
    """
    problems, lengths = [], {}
    for column in schema.columns:
        if column.nulls == "error" and counts.get(column.name, 0):
            problems.append(str(null_error(column, counts[column.name])))
        if outside := facts.of("outside", column):
            problems.append(
                f"column {column.name!r}: expected values that fit {column.dtype}, got {outside} that do not, for "
                f"example {facts.of('example', column)}; choose a wider dtype"
            )
        if not column.shape:
            continue
        low, high = facts.of("shortest", column), facts.of("longest", column)
        if low is not None and not _fits(column, low, high):
            problems.append(_length_problem(column, low, high))
        if (missing := facts.of("inner nulls", column)) and column.nulls != "fill":
            problems.append(
                f"column {column.name!r}: expected no nulls inside its arrays, got {missing}; "
                f"say nulls={{{column.name!r}: ('fill', value)}} or fill them in Spark with transform"
            )
        if column.shape[0] is not None:
            lengths[column.name] = column.shape[0]
        elif column.layout == "fixed" and low == high and low != 0:  # TensorFlow cuts no batch out of tensors of size 0
            lengths[column.name] = low or 1
    if problems:
        raise DataError("\n".join(problems))
    return lengths


def _fits(column: Column, low: int, high: int) -> bool:
    """Whether arrays of ``low`` to ``high`` values are what was declared."""
    length = column.shape[0]
    if length is None:
        return column.spark_type != "vector" or low == high > 0
    return high <= length if column.layout == "padded" else low == high == length


def _length_problem(column: Column, low: int, high: int) -> str:
    length = column.shape[0]
    wanted = "one length" if length is None else f"length {length}"
    name = f"dtypes={{{column.name!r}"
    remedy = (
        f"say {name}: '{column.dtype}[*]'}} for a ragged tensor, or {name}: '{column.dtype}[<={high}]'}} to pad them"
    )
    if column.spark_type == "vector":
        remedy = "the vectors of a column have one size"
    return (
        f"column {column.name!r}: expected {column.spark_type} values of "
        f"{'at most ' if column.layout == 'padded' else ''}{wanted}, got lengths {low} to {high}; {remedy}"
    )
