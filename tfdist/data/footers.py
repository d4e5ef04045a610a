"""What the footers of Parquet files say: rows, types, nulls, sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.data.column import Column
from tfdist.data.fields import Field
from tfdist.data.manifest import Fragment
from tfdist.data.schema import Schema
from tfdist.data.sparse import entry_type
from tfdist.data.storage import Entry, Storage
from tfdist.errors import DataError

_THREADS = 8


@dataclass(frozen=True)
class Footer:
    """What a Parquet file says of itself.

    Args:
        path: relative to the data set.
        size_bytes: of the file.
        metadata: pyarrow's ``FileMetaData``.
        schema: pyarrow's ``Schema``.
    """

    path: str
    size_bytes: int
    metadata: pq.FileMetaData
    schema: pa.Schema

    @property
    def row_groups(self) -> tuple[int, ...]:
        return tuple(self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups))


def read_footers(storage: Storage, files: Sequence[Entry]) -> list[Footer]:
    """The footers of files of a storage, in the order given.

    Raises:
        DataError: a file is no Parquet file.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(lambda file: _read_footer(storage, file), files))


def fragments_of(footers: Sequence[Footer]) -> tuple[Fragment, ...]:
    """The files that hold rows."""
    return tuple(Fragment(f.path, f.row_groups, f.size_bytes) for f in footers if f.metadata.num_rows)


def null_counts(footers: Sequence[Footer], columns: Sequence[Column]) -> dict[str, int]:
    """Nulls of the columns that hold a single value a row, where every footer tells them."""
    counts: dict[str, int] = {}
    for column in columns:
        chunks = [c for f in footers for c in chunks_of(f, column)]
        told = all(c.statistics is not None and c.statistics.has_null_count for c in chunks if c.num_values)
        if (not column.shape or column.item_bytes) and told:
            counts[column.name] = sum(c.statistics.null_count for c in chunks if c.num_values)
    return counts


def chunks_of(footer: Footer, column: Column) -> list[pq.ColumnChunkMetaData]:
    """The column chunks of a column: one for each row group, of its only leaf."""
    return _chunks(footer, ".".join((column.file_name, *column.member)))


def row_bytes(footers: Sequence[Footer], schema: Schema) -> int:
    """Bytes of a row in memory, on average and at least 1."""
    rows, text = max(1, sum(f.metadata.num_rows for f in footers)), 0
    for column in schema.columns:
        if column.layout == "sparse":
            entries = [c.num_values for f in footers for c in _chunks(f, f"{column.file_name}.entries")]
            text += sum(entries) * entry_type(column.dtype).itemsize
        if column.dtype == "string" or column.layout == "ragged":
            text += sum(c.total_uncompressed_size for f in footers for c in _chunks(f, column.file_name))
    return max(1, int(fixed_row_bytes(schema) + text // rows))


def fixed_row_bytes(schema: Schema) -> int:
    """Bytes of a row in memory without texts, lists and sparse entries."""
    fixed = 0
    for column in schema.columns:
        for tensor in column.tensors:
            width = 4 if tensor.dtype == "string" else np.dtype(tensor.dtype).itemsize
            varies = column.layout in ("ragged", "sparse")
            fixed += 8 if varies else width * int(np.prod([n or 1 for n in tensor.shape]))
    return fixed


def fields_of(field: pa.Field, outer: tuple[str, ...] = ()) -> list[Field]:
    """A column of files as a source has it, or those inside it where it is a struct."""
    path, kind = (*outer, field.name), field.type
    if pa.types.is_struct(kind) and kind.num_fields and [f.name for f in kind] != _VECTOR:
        inner = (leaf for one in kind for leaf in fields_of(one, path))
        return [replace(leaf, nullable=leaf.nullable or field.nullable) for leaf in inner]
    length = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    own = Field(".".join(path), _spark_type(kind), path[0], field.nullable, length)
    return [replace(own, path=path, member=path[1:]) if outer else own]


def _read_footer(storage: Storage, file: Entry) -> Footer:
    try:
        with storage.parquet(file.path, coerce_int96_timestamp_unit="us") as opened:
            return Footer(file.path, file.size_bytes, opened.metadata, opened.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{storage.shown(file.path)}: expected a Parquet file; {error}") from error


def _chunks(footer: Footer, file_name: str) -> list[pq.ColumnChunkMetaData]:
    """The column chunks of a column: one for each row group, of its only leaf."""
    places = [
        i
        for i in range(footer.metadata.num_columns)
        if (leaf := footer.metadata.schema.column(i).path) == file_name or leaf.startswith(f"{file_name}.")
    ]
    return [footer.metadata.row_group(g).column(i) for g in range(footer.metadata.num_row_groups) for i in places[:1]]


_VECTOR = ["type", "size", "indices", "values"]  # how Spark ML keeps one

_ARROW_TO_SPARK = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
    "duration[us]": "interval day to second",
}


def _spark_type(kind: pa.DataType) -> str:
    """The type that Spark gives to a column of this Arrow type."""
    if pa.types.is_dictionary(kind):
        return _spark_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array<{_spark_type(kind.value_type)}>"
    return _ARROW_TO_SPARK.get(str(kind), re.sub(r"\s+", "", str(kind)))
