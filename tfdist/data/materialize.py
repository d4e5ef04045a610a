"""A DataFrame to Parquet files: atomic, verified, reused while plan and source are the same."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyspark.sql.functions as F
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame

from tfdist.data.cache import WRITING, check_ttl, delete_expired, note_use
from tfdist.data.facts import Facts, checked, limits_of
from tfdist.data.footers import default_cache_dir, fragments_of, null_counts, read_footers, row_bytes
from tfdist.data.handle import Handle
from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.data.plan import digest_of, plan_text, source_text
from tfdist.data.schema import Column, Nulls, Schema
from tfdist.data.types import element_type
from tfdist.errors import ConfigError, DataError

ROW_GROUP_ROWS = 32768
"""benchmarks/pipeline.py: smaller ones cost reads, larger ones memory while shuffling."""

_ROW_GROUP_BYTES = 16 * 2**20


def from_dataframe(
    df: DataFrame,
    *,
    cache_dir: str | Path | None = None,
    features: Sequence[str] | None = None,
    label: str | None = None,
    nulls: Nulls | None = None,
    dtypes: Mapping[str, str] | None = None,
    pack: Mapping[str, Sequence[str]] | None = None,
    transform: Any = None,
    name: str | None = None,
    ttl_days: float | None = None,
) -> Handle:
    """Training data from a DataFrame, written once as Parquet.

    The files are reused when the same plan over unchanged source files was written before. A plan whose outcome cannot
    be known beforehand (Python functions, random numbers, rows of the driver) is written anew each time.

    Args:
        df: the rows.
        cache_dir: folder for the files; every executor and the driver must see it. By default ``$TFDIST_CACHE_DIR``,
            or ``~/.cache/tfdist``.
        features: columns to read, in this order; by default all but the label.
        label: the column to learn.
        nulls: column to ``"error"`` (the default), ``"drop"``, ``"mask"`` or ``("fill", value)``.
        dtypes: column to the dtype to cast to, for example ``"float32"``, and how arrays are laid out; see
            :meth:`Schema.from_spark`.
        pack: name to numeric features of one dtype that become one tensor ``[rows, features]`` of that name.
        transform: a function, or a list of them, of the features of a batch (a dict of tensors ``[rows, ...]``) that
            returns those the model reads; traced once with TensorFlow, which decides the element spec. It is applied in
            training, validation and scoring alike; see :func:`per_row` and :func:`decode_images`.
        name: begins the name of the folder with the files.
        ttl_days: the files may be deleted so many days after they were last asked for by this function; the next call
            with the same ``cache_dir`` deletes what is over. Choose more than the longest training. None keeps them.

    Raises:
        DataError: a column is missing or has a type that becomes no tensor, or the rows have nulls without a policy or
            arrays of other lengths than declared.
        ConfigError: a setting makes no sense.
    """
    schema = Schema.from_spark(df.schema, features=features, label=label, nulls=nulls, dtypes=dtypes, pack=pack)
    check_ttl(ttl_days)
    cache = _cache_dir(cache_dir)
    delete_expired(cache)
    plan = plan_text(df)
    source = None if plan is None else source_text(df)
    reusable = plan is not None and source is not None
    settings = f"{schema.to_json()}\n{ROW_GROUP_ROWS}"
    fingerprint = digest_of(plan, source, settings) if reusable else uuid.uuid4().hex
    target = cache / f"{_folder_name(name)}-{fingerprint[:20]}"
    if reusable and (held := held_manifest(target, fingerprint)):
        if held.ttl_days != ttl_days:
            held = replace(held, ttl_days=ttl_days)
            _write_manifest(held, target)
        note_use(target)
        return Handle.of(held, str(cache), transform)
    partial = cache / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.{WRITING}"
    try:
        manifest = _write(df, schema, partial, fingerprint)
        if reusable and source_text(df) != source:
            raise DataError("the source files changed while they were read; read them again once they are still")
        _write_manifest(replace(manifest, ttl_days=ttl_days), partial)
        _move(partial, target, fingerprint)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    published = held_manifest(target, fingerprint)
    if published is None:
        raise DataError(f"{target}: the files disappeared while they were written; did something clean the folder?")
    return Handle.of(published, str(cache), transform)


def arrow_ready(df: DataFrame, schema: Schema) -> DataFrame:
    """The feature columns of a frame, by their own names, as Spark hands them to Arrow in the schema's types.

    Vectors become arrays; :func:`tfdist.data.batch_from_arrow` takes the rest as it is.
    """
    safe = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
    columns = []
    for column in map(schema.column, schema.features):
        own = F.col(f"c{_place(df, column.path[0] if column.path else column.name)}")
        columns.append(_value(inner_value(own, column.path[1:]), column))
    return safe.select(*columns).toDF(*schema.features)


def inner_value(value: SparkColumn, member: Sequence[str]) -> SparkColumn:
    """A field inside a struct; null where a struct around it is."""
    for name in member:
        value = value.getField(name)
    return value


def held_manifest(folder: Path, fingerprint: str) -> Manifest | None:
    """The manifest of a finished folder, when it is the one meant and all its files are whole."""
    try:
        manifest = Manifest.from_json((folder / MANIFEST).read_text(), folder)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None  # never finished, damaged, or of another version: written anew
    if manifest.fingerprint != fingerprint:
        return None
    for fragment in manifest.fragments:
        try:
            if (folder / fragment.path).stat().st_size != fragment.size_bytes:
                return None
        except FileNotFoundError:
            return None
    return manifest


def stored_columns(df: DataFrame, schema: Schema) -> DataFrame:
    """The columns of a schema by their names in files, without the rows that its ``drop`` policies leave out."""
    safe, dropping = _safely_named(df, schema), _dropping(schema)
    kept = safe.dropna(subset=dropping) if dropping else safe
    return kept.select(*[_value(F.col(c.file_name), c, stored=True).alias(c.file_name) for c in schema.columns])


def _safely_named(df: DataFrame, schema: Schema) -> DataFrame:
    safe = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
    inner = {
        c.file_name: inner_value(F.col(c.file_name.partition("_")[0]), c.path[1:]) for c in schema.columns if c.path
    }
    return safe.withColumns(inner) if inner else safe


def _dropping(schema: Schema) -> list[str]:
    return [c.file_name for c in schema.columns if c.nulls == "drop"]


def _write(df: DataFrame, schema: Schema, folder: Path, fingerprint: str) -> Manifest:
    dropping, dropped = _dropping(schema), 0
    if dropping:
        has_null = F.lit(False)
        for column in dropping:
            has_null = has_null | F.col(column).isNull()
        dropped = _safely_named(df, schema).filter(has_null).count()
    folder.parent.mkdir(parents=True, exist_ok=True)
    (
        stored_columns(df, schema)
        .write.option("parquet.block.size", _ROW_GROUP_BYTES)
        .option("parquet.block.row.count.limit", ROW_GROUP_ROWS)
        .option("compression", "snappy")
        .parquet(folder.as_uri())
    )
    if not (folder / "_SUCCESS").exists():
        raise DataError(
            f"cache_dir: expected a folder that the driver and all executors see, got {folder.parent}, where the "
            "driver finds nothing that was written; use shared storage"
        )
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(".parquet"))
    footers = read_footers(folder, names)
    facts = _facts(df, schema, folder)
    found = sum(f.metadata.num_rows for f in footers)
    if found != facts.rows:
        raise DataError(
            f"cache_dir: expected {facts.rows} rows as the executors wrote them, the driver finds {found} in "
            f"{folder.parent}; use storage that all of them see"
        )
    nulls = {name: count or 0 for (kind, name), count in facts.found.items() if kind == "nulls"}
    counts = {**null_counts(footers, schema.columns), **nulls}
    decided = schema.with_lengths(checked(schema, counts, facts))
    return Manifest(
        root=str(folder),
        fragments=fragments_of(footers),
        schema=decided,
        fingerprint=fingerprint,
        row_bytes=row_bytes(footers, decided),
        null_counts=counts,
        dropped_rows=dropped,
    )


def _facts(df: DataFrame, schema: Schema, folder: Path) -> Facts:
    wanted: dict[tuple[str, str], SparkColumn] = {}
    for column in schema.columns:
        name, values = column.name, F.col(column.file_name)
        if column.shape or column.dtype == "string":
            # Footers count the nulls of numbers; of long texts they do not, and of arrays they count the values.
            wanted["nulls", name] = F.count(F.when(values.isNull(), 1))
        if column.shape:
            size = F.when(values.isNotNull(), F.size(values))
            missing = F.size(F.filter(values, _is_null))
            if len(column.shape) > 1:
                missing += F.size(F.filter(F.flatten(F.filter(values, _is_there)), _is_null))
            wanted["shortest", name], wanted["longest", name] = F.min(size), F.max(size)
            wanted["inner nulls", name] = F.sum(missing)
        elif column.narrows:
            outside = F.when(~values.between(*map(F.lit, limits_of(column))), values)  # NaN is outside, null is not
            wanted["outside", name], wanted["example", name] = F.count(outside), F.max(outside)
    aggregates = [F.count(F.lit(1)), *wanted.values()]
    row = df.sparkSession.read.parquet(folder.as_uri()).agg(*aggregates).head() if _has_columns(folder) else None
    values = list(row) if row is not None else [0, *(None for _ in wanted)]
    return Facts(values[0], dict(zip(wanted, values[1:], strict=True)))


def _value(value: SparkColumn, column: Column, stored: bool = False) -> SparkColumn:
    """The values of a column for the files, or as Arrow takes them from Spark.

    Files hold times as whole numbers: Spark's Parquet would write them as INT96, and refuses years before 1582.
    """
    if column.spark_type == "vector":
        return vector_values(value)
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


def _is_null(value: SparkColumn) -> SparkColumn:
    return value.isNull()


def _is_there(value: SparkColumn) -> SparkColumn:
    return value.isNotNull()


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


def _has_columns(folder: Path) -> bool:
    return any(p.name.endswith(".parquet") for p in folder.iterdir())


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    written = folder / f".{MANIFEST}.{uuid.uuid4().hex[:8]}"
    written.write_text(manifest.to_json())
    written.replace(folder / MANIFEST)


def _move(partial: Path, target: Path, fingerprint: str) -> None:
    """Publish a finished folder. Another writer of the same data may have been faster: its folder stays."""
    if held_manifest(target, fingerprint) is not None:
        return
    if target.exists():
        damaged = partial.with_name(f"{partial.name}.old")
        with suppress(FileNotFoundError):  # another writer has moved it away
            target.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        partial.rename(target)
    except OSError:
        if held_manifest(target, fingerprint) is None:
            raise


def _cache_dir(cache_dir: str | Path | None) -> Path:
    if cache_dir is None:
        return default_cache_dir()
    text = str(cache_dir)
    if re.match(r"[a-z][a-z0-9+.-]+:/", text) and not text.startswith("file:/"):
        raise ConfigError(f"cache_dir: expected a path of a mounted file system, got {text!r}")
    return Path(re.sub(r"^file:/+", "/", text)).absolute()


def _folder_name(name: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name or "data").strip("-")[:60] or "data"
