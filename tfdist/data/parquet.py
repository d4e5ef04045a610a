"""Parquet files as training data, as they lie: footers only, nothing is copied."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from tfdist.data.arrow import null_error
from tfdist.data.calendar import check_calendar
from tfdist.data.fields import Field, names_within
from tfdist.data.folder import missing_files, with_footers
from tfdist.data.footers import fields_of, fixed_row_bytes, fragments_of, null_counts, read_footers, row_bytes
from tfdist.data.handle import Handle
from tfdist.data.lengths import list_lengths
from tfdist.data.location import default_cache_dir, open_storage
from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.data.schema import Nulls, Schema
from tfdist.data.storage import Entry, Storage
from tfdist.errors import DataError


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
    storage_options: Mapping[str, Any] | None = None,
) -> Handle:
    """Training data from Parquet files as they lie, without Spark; only footers are read.

    Columns of lists are read once besides, to learn whether all have one length, unless ``dtypes`` says how they are
    laid out.

    Args:
        path: a file, or a folder whose files are read in the order of their names; a path, or a URL of any file system
            that fsspec opens, for example ``s3://bucket/folder``.
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
        storage_options: what fsspec needs to open a URL, such as keys; unused for a path. They go to the workers with
            the handle, and appear in no file and no message.

    Raises:
        DataError: no such data, a column is missing or has a type that becomes no tensor, or nulls without a policy.
        ConfigError: a null policy or dtype makes no sense, or fsspec cannot open the URL.
    """
    del name
    storage = open_storage(path, storage_options)
    choice: dict[str, Any] = {"features": features, "label": label, "nulls": nulls, "dtypes": dtypes, "pack": pack}
    choose = _chosen if storage.stat(MANIFEST) else _foreign
    return Handle.of(choose(storage, **choice), str(default_cache_dir()), transform)


def _chosen(
    storage: Storage,
    *,
    features: Sequence[str] | None,
    label: str | None,
    nulls: Nulls | None,
    dtypes: Mapping[str, str] | None,
    pack: Mapping[str, Sequence[str]] | None,
) -> Manifest:
    """Columns of data that :func:`tfdist.data.from_dataframe` wrote, by the names of the DataFrame."""
    held = Manifest.from_json(storage.read_text(MANIFEST), storage.url, storage.options)
    if missing := missing_files(held):
        raise DataError(
            f"{storage.url}: expected the {len(held.fragments)} files of its manifest, {missing[0]} is missing or "
            "damaged"
        )
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
    proved = {c.name for c in columns if c.proved and c.name not in (dtypes or {})}
    nested = {c.name for c in (columns if features is None else schema.columns) if c.nested}
    again = (replace(c, nested=c.name in nested, proved=c.name in proved) for c in schema.columns)
    schema = replace(schema, columns=tuple(again))
    _check_nulls(schema, held.null_counts)
    return replace(held, schema=schema, row_bytes=max(held.row_bytes, fixed_row_bytes(schema)))


def _foreign(
    storage: Storage,
    *,
    features: Sequence[str] | None,
    label: str | None,
    nulls: Nulls | None,
    dtypes: Mapping[str, str] | None,
    pack: Mapping[str, Sequence[str]] | None,
) -> Manifest:
    root, files = _files(storage)
    footers = read_footers(root, files)
    first = footers[0]
    schema = Schema.from_fields(
        [leaf for field in first.schema for leaf in fields_of(field)],
        features=features,
        label=label,
        nulls=nulls,
        dtypes=dtypes,
        pack=pack,
    )
    for footer in footers[1:]:
        for column in schema.columns:
            place, own = footer.schema.get_field_index(column.file_name), first.schema.field(column.file_name)
            if place < 0 or footer.schema.field(place).type != own.type:
                got = footer.schema.field(place).type if place >= 0 else "no such column"
                raise DataError(
                    f"column {column.name!r}: expected {own.type} in every file as in {first.path}, got {got} in "
                    f"{footer.path}; read them through Spark with from_dataframe"
                )
    check_calendar(storage, footers, schema.columns)
    counts = null_counts(footers, schema.columns)
    _check_nulls(schema, counts)
    unknown = [c for c in schema.columns if c.shape == (None,) and c.layout == "fixed"]
    schema = schema.with_lengths(list_lengths(root, files, unknown))
    digest = hashlib.sha256()
    for file, footer in zip(files, footers, strict=True):
        digest.update(f"{file.path}\0{file.size_bytes}\0{file.version}\0{footer.row_groups}\n".encode())
    return Manifest(
        root=root.url,
        fragments=with_footers(root, fragments_of(footers)),
        schema=schema,
        fingerprint=digest.hexdigest()[:32],
        row_bytes=row_bytes(footers, schema),
        null_counts=counts,
        storage_options=root.options,
    )


def _files(storage: Storage) -> tuple[Storage, list[Entry]]:
    """The folder of the Parquet files that a path or URL names, and the files, in the order of their names."""
    itself, place = storage.stat(), storage.url
    if itself is not None and not itself.is_folder:
        return storage.parent, [replace(itself, path=storage.name)]
    found = storage.files()
    # Most object stores know no empty folder.
    if itself is None and not found:
        raise DataError(f"{place}: expected a Parquet file or a folder of them, found nothing")
    if any(file.path.startswith("_delta_log/") for file in found):
        raise DataError(f"{place}: a Delta table; read it through Spark with from_dataframe")
    paths = [(file, PurePosixPath(file.path).parts) for file in found if file.path.endswith(".parquet")]
    chosen = [(file, parts) for file, parts in paths if not _is_hidden(file.path)]
    if any("=" in part for _, parts in chosen for part in parts[:-1]):
        raise DataError(
            f"{place}: partitioned by the names of folders, which hold a column; read it through Spark with "
            "from_dataframe"
        )
    if not chosen:
        raise DataError(f"{place}: expected files named *.parquet, found none")
    others = [file.path for file in found if not file.path.endswith(".parquet") and not _is_hidden(file.path)]
    if others:
        warnings.warn(
            f"{place}: {len(others)} files that are not named *.parquet are not read, for example {others[0]}",
            stacklevel=5,
        )
    return storage, [file for file, _ in chosen]


def _is_hidden(path: str) -> bool:
    """Whether Spark leaves a file out, as it does its own notes."""
    return any(part.startswith(("_", ".")) for part in PurePosixPath(path).parts)


def _check_nulls(schema: Schema, counts: Mapping[str, int]) -> None:
    problems = []
    for column in schema.columns:
        count = counts.get(column.name, 0)
        if count and column.nulls == "error":
            problems.append(str(null_error(column, count, can_drop=False)))
        if count and column.nulls == "drop":
            problems.append(
                f"column {column.name!r}: {count} nulls cannot be dropped from files as they lie; use 'mask' or "
                "('fill', value), or from_dataframe(spark.read.parquet(...))"
            )
    if problems:
        raise DataError("\n".join(problems))
