"""Columns of a DataFrame as Spark expressions: as the files hold them, and as Arrow takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyspark.sql.functions as F
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame

from tfdist.data.column import Column
from tfdist.data.schema import Schema
from tfdist.data.types import element_type
from tfdist.errors import DataError


def arrow_ready(df: DataFrame, schema: Schema) -> DataFrame:
    """The feature columns of a frame, by their own names, as Spark hands them to Arrow in the schema's types.

    Vectors become arrays; :func:`tfdist.data.batch_from_arrow` takes the rest as it is.
    """
    safe = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
    columns = []
    for column in map(schema.column, schema.features):
        own = F.col(f"c{_place(df, column.path[0] if column.path else column.name)}")
        columns.append(value_of(inner_value(own, column.path[1:]), column))
    return safe.select(*columns).toDF(*schema.features)


def inner_value(value: SparkColumn, member: Sequence[str]) -> SparkColumn:
    """A field inside a struct; null where a struct around it is."""
    for name in member:
        value = value.getField(name)
    return value


def value_of(value: SparkColumn, column: Column, stored: bool = False) -> SparkColumn:
    """The values of a column for the files, or as Arrow takes them from Spark.

    Files hold times as whole numbers: Spark's Parquet would write them as INT96, and refuses years before 1582.
    """
    if column.spark_type == "vector":
        return sparse_values(value) if column.layout == "sparse" else vector_values(value)
    convert = _TIMES.get(element_type(column.spark_type)) if stored else None
    if convert is None:
        return value
    for _ in column.shape:
        convert = partial(F.transform, f=convert)
    return convert(value)


def vector_values(vector: SparkColumn) -> SparkColumn:
    """A vector as an array, null where it is missing (Spark's own function fails there)."""
    from pyspark.ml.functions import vector_to_array

    return F.when(vector.isNotNull(), vector_to_array(vector))


def sparse_values(vector: SparkColumn) -> SparkColumn:
    """A vector as its size and the values that are not 0 with their places; null where it is missing."""
    raw = F.unwrap_udt(vector)
    values = raw["values"]
    # A dense vector has neither size nor indices.
    places = F.coalesce(raw["indices"], F.transform(values, lambda _, place: place))
    entries = F.zip_with(places, values, lambda place, value: F.struct(place.alias("place"), value.alias("value")))
    size = F.coalesce(raw["size"], F.size(values)).alias("size")
    there = F.filter(entries, lambda entry: entry["value"] != 0).alias("entries")
    return F.when(vector.isNotNull(), F.struct(size, there))


def _days(value: SparkColumn) -> SparkColumn:
    return F.unix_date(value)


def _microseconds(value: SparkColumn) -> SparkColumn:
    return F.unix_micros(value)


_TIMES: dict[str, Any] = {"date": _days, "timestamp": _microseconds}


def _place(df: DataFrame, name: str) -> int:
    places = [i for i, known in enumerate(df.columns) if known == name]
    if len(places) != 1:
        raise DataError(f"column {name!r}: expected once in the rows, got {len(places)} times")
    return places[0]
