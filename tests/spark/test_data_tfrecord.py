"""TFRecord files: every type there and back, TensorFlow's own files, damage, and training from them."""

from __future__ import annotations

import datetime as dt
import gzip
import itertools
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from tfdist.data import from_dataframe, read_tfrecords, write_tfrecords
from tfdist.data.examples import decode
from tfdist.data.features import feature_to_read
from tfdist.data.records import Record, record_files, records
from tfdist.errors import ConfigError, DataError
from tfdist.testing import as_worker


def example(**features: Any) -> bytes:
    """An example with lists of ints, floats or bytes; None is a feature without a kind."""
    message = tf.train.Example()
    for name, values in features.items():
        place = message.features.feature[name]
        if values is not None:
            kind = {int: place.int64_list, float: place.float_list, bytes: place.bytes_list}[type(values[0])]
            kind.value.extend(values)
    return message.SerializeToString(deterministic=True)


def write_file(path: Path, contents: list[bytes], compression: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=compression)) as writer:
        for content in contents:
            writer.write(content)
    return path


def rows(df: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in df.collect()]


OLD, NEW = dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30, 23, 59, 59, 999999)
COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "a boolean": ("boolean", [True, None, False]),
    "a.tiny": ("tinyint", [-128, None, 127]),
    "A.tiny": ("smallint", [-32768, None, 32767]),
    "ünt ☃": ("int", [-(2**31), None, 2**31 - 1]),
    "big`int": ("bigint", [2**53 + 1, None, -(2**63)]),
    "single": ("float", [0.100000001490116119384765625, None, float("-inf")]),
    "text": ("string", ["ä☃", None, ""]),
    "bytes": ("binary", [b"\x00\xff", None, b""]),
    "date": ("date", [OLD.date(), None, NEW.date()]),
    "ntz": ("timestamp_ntz", [OLD, None, NEW]),
    "flags": ("array<boolean>", [[True, False], None, []]),
    "numbers": ("array<smallint>", [[], None, [1, -2, 3]]),
    "floats": ("array<float>", [[0.5, float("inf")], None, []]),
    "words": ("array<string>", [["a", "", "ß"], None, []]),
    "blobs": ("array<binary>", [[b"\xff"], None, []]),
    "dates": ("array<date>", [[OLD.date()], None, []]),
}


def every_type(spark: SparkSession) -> tuple[DataFrame, str]:
    schema = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, (kind, _) in COLUMNS.items())
    data = list(zip(*(values for _, values in COLUMNS.values()), strict=True))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        return spark.createDataFrame(data, schema), schema
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_every_type_comes_back(spark: SparkSession, tmp_path: Path, compression: Any) -> None:
    """Values, nulls and empty arrays of each type, under any name and from partitions without rows, are the same."""
    df, schema = every_type(spark)
    partitions = df.rdd.getNumPartitions()
    assert partitions == 4  # three rows, so one is empty
    target = tmp_path / "a folder ä" / "data"
    assert write_tfrecords(df, target.as_uri(), compression=compression) == 3
    names = sorted(p.name for p in target.iterdir())
    ending = r"\.tfrecord\.gz" if compression else r"\.tfrecord"
    assert names[0] == "_SUCCESS"
    assert len(names) == 4
    assert all(re.fullmatch(rf"part-0000[0-3]-[0-9a-f]{{32}}{ending}", name) for name in names[1:])
    assert [p.name for p in target.parent.iterdir()] == ["data"]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        back = read_tfrecords(spark, target, schema=schema)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert back.schema == df.schema
    assert rows(back) == rows(df)


def test_instants_do_not_depend_on_the_session_time_zone(spark: SparkSession, tmp_path: Path) -> None:
    """A timestamp is stored as microseconds since the epoch, and is the same instant when read in another zone."""
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
        df = spark.sql("SELECT timestamp_micros(-62135596800000001) AS t, array(timestamp_micros(7)) AS ts")
        write_tfrecords(df, tmp_path / "data")
        spark.conf.set("spark.sql.session.timeZone", "America/Lima")
        back = read_tfrecords(spark, tmp_path / "data", schema="t timestamp, ts array<timestamp>")
        assert rows(back.selectExpr("unix_micros(t)", "unix_micros(ts[0])")) == [(-62135596800000001, 7)]
        (file,) = (tmp_path / "data").glob("part-*")
        assert [record.content for record in records(str(file))] == [example(t=[-62135596800000001], ts=[7])]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_tensorflow_reads_what_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """TFRecordDataset and parse_example get the rows of each partition in their order, an absent feature for a null."""
    data = [(1, 0.5, "ä", [1, 2]), (None, None, None, None), (3, 1.5, "", [])]
    df = spark.createDataFrame(data, "i int, f float, s string, v array<bigint>")
    write_tfrecords(df.coalesce(1), tmp_path / "data", compression="gzip")
    (file,) = (tmp_path / "data").glob("part-*")
    spec = {
        "i": tf.io.FixedLenFeature([], tf.int64, -1),
        "f": tf.io.FixedLenFeature([], tf.float32, -1),
        "s": tf.io.FixedLenFeature([], tf.string, "-"),
        "v": tf.io.RaggedFeature(tf.int64),
    }
    (batch,) = tf.data.TFRecordDataset(str(file), "GZIP").batch(9).map(lambda b: tf.io.parse_example(b, spec))
    assert batch["i"].numpy().tolist() == [1, -1, 3]
    assert batch["f"].numpy().tolist() == [0.5, -1, 1.5]
    assert batch["s"].numpy().tolist() == ["ä".encode(), b"-", b""]
    assert batch["v"].to_list() == [[1, 2], [], []]


def test_a_file_of_tensorflow_is_read_with_inferred_columns(spark: SparkSession, tmp_path: Path) -> None:
    """One value in each record is a scalar, else an array; bytes are text where all are; file 10 comes after file 9."""
    write_file(tmp_path / "d" / "f-10", [example(i=[3], f=[2.5], s=[b"z"], b=[b"\xff"], v=[9], n=None)], "GZIP")
    write_file(tmp_path / "d" / "f-9", [example(i=[2**62], s=["ü".encode()], b=[b"b"], v=[1, 2]), example(i=[2])])
    (tmp_path / "d" / ".hidden").write_bytes(b"no record")
    df = read_tfrecords(spark, tmp_path / "d")
    assert df.schema.simpleString() == "struct<b:binary,f:float,i:bigint,s:string,v:array<bigint>>"
    assert rows(df) == [
        (b"b", None, 2**62, "ü", [1, 2]),
        (None, None, 2, None, None),
        (b"\xff", 2.5, 3, "z", [9]),
    ]
    assert rows(read_tfrecords(spark, tmp_path / "d" / "f-10", schema="f double, new array<string>")) == [(2.5, None)]


def test_what_would_lose_digits_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """double, decimal, vectors and nested types are refused before anything is written, each with the way out."""
    row = (0.1, Decimal(1), Vectors.dense([1.0]), [0.1], {"k": 1}, (1,), [[1]])
    schema = T.StructType.fromDDL(
        "d double, c decimal(9,2), v int, a array<double>, m map<string,int>, s struct<x:int>, n array<array<int>>"
    )
    schema.fields[2].dataType = Vectors.dense([1.0]).__UDT__
    df = spark.createDataFrame([row], schema)
    with pytest.raises(DataError) as refused:
        write_tfrecords(df, tmp_path / "data")
    lines = str(refused.value).splitlines()
    ways = ["to float if", "to float if", "'float32'", "to array<float>", r"\['key'\]", "its fields", r"flatten"]
    assert len(lines) == len(ways)
    for line, name, way in zip(lines, df.columns, ways, strict=True):
        assert re.match(rf"column '{name}': .*{way}", line)
    with pytest.raises(DataError, match="2 columns have this name"):
        write_tfrecords(df.selectExpr("1 AS x", "2 AS x"), tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(spark: SparkSession, tmp_path: Path) -> None:
    """A target that is there is refused, also an empty folder, and so are other file systems and compressions."""
    (tmp_path / "data").mkdir()
    for target, compression, text in [
        (tmp_path / "data", None, "delete it or take another name"),
        ("hdfs://host/data", None, "file: URL"),
        (tmp_path / "new", "snappy", "compression: expected None or 'gzip'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            write_tfrecords(spark.range(1), target, compression=compression)  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_failed_write_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """An error of the rows' own functions, or a null inside an array, ends the write without a trace."""

    def fail_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if TaskContext.get().attemptNumber() == 0:
            yield from batches
        raise ValueError("no sevens")

    numbers = spark.range(0, 8, 1, 1)
    with pytest.raises(PySparkException, match="no sevens"):
        write_tfrecords(numbers.mapInArrow(fail_late, numbers.schema), tmp_path / "data")
    with pytest.raises(DataError, match=r"column 'v': expected no nulls inside its arrays") as refused:
        write_tfrecords(numbers.selectExpr("array(id, null) AS v"), tmp_path / "data")
    assert len(str(refused.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_retried_task_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    """What a failed attempt has written of a partition is not among the files."""
    marker = str(tmp_path / "failed once")

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if not Path(marker).exists():
            Path(marker).touch()
            raise ValueError("once")

    numbers = spark.range(0, 6, 1, 1)
    assert write_tfrecords(numbers.mapInArrow(fail_once, numbers.schema), tmp_path / "data") == 6
    assert Path(marker).exists()
    assert len(list((tmp_path / "data").iterdir())) == 2
    assert rows(read_tfrecords(spark, tmp_path / "data")) == [(i,) for i in range(6)]


CONTENTS = [example(i=[n], text=[b"some text"] * n) for n in range(1, 4)]
STARTS = list(itertools.accumulate((len(c) + 16 for c in CONTENTS), initial=0))


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_no_damage_is_read_over(tmp_path: Path, compression: str) -> None:
    """A file cut off at any byte, or with any byte changed, is an error that names file and byte."""
    whole = write_file(tmp_path / "whole", CONTENTS, compression).read_bytes()
    file = tmp_path / "damaged"

    def read() -> list[bytes]:
        return [record.content for record in records(str(file))]

    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        if cut in STARTS and (cut == 0 or not compression):
            assert read() == CONTENTS[: STARTS.index(cut)]
            continue
        with pytest.raises(DataError, match=rf"^{file}: .* damage at byte (\d+)") as damage:
            read()
        if not compression:
            assert f"at byte {max(s for s in STARTS if s <= cut)}, after" in str(damage.value)
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        if compression and place in range(
            3, 10
        ):  # gzip's own header: flags, time and system say nothing of the content
            continue
        with pytest.raises(DataError, match=rf"^{file}: .* damage at byte (\d+)") as damage:
            read()
        if not compression:
            assert f"at byte {max(s for s in STARTS if s <= place)}, after" in str(damage.value)


def test_plain_and_gzip_are_told_apart(tmp_path: Path) -> None:
    """A plain record whose length is gzip's magic is read as plain; gzip files one after another are one file."""
    length = int.from_bytes(b"\x1f\x8b\x08", "little")
    plain = write_file(tmp_path / "plain", [bytes(length), b"2"])
    assert plain.read_bytes()[:3] == gzip.compress(b"")[:3]
    assert [len(record.content) for record in records(str(plain))] == [length, 1]
    both = tmp_path / "both"
    both.write_bytes(2 * write_file(tmp_path / "one", CONTENTS, "GZIP").read_bytes())
    assert [record.content for record in records(str(both))] == CONTENTS * 2


def test_an_error_of_a_file_reaches_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    """A record that does not fit fails the job that reads it, with file, record, byte and feature in its error."""
    write_file(tmp_path / "d" / "a", CONTENTS)
    file = write_file(tmp_path / "d" / "b", [*CONTENTS, example(i=[1.5])])
    where = rf"{file}, record 3 at byte {STARTS[3]}: feature 'i': expected an int64_list for bigint, got a float_list"
    with pytest.raises(PySparkException, match=where):
        read_tfrecords(spark, tmp_path / "d", schema="i bigint").collect()


@pytest.mark.parametrize(
    ("wanted", "features", "text"),
    [
        ("bigint", {"x": [1, 2]}, r"expected one value for bigint, got 2; read it as array<bigint>"),
        (
            "array<string>",
            {"x": [b"\xff"]},
            r"values that fit array<string>, got \[b'\\xff'\]; read it as array<binary>",
        ),
        ("tinyint", {"x": [300]}, r"values that fit tinyint, got 300; read it as bigint"),
        ("boolean", {"x": [2]}, r"values that fit boolean, got 2"),
        ("array<boolean>", {"x": [1, -1]}, r"values that fit array<boolean>, got \[1, -1\]"),
        ("date", {"x": [2**40]}, r"values that fit date"),
        ("string", {"x": [1]}, r"expected a bytes_list for string, got an int64_list"),
        ("bigint", {"x": [1], "y": [1]}, r"'y' is not among the columns"),
    ],
)
def test_a_record_that_does_not_fit_is_named(wanted: str, features: dict[str, Any], text: str) -> None:
    """Another kind, number or range of values is an error that names file, record, byte and feature."""
    feature = feature_to_read("x", wanted)
    good = decode([Record("f", 0, 0, example())], [feature], closed=True)
    assert good.to_pylist() == [{"c0": None}]
    with pytest.raises(DataError, match=rf"^f, record 1 at byte 9: feature .*{text}"):
        decode([Record("f", 0, 0, example()), Record("f", 1, 9, example(**features))], [feature], closed=True)


@pytest.mark.parametrize("content", [b"hello", tf.train.SequenceExample().SerializeToString() + b"\x12\x00"])
def test_records_of_another_message_are_refused(content: bytes) -> None:
    """Bytes that are no tf.train.Example, a SequenceExample among them, never come out as rows of nulls."""
    with pytest.raises(DataError, match=r"^f, record 0 at byte 0: expected a tf.train.Example"):
        decode([Record("f", 0, 0, content)], [feature_to_read("x", "bigint")], closed=False)


def test_what_cannot_be_read_is_said_before_reading(spark: SparkSession, tmp_path: Path) -> None:
    """No files, folders inside, an empty folder without a schema and unusable types are errors; empty files are not."""
    empty = tmp_path / "empty"
    empty.mkdir()
    problems: list[tuple[Path, str | None, str]] = [
        (tmp_path / "none", None, "found nothing"),
        (tmp_path, None, "found the folder 'empty'"),
        (empty, None, "give schema="),
        (empty, "m map<string,int>", "column 'm': expected one of"),
    ]
    for path, schema, text in problems:
        with pytest.raises(DataError, match=text):
            read_tfrecords(spark, path, schema=schema)
    assert rows(read_tfrecords(spark, empty, schema="x int")) == []
    write_tfrecords(spark.range(0), tmp_path / "no rows")
    assert record_files(tmp_path / "no rows") == []
    write_file(empty / "f", [])
    assert rows(read_tfrecords(spark, empty, schema="x int")) == []


def five_files(folder: Path) -> None:
    for number, size in enumerate([7, 1, 0, 20, 12]):
        write_file(folder / f"f-{number}", [example(file=[number], row=[row]) for row in range(size)])


def one_file(folder: Path) -> None:
    write_file(folder / "f-0", [example(file=[0], row=[row]) for row in range(40)])


@pytest.mark.parametrize("make", [one_file, five_files])
def test_two_workers_train_on_each_row_once(spark: SparkSession, tmp_path: Path, make: Callable[[Path], None]) -> None:
    """However many files there are, the shares of two workers are all rows, each once, in the order of the files."""
    make(tmp_path / "files")
    handle = from_dataframe(read_tfrecords(spark, tmp_path / "files"), cache_dir=tmp_path / "cache")
    whole = [(r["file"], r["row"]) for r in read_tfrecords(spark, tmp_path / "files").collect()]
    assert whole == sorted(set(whole))
    assert len(whole) == 40

    def shares(shuffle: bool) -> list[list[list[tuple[int, int]]]]:
        found = []
        for rank in range(2):
            with as_worker(rank, 2):
                batches = handle.to_tf(global_batch=8, shuffle=shuffle, seed=1)
                found.append([list(zip(b["file"].numpy(), b["row"].numpy(), strict=True)) for b in batches])
        return found

    in_order = [row for step in zip(*shares(False), strict=True) for part in step for row in part]
    assert in_order == whole
    shuffled = [row for share in shares(True) for batch in share for row in batch]
    assert sorted(shuffled) == whole
    assert shuffled != whole
