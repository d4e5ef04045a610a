"""The facts of rows as Spark hands them out, partition by partition, where no file tells them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdist.data.arrow import values_of
from tfdist.data.casts import lost, lost_decimals
from tfdist.data.column import Column
from tfdist.data.facts import Facts
from tfdist.data.schema import Schema
from tfdist.data.types import decimal_digits, element_type, tensor_type


def facts_of_batch(batch: pa.RecordBatch, schema: Schema) -> Facts:
    """The facts of some rows, whose columns are named as in files."""
    found: dict[tuple[str, str], Any] = {("bytes", ""): batch.nbytes}
    for column in schema.columns:
        name, values = column.name, batch.column(column.file_name)
        found["nulls", name] = values.null_count
        if column.item_bytes:
            length = pc.min_max(pc.binary_length(values)).as_py()
            found["shortest", name], found["longest", name] = length["min"], length["max"]
        elif column.shape:
            sparse = column.layout == "sparse"
            lengths = pc.struct_field(values, "size") if sparse else pc.list_value_length(values)
            length = pc.min_max(lengths).as_py()
            found["shortest", name], found["longest", name] = length["min"], length["max"]
            found["inner nulls", name] = 0
            if sparse:
                values = pc.struct_field(values, "entries")
            for _ in column.shape:
                values = values.flatten()
                values = pc.struct_field(values, "value") if sparse else values
                found["inner nulls", name] += values.null_count
        if column.narrows:
            outside = _outside(values, column)
            found["outside", name] = len(outside)
            found["example", name] = max(outside) if outside else None
    return Facts(batch.num_rows, found)


def together(parts: Sequence[Facts]) -> Facts:
    """The facts of the rows of all parts."""
    found: dict[tuple[str, str], Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part.found):
        values = [v for part in parts if (v := part.found.get(key)) is not None]
        combine: Any = {"shortest": min, "longest": max, "example": max}.get(key[0], sum)
        found[key] = combine(values) if values else None
    return Facts(sum(part.rows for part in parts), found)


def facts_to_json(facts: Facts) -> str:
    """As JSON text, for :func:`facts_from_json`."""
    return json.dumps({"rows": facts.rows, "found": [[*key, value] for key, value in facts.found.items()]})


def facts_from_json(text: str) -> Facts:
    """The facts of a text that :func:`facts_to_json` made."""
    raw = json.loads(text)
    return Facts(raw["rows"], {(kind, name): value for kind, name, value in raw["found"]})


def _outside(values: pa.Array, column: Column) -> list[float | str]:
    """The single values that the column's dtype does not hold, decimals as text; a null is none."""
    if decimal_digits(column.spark_type) is not None and np.dtype(column.dtype).kind in "iu":
        return [str(value) for value in lost_decimals(values, column.dtype)]
    natural = tensor_type(column.spark_type)
    assert natural is not None
    plain = replace(
        column,
        spark_type=element_type(column.spark_type),
        dtype=natural.dtype,
        shape=(),
        layout="fixed",
        nulls="fill",
        fill=None,
    )
    (numbers,) = values_of(values, plain)
    assert isinstance(numbers, np.ndarray)
    outside: list[float | str] = lost(numbers, column.dtype).tolist()
    return outside
