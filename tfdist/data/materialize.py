"""A DataFrame to Parquet files: atomic, verified, reused while plan and source are the same."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyspark.sql.functions as F
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame

from tfdist.data.cache import check_ttl, delete_over, note_ttl, note_use
from tfdist.data.choice import check_frame
from tfdist.data.expressions import inner_value, value_of
from tfdist.data.facts import checked_lengths, facts_of
from tfdist.data.folder import Place, with_footers
from tfdist.data.footers import fragments_of, null_counts, read_footers, row_bytes
from tfdist.data.handle import Handle
from tfdist.data.location import default_cache_dir, hadoop_url, open_storage
from tfdist.data.manifest import Fragment, Manifest
from tfdist.data.plan import digest_of, plan_text, source_text
from tfdist.data.progress import WriteProgress, check_progress
from tfdist.data.schema import Nulls, Schema
from tfdist.data.space import check_room, room_told
from tfdist.data.storage import Storage
from tfdist.data.writer import ROW_GROUP_ROWS, FileOptions, write_files
from tfdist.errors import ConfigError, DataError


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
    row_group_rows: int = ROW_GROUP_ROWS,
    compression: str = "snappy",
    storage_options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> Handle:
    """Training data from a DataFrame, written once as Parquet.

    The files are reused when the same plan over unchanged source files was written before. A plan whose outcome cannot
    be known beforehand (Python functions, random numbers, rows of the driver, any over Spark Connect) is written anew
    each time.

    Args:
        df: the rows.
        cache_dir: folder for the files; every executor and the driver must see it. By default ``$TFDIST_CACHE_DIR``,
            or ``~/.cache/tfdist``. It may be a URL that both Spark and fsspec open, for example
            ``s3://bucket/folder``; trained models then go to the default folder unless said otherwise.
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
        row_group_rows: most rows of a row group, which is read at once; a row group also ends at 16 MiB.
        compression: of the files: ``"snappy"``, ``"zstd"`` (smaller), ``"lz4"``, ``"gzip"`` or ``"none"``.
        storage_options: what fsspec needs to open a URL, such as keys; unused for a path. They go to the workers with
            the handle, and appear in no file and no message. Spark has settings of its own.
        progress: show how far Spark is: True, False, or None for only on a terminal.

    Raises:
        DataError: a column is missing or has a type that becomes no tensor, or the rows have nulls without a policy or
            arrays of other lengths than declared; or the disk has no room for them.
        ConfigError: a setting makes no sense.
    """
    check_frame(df)
    schema = Schema.from_spark(df.schema, features=features, label=label, nulls=nulls, dtypes=dtypes, pack=pack)
    check_ttl(ttl_days)
    check_progress(progress)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name: expected a text, got {name!r}")
    options = FileOptions(row_group_rows, compression)
    cache = open_storage(default_cache_dir() if cache_dir is None else cache_dir, storage_options, "cache_dir")
    if "::" in cache.url:
        raise ConfigError(f"cache_dir: expected a path or a single URL, got {cache.url!r}")
    models = str(cache.local if cache.is_local else default_cache_dir())
    delete_over(cache)
    plan = plan_text(df)
    source = None if plan is None else source_text(df)
    reusable = plan is not None and source is not None
    settings = f"{schema.to_json()}\n{options}"
    fingerprint = digest_of(plan, source, settings) if reusable else uuid.uuid4().hex
    place = Place(cache, f"{_folder_name(name)}-{fingerprint[:20]}", fingerprint)
    if reusable and (held := place.held()):
        return Handle.of(note_use(held, ttl_days), models, transform)
    with room_told(cache), place.writing() as folder, WriteProgress(df, name or "data", progress) as shown:
        manifest = shown.run(partial(_write, df, schema, options, folder, fingerprint))
        if reusable and source_text(df) != source:
            raise DataError("the source files changed while they were read; read them again once they are still")
        published = place.publish(replace(manifest, ttl_days=ttl_days))
        shown.done(published)
    if ttl_days is not None:
        note_ttl(published)
    return Handle.of(published, models, transform)


def stored_columns(df: DataFrame, schema: Schema) -> DataFrame:
    """The columns of a schema by their names in files, without the rows that its ``drop`` policies leave out."""
    safe, dropping = _safely_named(df, schema), _dropping(schema)
    kept = safe.dropna(subset=dropping) if dropping else safe
    return kept.select(*[value_of(F.col(c.file_name), c, stored=True).alias(c.file_name) for c in schema.columns])


def _safely_named(df: DataFrame, schema: Schema) -> DataFrame:
    safe = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
    inner = {
        c.file_name: inner_value(F.col(c.file_name.partition("_")[0]), c.path[1:]) for c in schema.columns if c.path
    }
    return safe.withColumns(inner) if inner else safe


def _dropping(schema: Schema) -> list[str]:
    return [c.file_name for c in schema.columns if c.nulls == "drop"]


def _write(df: DataFrame, schema: Schema, options: FileOptions, folder: Storage, fingerprint: str) -> Manifest:
    dropping, dropped = _dropping(schema), 0
    if dropping:
        has_null = F.lit(False)
        for column in dropping:
            has_null = has_null | F.col(column).isNull()
        dropped = _safely_named(df, schema).filter(has_null).count()
    rows = stored_columns(df, schema)
    check_room(rows, folder.parent)
    write_files(rows, folder, options)
    files = [file for file in folder.files() if file.path.endswith(".parquet") and "/" not in file.path]
    footers = read_footers(folder, files)
    written = df.sparkSession.read.parquet(hadoop_url(folder)) if files else None
    facts = facts_of(written, schema)
    found = sum(f.metadata.num_rows for f in footers)
    if found != facts.rows:
        raise DataError(
            f"cache_dir: expected {facts.rows} rows as the executors wrote them, the driver finds {found} in "
            f"{folder.parent.url}; use storage that all of them see"
        )
    nulls = {name: count or 0 for (kind, name), count in facts.found.items() if kind == "nulls"}
    counts = {**null_counts(footers, schema.columns), **nulls}
    fragments = with_footers(folder, fragments_of(footers))
    decided = schema.with_lengths(checked_lengths(schema, counts, facts, partial(_places, written, fragments)))
    return Manifest(
        root=folder.url,
        fragments=fragments,
        schema=decided,
        fingerprint=fingerprint,
        row_bytes=row_bytes(footers, decided),
        null_counts=counts,
        dropped_rows=dropped,
        storage_options=folder.options,
    )


def _places(written: DataFrame, fragments: Sequence[Fragment], wrong: Mapping[Any, SparkColumn]) -> dict[Any, str]:
    """Of the rows for which each condition holds, how many there are and where the first is, for messages."""
    place = F.struct("_metadata.file_name", "_metadata.row_index")
    aggregates = [make(F.when(condition, place)) for condition in wrong.values() for make in (F.count, F.min)]
    found = list(written.agg(*aggregates).first() or ())
    starts = accumulate([0, *(sum(f.row_groups) for f in fragments)])
    before = {fragment.path: start for fragment, start in zip(fragments, starts, strict=False)}
    words = {}
    for key, count, (file, row) in zip(wrong, found[::2], found[1::2], strict=True):
        number = f"row {before[unquote(file)] + row} of the data"
        words[key] = f" ({number})" if count == 1 else f" ({count} rows, the first is {number})"
    return words


def _folder_name(name: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name or "data").strip("-")[:60] or "data"
