"""TFRecord files of tf.train.Example, written and read by Spark."""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from tfdist.data.examples import decode, encode, infer
from tfdist.data.features import Feature, feature_to_read, feature_to_write
from tfdist.data.records import Record, local_path, record_files, records
from tfdist.data.types import simple_type
from tfdist.errors import ConfigError, DataError

_SAMPLED_RECORDS = 1000
_TASK_BYTES = 128 * 2**20
_SMALL_TASKS = 64
_BATCH_BYTES = 8 * 2**20
_BATCH_RECORDS = 10_000


def write_tfrecords(df: DataFrame, path: str | Path, *, compression: Literal["gzip"] | None = None) -> int:
    """Write a DataFrame as TFRecord files of tf.train.Example, laid out as by spark-tfrecord.

    The folder gets ``part-NNNNN-<id>.tfrecord[.gz]`` for each partition that has rows, in the order of the partitions,
    and ``_SUCCESS``. It appears whole or not at all. A null is an absent feature. Nothing is narrowed:

    - boolean, tinyint, smallint, int, bigint: int64_list; date: days, timestamp and timestamp_ntz: microseconds since
      1970-01-01 in int64_list, whatever the session's time zone. Read back with a schema they are what they were.
    - float: float_list. double, decimal and vectors have more digits than its 32 bits and are refused: cast them.
    - string, binary: bytes_list.
    - arrays of these: as many values.

    Args:
        df: the rows.
        path: the folder to make, a path or ``file:`` URL that the driver and all executors share.
        compression: ``"gzip"``, or None for plain files.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: something is there already, or a setting makes no sense.
        DataError: a column has no exact place in an example, or the executors write elsewhere than the driver looks.
    """
    if compression not in (None, "gzip"):
        raise ConfigError(f"compression: expected None or 'gzip', got {compression!r}")
    features = _features_of(df)
    target = local_path(path)
    _check_absent(target)
    job = uuid.uuid4().hex
    scratch = target.with_name(f".{target.name}.{job[:12]}.writing")
    attempts, done = scratch / "attempts", scratch / "done"
    try:
        attempts.mkdir(parents=True)
        done.mkdir()
        safe = df.toDF(*(f"c{i}" for i in range(len(features))))
        written = safe.mapInArrow(_Writing(str(attempts), features, compression or ""), _WRITTEN).collect()
        problems = sorted({row.problem for row in written if row.problem})
        if problems:
            raise DataError("\n".join(problems))
        ending = "tfrecord.gz" if compression else "tfrecord"
        for row in written:
            _take(attempts / row.file, row.size, done / f"part-{row.part:05d}-{job}.{ending}")
        (done / "_SUCCESS").touch()
        _check_absent(target)
        done.rename(target)
    finally:
        _remove(scratch)
    return sum(row.rows for row in written)


def read_tfrecords(spark: SparkSession, path: str | Path, *, schema: str | T.StructType | None = None) -> DataFrame:
    """TFRecord files of tf.train.Example as a DataFrame; :func:`from_dataframe` makes it training data.

    Rows come in the order of the files' names and of the records in them. Files are plain or gzip by what they begin
    with. Checksums are verified, when the result is used: errors then name file, record (the first is 0) and byte.

    Args:
        spark: the session.
        path: a file or a folder of files, a path or ``file:`` URL that the driver and all executors share. Names that
            begin with ``_`` or ``.`` are left out.
        schema: the columns to read, as a StructType or DDL text: boolean, whole numbers, date and timestamps from
            int64_list, float and double from float_list, string and binary from bytes_list, or arrays of these. By
            default all features that the first 1000 records have: bigint, float, string (binary where one is no UTF-8),
            as arrays where a record has not exactly one value.

    Returns:
        The rows, with a null where a record lacks the feature. A later record with a feature of another kind, with
        another number of values than one for a column that is no array, with a value outside the column's type, or,
        without a schema, with a feature that the first records lack, is an error.

    Raises:
        DataError: there are no files, or the columns cannot be found in them.
    """
    files = [str(file) for file in record_files(local_path(path))]
    columns = _columns(spark, files, schema, str(path))
    features = tuple(feature_to_read(c.name, simple_type(c.dataType.jsonValue())) for c in columns)
    if not files:
        return spark.createDataFrame([], columns)
    safe = T.StructType([T.StructField(f"c{i}", c.dataType, True, c.metadata) for i, c in enumerate(columns)])
    size = sum(os.stat(file).st_size for file in files)
    tasks = min(len(files), max(_SMALL_TASKS, size // _TASK_BYTES))
    # The numbers of a range lie in its partitions in their order, so the files do.
    numbers = spark.range(0, len(files), 1, tasks)
    return numbers.mapInArrow(_Reading(tuple(files), features, schema is None), safe).toDF(*columns.names)


_WRITTEN = T.StructType(
    [
        T.StructField("part", T.IntegerType()),
        T.StructField("file", T.StringType()),
        T.StructField("rows", T.LongType()),
        T.StructField("size", T.LongType()),
        T.StructField("problem", T.StringType()),
    ]
)
_WRITTEN_ARROW = pa.schema(
    {"part": pa.int32(), "file": pa.string(), "rows": pa.int64(), "size": pa.int64(), "problem": pa.string()}
)


@dataclass(frozen=True)
class _Writing:
    """What a task does: its rows go to a file of the attempt's own, of which it tells."""

    folder: str
    features: tuple[Feature, ...]
    compression: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        told: dict[str, Any] = {"part": TaskContext.get().partitionId(), "rows": 0}
        try:
            told |= self._write(itertools.chain([first], filled))
        except DataError as error:  # told instead of raised: Spark would try the same rows again
            told["problem"] = str(error)
        yield pa.RecordBatch.from_pylist([told], schema=_WRITTEN_ARROW)

    def _write(self, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
        import tensorflow as tf

        if not os.path.isdir(self.folder):
            raise DataError(f"path: expected a folder that all executors see, got {self.folder}, which one does not")
        path, rows = Path(self.folder, uuid.uuid4().hex), 0
        with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=self.compression.upper())) as file:
            for batch in batches:
                for example in encode(batch, self.features):
                    file.write(example)
                rows += batch.num_rows
        return {"file": path.name, "rows": rows, "size": path.stat().st_size}


@dataclass(frozen=True)
class _Reading:
    """What a task does: the files whose numbers it gets, as rows."""

    files: tuple[str, ...]
    features: tuple[Feature, ...]
    closed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for part in _parts(records(self.files[number])):
                    yield decode(part, self.features, self.closed)


def _parts(found: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in lists of bounded size."""
    part: list[Record] = []
    size = 0
    for record in found:
        part.append(record)
        size += len(record.content)
        if size >= _BATCH_BYTES or len(part) >= _BATCH_RECORDS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _features_of(df: DataFrame) -> tuple[Feature, ...]:
    """Raises DataError with every column that cannot be written."""
    problems = [f"column {name!r}: {n} columns have this name" for name, n in Counter(df.columns).items() if n > 1]
    features = []
    for field in df.schema.fields:
        try:
            features.append(feature_to_write(field.name, simple_type(field.dataType.jsonValue())))
        except DataError as error:
            problems.append(str(error))
    if not features and not problems:
        problems.append("expected rows with columns, got none")
    if problems:
        raise DataError("\n".join(problems))
    return tuple(features)


def _columns(spark: SparkSession, files: list[str], schema: str | T.StructType | None, source: str) -> T.StructType:
    if schema is None:
        sample = itertools.chain.from_iterable(map(records, files))
        found = infer(itertools.islice(sample, _SAMPLED_RECORDS), source)
        elements = {"bigint": T.LongType(), "float": T.FloatType(), "string": T.StringType(), "binary": T.BinaryType()}
        types = [T.ArrayType(elements[f.element]) if f.array else elements[f.element] for f in found]
        return T.StructType([T.StructField(f.name, kind) for f, kind in zip(found, types, strict=True)])
    columns = spark.createDataFrame([], schema).schema
    if not columns.fields:
        raise DataError("schema: expected columns, got none")
    return T.StructType([T.StructField(c.name, c.dataType, True, c.metadata) for c in columns])


def _take(made: Path, size: int, name: Path) -> None:
    if not made.is_file() or made.stat().st_size != size:
        raise DataError(
            f"path: expected a folder that the driver and all executors share, got {name.parents[2]}, where the driver "
            "finds not all that was written"
        )
    made.rename(name)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"path: expected a folder yet to be made, got {target}; delete it or take another name")


def _remove(folder: Path) -> None:
    # Renamed first: a task that was not stopped yet makes no file in it any more.
    gone = folder.with_name(f"{folder.name}.deleting")
    with suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
