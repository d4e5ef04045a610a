"""The columns that a source has: their names, types and places in its files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.data.types import simple_type


@dataclass(frozen=True)
class Field:
    """A column as a source has it.

    Args:
        name: as the user has it.
        spark_type: Spark's ``simpleString``, or ``vector``.
        file_name: its name in the Parquet files.
        nullable: whether a value may be missing.
        length: values in a row of an array or vector, None while unknown.
        path: of a field inside a struct, the names from that of the column on; its own name joins them by dots.
        member: the part of the path to follow inside the column ``file_name`` of the files.
    """

    name: str
    spark_type: str
    file_name: str
    nullable: bool = True
    length: int | None = None
    path: tuple[str, ...] = ()
    member: tuple[str, ...] = ()


def spark_fields(schema: Any) -> list[Field]:
    """The fields of a ``pyspark.sql.types.StructType``, with names ``c0``, ``c1`` ... in the files.

    Parquet refuses some names and reads a dot as a path; the place of a column names it safely. Fields inside structs
    come by themselves, as ``c1_0``, ``c1_1`` ...
    """
    return [leaf for i, field in enumerate(schema.jsonValue()["fields"]) for leaf in _leaves(field, f"c{i}", (), False)]


def _leaves(field: Mapping[str, Any], file_name: str, outer: tuple[str, ...], nullable: bool) -> list[Field]:
    path, kind, nullable = (*outer, field["name"]), field["type"], nullable or bool(field.get("nullable", True))
    if isinstance(kind, Mapping) and kind["type"] == "struct" and kind["fields"]:
        inner = enumerate(kind["fields"])
        return [leaf for i, one in inner for leaf in _leaves(one, f"{file_name}_{i}", path, nullable)]
    return [
        Field(
            name=".".join(path),
            spark_type=simple_type(kind),
            file_name=file_name,
            nullable=nullable,
            length=field.get("metadata", {}).get("ml_attr", {}).get("num_attrs"),
            path=path if outer else (),
        )
    ]


def names_within(name: str, fields: Sequence[Field]) -> list[str]:
    """The names that a chosen name stands for: a struct's are those of its fields."""
    if any(f.name == name for f in fields):
        return [name]
    inner = [f.name for f in fields if f.path and f.name.startswith(f"{name}.")]
    return inner or [name]


def nearest(name: str, known: Sequence[str]) -> str:
    """A question that ends the sentence about an unknown name; empty where no known one is near."""
    found = [other for other in known if other.casefold() == name.casefold()]
    found = found or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
