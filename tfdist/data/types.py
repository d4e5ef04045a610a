"""Which tensor a Spark type becomes: pure functions over the type's name.

A type is written as Spark's ``simpleString`` (``bigint``, ``decimal(10,2)``, ``array<float>``), ``vector`` for the
vectors of Spark ML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUMBERS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
DTYPES = (*NUMBERS, "string")

_SCALARS = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "string",
    "date": "int32",
    "timestamp": "int64",
    "timestamp_ntz": "int64",
}
_SHORT = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")
_ARRAY = re.compile(r"array<(.*)>")
_MOST_DEPTH = 2
EXACT_DECIMAL_DIGITS = 15
"""Decimals of up to so many digits survive as float64 (IEEE 754, DBL_DIG)."""
SCALED_DECIMAL_DIGITS = 18
"""Decimals of up to so many digits, times a power of ten, fit int64."""


@dataclass(frozen=True)
class TensorType:
    """What a row of a column becomes.

    Args:
        dtype: name of the tensor's dtype.
        depth: 0 for a single value, 1 for an array or vector, 2 for an array of arrays.
    """

    dtype: str
    depth: int


def simple_type(json_type: Any) -> str:
    """The name of a type given as Spark's JSON (``DataType.jsonValue()``)."""
    if isinstance(json_type, str):
        if json_type.startswith(("varchar(", "char(", "string collate")):
            return "string"
        return _SHORT.get(json_type, json_type)
    assert isinstance(json_type, Mapping)
    match json_type["type"]:
        case "array":
            return f"array<{simple_type(json_type['elementType'])}>"
        case "map":
            return f"map<{simple_type(json_type['keyType'])},{simple_type(json_type['valueType'])}>"
        case "struct":
            inner = ",".join(f"{f['name']}:{simple_type(f['type'])}" for f in json_type["fields"])
            return f"struct<{inner}>"
        case "udt" if str(json_type.get("class", "")).endswith(".VectorUDT"):
            return "vector"
        case kind:
            return f"{kind} {json_type.get('class') or json_type.get('pyClass') or ''}".strip()


def tensor_type(spark_type: str) -> TensorType | None:
    """The tensor of a type, or None when it has none."""
    if spark_type == "vector":
        return TensorType("float64", 1)
    element, depth = _innermost(spark_type)
    dtype = _scalar(element)
    return None if dtype is None or depth > _MOST_DEPTH else TensorType(dtype, depth)


def element_type(spark_type: str) -> str:
    """The type of a single value: what arrays or a vector hold, else the type itself."""
    return "double" if spark_type == "vector" else _innermost(spark_type)[0]


def decimal_digits(spark_type: str) -> int | None:
    """Digits of a decimal, or of the decimals in an array; None for other types."""
    found = _DECIMAL.fullmatch(element_type(spark_type))
    return int(found[1]) if found else None


def decimal_scale(spark_type: str) -> int | None:
    """Digits after the point of a decimal, or of the decimals in an array; None for other types."""
    found = _DECIMAL.fullmatch(element_type(spark_type))
    return int(found[2]) if found else None


def is_fractional(spark_type: str) -> bool:
    """Whether values of a type may have a fraction: floats and decimals, arrays and vectors of them."""
    return element_type(spark_type) in ("float", "double") or decimal_digits(spark_type) is not None


def way_out(spark_type: str) -> str:
    """What to do with a column whose type has no tensor."""
    if spark_type.startswith("map<"):
        return "select the keys you need as columns, for example col['key']"
    if spark_type.startswith("struct<type:"):
        return "it is a vector of Spark ML; read it through Spark with from_dataframe"
    if spark_type.startswith("struct<"):
        return "it has no fields; leave it out with features=[...]"
    if spark_type == "variant":
        return "take the values out with variant_get(col, path, type)"
    if spark_type == "interval":
        return "it has months and days of no fixed length; take it apart with extract(field FROM col)"
    if spark_type == "void":
        return "it has no values; leave it out with features=[...] or cast it"
    if spark_type.startswith("array<struct<"):
        return "select its fields as arrays of their own, for example col.field"
    if spark_type.startswith("array<array<array<"):
        return "flatten it to arrays of arrays with flatten(col)"
    return "cast it to a number, a string or an array of numbers, or leave it out with features=[...]"


def cast_problem(spark_type: str, natural: str, wanted: str, scaled: bool = False) -> str | None:
    """Why values of a type cannot be cast to the dtype ``wanted``; None when they can."""
    if scaled:
        digits = decimal_digits(spark_type)
        if digits is None or wanted != "int64":
            return "only decimals are scaled, to int64"
        return None if digits <= SCALED_DECIMAL_DIGITS else f"int64 holds {SCALED_DECIMAL_DIGITS} digits; use 'string'"
    if wanted == natural:
        return None
    if wanted == "string":
        whole = natural.startswith("int") and element_type(spark_type) in ("tinyint", "smallint", "int", "bigint")
        return None if whole or decimal_digits(spark_type) else "only whole numbers and decimals become text"
    return "cast text to numbers in Spark" if natural == "string" else None


def _innermost(spark_type: str) -> tuple[str, int]:
    depth = 0
    while array := _ARRAY.fullmatch(spark_type):
        spark_type, depth = array[1], depth + 1
    return spark_type, depth


def _scalar(spark_type: str) -> str | None:
    if _DECIMAL.fullmatch(spark_type):
        return "float64"
    if spark_type.startswith("interval "):
        return "int32" if "year" in spark_type or "month" in spark_type else "int64"
    return _SCALARS.get(spark_type)
