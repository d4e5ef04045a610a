"""The features of tf.train.Example and the Spark types that they are, exactly or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tfdist.errors import DataError

INT64, FLOAT, BYTES = "int64_list", "float_list", "bytes_list"

_KINDS = {
    **dict.fromkeys(("boolean", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz"), INT64),
    "float": FLOAT,
    "string": BYTES,
    "binary": BYTES,
}
SOURCES = {INT64: pa.int64(), FLOAT: pa.float32(), BYTES: pa.binary()}
# From the list's type to the column's, by casts that refuse what does not fit.
CASTS: dict[str, tuple[pa.DataType, ...]] = {
    "boolean": (pa.uint8(), pa.bool_()),
    "tinyint": (pa.int8(),),
    "smallint": (pa.int16(),),
    "int": (pa.int32(),),
    "bigint": (),
    "date": (pa.int32(), pa.date32()),
    "timestamp": (pa.timestamp("us", tz="UTC"),),
    "timestamp_ntz": (pa.timestamp("us"),),
    "float": (),
    "double": (pa.float64(),),
    "string": (pa.string(),),
    "binary": (),
}


@dataclass(frozen=True)
class Feature:
    """A feature of the examples and the column that it is.

    Args:
        name: of both.
        element: Spark's name of a value's type, for example ``bigint``.
        array: whether the column holds arrays of it.
    """

    name: str
    element: str
    array: bool

    @property
    def kind(self) -> str:
        """The list of an example that holds the values."""
        return FLOAT if self.element == "double" else _KINDS[self.element]

    @property
    def spark_type(self) -> str:
        """Spark's name of the column's type."""
        return f"array<{self.element}>" if self.array else self.element


def feature_to_write(name: str, spark_type: str) -> Feature:
    """The feature of a column.

    Raises:
        DataError: an example cannot hold its values exactly.
    """
    feature = _feature(name, spark_type)
    if feature is None or feature.element not in _KINDS:
        raise DataError(f"column {name!r}: {spark_type} has no exact place in a tf.train.Example; {_way(spark_type)}")
    return feature


def feature_to_read(name: str, spark_type: str) -> Feature:
    """The feature that a column of a wanted type is read from.

    Raises:
        DataError: no feature becomes that type.
    """
    feature = _feature(name, spark_type)
    if feature is None:
        raise DataError(
            f"schema, column {name!r}: expected one of {', '.join(CASTS)} or an array of one, got {spark_type}; "
            "read it as one of these and cast it in Spark"
        )
    return feature


def _feature(name: str, spark_type: str) -> Feature | None:
    array = spark_type.startswith("array<")
    element = spark_type[len("array<") : -1] if array else spark_type
    return Feature(name, element, array) if element in CASTS else None


def _way(spark_type: str) -> str:
    if spark_type == "vector":
        return "its doubles would lose digits in 32 bits; make it floats with vector_to_array(col, 'float32')"
    if spark_type.startswith(("struct<", "array<struct<")):
        return "select its fields as columns of their own"
    if spark_type.startswith("map<"):
        return "select the keys you need as columns, for example col['key']"
    if spark_type.startswith("array<array<"):
        return "make it one array with flatten(col)"
    array = spark_type.startswith("array<")
    if "double" in spark_type or "decimal" in spark_type:
        single, text = ("array<float>", "array<string>") if array else ("float", "string")
        return f"it would lose digits in 32 bits; cast it to {single} if that is enough, or to {text} to keep them all"
    return f"cast it to {'array<string>' if array else 'string'}, or leave it out"
