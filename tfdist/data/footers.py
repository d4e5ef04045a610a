"""Parquet files as they are: footers only, nothing is copied."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.data.columns import null_error
from tfdist.data.handle import Handle
from tfdist.data.manifest import MANIFEST, Fragment, Manifest
from tfdist.data.schema import Column, Field, Nulls, Schema, names_within
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


def from_parquet(
    path: str | Path,
    *,
    features: Sequence[str] | None = None,
    label: str | None = None,
    nulls: Nulls | None = None,
    dtypes: Mapping[str, str] | None = None,
    pack: Mapping[str, Sequence[str]] | None = None,
    transform: Any = None,
    name: str | None = None,
) -> Handle:
    """Training data from Parquet files as they lie, without Spark; only footers are read.

    Args:
        path: a file, or a folder whose files are read in the order of their names.
        features: columns to read, in this order; by default all but the label.
        label: the column to learn.
        nulls: column to ``"error"`` (the default), ``"mask"`` or ``("fill", value)``.
        dtypes: column to the dtype to cast to, for example ``"float32"``, and how arrays are laid out; see
            :meth:`Schema.from_spark`.
        pack: name to numeric features of one dtype that become one tensor ``[rows, features]`` of that name.
        transform: a function, or a list of them, of the features of a batch (a dict of tensors ``[rows, ...]``) that
            returns those the model reads; traced once with TensorFlow, which decides the element spec. It is applied in
            training, validation and scoring alike; see :func:`per_row` and :func:`decode_images`.
        name: unused here; taken so that both ways in have the same arguments.

    Raises:
        DataError: no such data, a column is missing or has a type that becomes no tensor, or nulls without a policy.
        ConfigError: a null policy or dtype makes no sense.
    """
    del name
    path = Path(path).absolute()
    choose = _chosen if (path / MANIFEST).is_file() else _foreign
    manifest = choose(path, features, label, nulls, dtypes, pack)
    return Handle.of(manifest, str(default_cache_dir()), transform)


def default_cache_dir() -> Path:
    """``$TFDIST_CACHE_DIR``, or ``~/.cache/tfdist``."""
    return Path(os.environ.get("TFDIST_CACHE_DIR") or Path.home() / ".cache" / "tfdist").absolute()


def read_footers(root: Path, paths: Sequence[str]) -> list[Footer]:
    """The footers of files under ``root``, in the order given.

    Raises:
        DataError: a file is no Parquet file.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(lambda path: _read_footer(root, path), paths))


def fragments_of(footers: Sequence[Footer]) -> tuple[Fragment, ...]:
    """The files that hold rows."""
    return tuple(Fragment(f.path, f.row_groups, f.size_bytes) for f in footers if f.metadata.num_rows)


def null_counts(footers: Sequence[Footer], columns: Sequence[Column]) -> dict[str, int]:
    """Nulls of the columns that hold a single value a row, where every footer tells them."""
    counts: dict[str, int] = {}
    for column in columns:
        chunks = [c for f in footers for c in _chunks(f, ".".join((column.file_name, *column.member)))]
        told = all(c.statistics is not None and c.statistics.has_null_count for c in chunks if c.num_values)
        if not column.shape and told:
            counts[column.name] = sum(c.statistics.null_count for c in chunks if c.num_values)
    return counts


def row_bytes(footers: Sequence[Footer], schema: Schema) -> int:
    """Bytes of a row in memory, on average and at least 1."""
    fixed, rows, text = 0, max(1, sum(f.metadata.num_rows for f in footers)), 0
    for column in schema.columns:
        for tensor in column.tensors:
            width = 4 if tensor.dtype == "string" else np.dtype(tensor.dtype).itemsize
            fixed += 8 if column.layout == "ragged" else width * int(np.prod([n or 1 for n in tensor.shape]))
        if column.dtype == "string" or column.layout == "ragged":
            text += sum(c.total_uncompressed_size for f in footers for c in _chunks(f, column.file_name))
    return max(1, int(fixed + text // rows))


def _chosen(
    path: Path,
    features: Sequence[str] | None,
    label: str | None,
    nulls: Nulls | None,
    dtypes: Mapping[str, str] | None,
    pack: Mapping[str, Sequence[str]] | None,
) -> Manifest:
    """Columns of data that :func:`tfdist.data.from_dataframe` wrote, by the names of the DataFrame."""
    held = Manifest.from_json((path / MANIFEST).read_text(), path)
    columns = held.schema.columns
    if label is None and features is None:
        label = held.schema.label
    fields = [
        Field(
            name=c.name,
            spark_type=c.spark_type,
            file_name=c.file_name,
            nullable=c.nullable,
            length=c.shape[0] if len(c.shape) == 1 else None,
            path=c.path,
            member=c.member,
        )
        for c in columns
    ]
    names = [c.name for c in columns] if features is None else [n for f in features for n in names_within(f, fields)]
    chosen = {*names, label}
    # What was decided when the data was written holds on unless said anew.
    policies: dict[str, str | tuple[str, object]] = {
        c.name: ("fill", c.fill) if c.nulls == "fill" else c.nulls for c in columns if c.name in chosen
    }
    casts = {c.name: c.declared for c in columns if c.name in chosen}
    schema = Schema.from_fields(
        fields,
        features=features,
        label=label,
        nulls={**policies, **(nulls or {})},
        dtypes={**casts, **(dtypes or {})},
        pack={p.name: p.members for p in held.schema.packs if chosen.issuperset(p.members)} if pack is None else pack,
    )
    if features is None:
        nested = {c.name: c.nested for c in columns}
        schema = replace(schema, columns=tuple(replace(c, nested=nested[c.name]) for c in schema.columns))
    _check_nulls(schema, held.null_counts)
    return replace(held, schema=schema)


def _foreign(
    path: Path,
    features: Sequence[str] | None,
    label: str | None,
    nulls: Nulls | None,
    dtypes: Mapping[str, str] | None,
    pack: Mapping[str, Sequence[str]] | None,
) -> Manifest:
    root, paths = _files(path)
    footers = read_footers(root, paths)
    first = footers[0]
    schema = Schema.from_fields(
        [leaf for field in first.schema for leaf in _fields(field, footers)],
        features=features,
        label=label,
        nulls=nulls,
        dtypes=dtypes,
        pack=pack,
    ).with_lengths({})
    for footer in footers[1:]:
        for column in schema.columns:
            place, own = footer.schema.get_field_index(column.file_name), first.schema.field(column.file_name)
            if place < 0 or footer.schema.field(place).type != own.type:
                got = footer.schema.field(place).type if place >= 0 else "no such column"
                raise DataError(
                    f"column {column.name!r}: expected {own.type} in every file as in {first.path}, got {got} in "
                    f"{footer.path}; read them through Spark with from_dataframe"
                )
    counts = null_counts(footers, schema.columns)
    _check_nulls(schema, counts)
    digest = hashlib.sha256()
    for footer in footers:
        changed = (root / footer.path).stat().st_mtime_ns
        digest.update(f"{footer.path}\0{footer.size_bytes}\0{changed}\0{footer.row_groups}\n".encode())
    return Manifest(
        root=str(root),
        fragments=fragments_of(footers),
        schema=schema,
        fingerprint=digest.hexdigest()[:32],
        row_bytes=row_bytes(footers, schema),
        null_counts=counts,
    )


def _files(path: Path) -> tuple[Path, list[str]]:
    if path.is_file():
        return path.parent, [path.name]
    if not path.is_dir():
        raise DataError(f"{path}: expected a Parquet file or a folder of them, found nothing")
    if (path / "_delta_log").is_dir():
        raise DataError(f"{path}: a Delta table; read it through Spark with from_dataframe")
    found = sorted(p.relative_to(path) for p in path.rglob("*.parquet") if p.is_file())
    names = [str(p) for p in found if not any(part.startswith(("_", ".")) for part in p.parts)]
    if any("=" in part for name in names for part in Path(name).parts[:-1]):
        raise DataError(
            f"{path}: partitioned by the names of folders, which hold a column; read it through Spark with "
            "from_dataframe"
        )
    if not names:
        raise DataError(f"{path}: expected files named *.parquet, found none")
    return path, names


def _read_footer(root: Path, path: str) -> Footer:
    file = root / path
    try:
        with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as opened:
            return Footer(path, file.stat().st_size, opened.metadata, opened.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: expected a Parquet file; {error}") from error


def _chunks(footer: Footer, file_name: str) -> list[pq.ColumnChunkMetaData]:
    """The column chunks of a column: one for each row group, of its only leaf."""
    places = [
        i
        for i in range(footer.metadata.num_columns)
        if (leaf := footer.metadata.schema.column(i).path) == file_name or leaf.startswith(f"{file_name}.")
    ]
    return [footer.metadata.row_group(g).column(i) for g in range(footer.metadata.num_row_groups) for i in places[:1]]


def _fields(field: pa.Field, footers: Sequence[Footer], outer: tuple[str, ...] = ()) -> list[Field]:
    """The field, or those inside it where it is a struct."""
    path, kind = (*outer, field.name), field.type
    if pa.types.is_struct(kind) and kind.num_fields and [f.name for f in kind] != _VECTOR:
        inner = (leaf for one in kind for leaf in _fields(one, footers, path))
        return [replace(leaf, nullable=leaf.nullable or field.nullable) for leaf in inner]
    length = None
    if pa.types.is_fixed_size_list(kind):
        length = kind.list_size
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        counts = [(f.metadata.num_rows, _chunks(f, ".".join(path))) for f in footers if f.metadata.num_rows]
        lengths = {sum(c.num_values for c in chunks) / rows for rows, chunks in counts}
        if len(lengths) == 1 and (only := lengths.pop()) == int(only):
            length = int(only)
    own = Field(".".join(path), _spark_type(kind), path[0], field.nullable, length)
    return [replace(own, path=path, member=path[1:]) if outer else own]


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


def _check_nulls(schema: Schema, counts: Mapping[str, int]) -> None:
    problems = []
    for column in schema.columns:
        count = counts.get(column.name, 0)
        if count and column.nulls == "error":
            problems.append(str(null_error(column, count)))
        if count and column.nulls == "drop":
            problems.append(
                f"column {column.name!r}: {count} nulls cannot be dropped from files as they lie; use 'mask' or "
                "('fill', value), or from_dataframe(spark.read.parquet(...))"
            )
    if problems:
        raise DataError("\n".join(problems))
