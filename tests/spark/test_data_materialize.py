"""DataFrames written for training: every type there and back, nulls, reuse, damage, two writers."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tfdist.data import batch_from_arrow, from_dataframe, from_parquet
from tfdist.data.expressions import arrow_ready
from tfdist.data.handle import Handle
from tfdist.data.pipeline import as_tensors
from tfdist.errors import ConfigError, DataError
from tfdist.inference.score import score


def read(handle: Handle, rows: int = 1000) -> dict[str, list[Any]]:
    """All rows in the order of the source."""
    batches = list(handle.to_tf(global_batch=rows, shuffle=False))
    assert len(batches) == 1
    return {name: values.numpy().tolist() for name, values in batches[0].items()}


WHOLE, ROUND = "expected whole numbers that fit {}", "round them in Spark, or keep floats"
DAY = dt.date(1970, 1, 1)
MICROSECOND = dt.timedelta(microseconds=1)
OLD, NEW = dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)
COLUMNS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "a boolean": ("boolean", [True, False], [True, False]),
    "a.tiny": ("tinyint", [-128, 127], [-128, 127]),
    "A.tiny": ("smallint", [-32768, 32767], [-32768, 32767]),
    "ünt": ("int", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
    "big`int": ("bigint", [2**53 + 1, 2147483648], [2**53 + 1, 2147483648]),
    "single": ("float", [0.5, float("inf")], [0.5, float("inf")]),
    "double": ("double", [16777217.0, 0.1], [16777217.0, 0.1]),
    "decimal": ("decimal(10,2)", [Decimal("1.25"), Decimal("-3.5")], [1.25, -3.5]),
    "text": ("string", ["ä☃", ""], ["ä☃".encode(), b""]),
    "bytes": ("binary", [b"\x00\xff", b""], [b"\x00\xff", b""]),
    "date": ("date", [OLD.date(), NEW.date()], [(OLD.date() - DAY).days, (NEW.date() - DAY).days]),
    "ntz": (
        "timestamp_ntz",
        [OLD, NEW],
        [(OLD - dt.datetime(1970, 1, 1)) // MICROSECOND, (NEW - dt.datetime(1970, 1, 1)) // MICROSECOND],
    ),
    "array": ("array<int>", [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
    "dates": ("array<date>", [[DAY, DAY], [DAY, dt.date(1970, 1, 3)]], [[0, 0], [0, 2]]),
    "words": ("array<string>", [["a", "b"], ["c", ""]], [[b"a", b"b"], [b"c", b""]]),
    "span": ("interval day to second", [dt.timedelta(1), -MICROSECOND], [86400 * 10**6, -1]),
}


def make_all_types(spark: SparkSession) -> DataFrame:
    schema = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, (kind, _, _) in COLUMNS.items())
    rows = list(zip(*(values for _, values, _ in COLUMNS.values()), strict=True))
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        return spark.createDataFrame(rows, schema).coalesce(1)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_every_type_comes_back_as_the_contract_says(spark: SparkSession, tmp_path: Path) -> None:
    """Values of each Spark type, under names with dots, spaces, quotes and differing in case, arrive exactly."""
    df = make_all_types(spark)
    handle = from_dataframe(df, cache_dir=tmp_path, name="all types/of them")
    wanted = {name: values for name, (_, _, values) in COLUMNS.items()}
    assert read(handle) == wanted
    assert handle.root.name.startswith("all-types-of-them-")
    ready = arrow_ready(df.select("*"), handle.schema).toArrow()
    assert {name: values.tolist() for name, values in batch_from_arrow(ready, handle.schema).items()} == wanted


def test_timestamps_do_not_depend_on_the_session_time_zone(spark: SparkSession, tmp_path: Path) -> None:
    """The same instants are the same microseconds in any session time zone."""
    found = []
    for zone in ("America/New_York", "Asia/Kolkata"):
        spark.conf.set("spark.sql.session.timeZone", zone)
        try:
            df = spark.sql(
                "select timestamp'2024-03-10 02:30:00 UTC' t union all select timestamp_micros(-62135596800000000)"
            )
            handle = from_dataframe(df.coalesce(1), cache_dir=tmp_path)
            ready = batch_from_arrow(arrow_ready(df, handle.schema).toArrow(), handle.schema)
            found.append(sorted(read(handle)["t"]))
            assert sorted(ready["t"].tolist()) == found[-1]
        finally:
            spark.conf.unset("spark.sql.session.timeZone")
    assert found[0] == found[1] == [-62135596800000000, 1710037800000000]


def test_dense_and_sparse_vectors_are_one_tensor(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of size 4 mix DenseVector and SparseVector; one of size 5 is an error naming both sizes."""
    rows = [(Vectors.dense([1, 2, 3, 4]),), (Vectors.sparse(4, [1], [9.0]),)]
    df = spark.createDataFrame(rows, ["v"]).coalesce(1)
    handle = from_dataframe(df, cache_dir=tmp_path)
    assert handle.element_spec_text == "v: float64[4]"
    assert read(handle) == {"v": [[1, 2, 3, 4], [0, 9, 0, 0]]}
    ready = batch_from_arrow(arrow_ready(df, handle.schema).toArrow(), handle.schema)
    assert ready["v"].tolist() == [[1, 2, 3, 4], [0, 9, 0, 0]]
    with pytest.raises(DataError, match="'v': expected vector values of one length, got lengths 4 to 5"):
        from_dataframe(spark.createDataFrame([*rows, (Vectors.dense([0.0] * 5),)], ["v"]), cache_dir=tmp_path)


def test_missing_vectors_follow_their_policy(spark: SparkSession, tmp_path: Path) -> None:
    """A null vector is counted, or left out, or zeros with a mask, or the fill value; scoring reads it alike."""
    df = spark.createDataFrame([(0, Vectors.dense([1, 2])), (1, None), (2, Vectors.sparse(2, [1], [9.0]))], ["i", "v"])
    df = df.coalesce(1)
    with pytest.raises(DataError, match="'v': expected no nulls, got 1"):
        from_dataframe(df, cache_dir=tmp_path)
    wanted = {"mask": [[1, 2], [0, 0], [0, 9]], "fill": [[1, 2], [5, 5], [0, 9]], "drop": [[1, 2], [0, 9]]}
    for name, vectors in wanted.items():
        handle = from_dataframe(df, cache_dir=tmp_path, nulls={"v": ("fill", 5.0) if name == "fill" else name})
        assert read(handle)["v"] == vectors
        ready = batch_from_arrow(arrow_ready(df, handle.schema).toArrow(), handle.schema)
        assert np.asarray(ready["v"]).tolist() == vectors


def test_structs_become_dicts_of_tensors_and_score_alike(spark: SparkSession, tmp_path: Path) -> None:
    """Fields of structs, missing structs too, arrive in nested dicts or by dotted names, and a model scores them."""
    import keras

    df = spark.createDataFrame(
        [(0, (1.5, ("a", [1, 2]))), (1, None), (2, (-2.0, ("b", [3, 4])))],
        "i int, `s t` struct<x: double, in: struct<`k.k`: string, v: array<int>>>",
    ).coalesce(1)
    with pytest.raises(DataError, match=r"'s t.x': expected no nulls, got 1") as caught:
        from_dataframe(df, cache_dir=tmp_path, features=["s t"])
    assert str(caught.value).count("expected no nulls") == 3
    nulls = {"s t.x": "mask", "s t.in.k.k": ("fill", "none"), "s t.in.v": ("fill", 9)}
    handle = from_dataframe(df, cache_dir=tmp_path, label="i", nulls=nulls)
    ((features, label),) = handle.to_tf(global_batch=3, shuffle=False)
    assert label.numpy().tolist() == [0, 1, 2]
    struct = features["s t"]
    assert struct["x"].numpy().tolist() == [1.5, 0, -2]
    assert struct["x_is_null"].numpy().tolist() == [False, True, False]
    assert struct["in"]["k.k"].numpy().tolist() == [b"a", b"none", b"b"]
    assert struct["in"]["v"].numpy().tolist() == [[1, 2], [9, 9], [3, 4]]
    assert from_parquet(handle.root).schema == handle.schema
    flat = from_parquet(handle.root, features=["s t.in.k.k", "i"])
    assert read(flat) == {"s t.in.k.k": [b"a", b"none", b"b"], "i": [0, 1, 2]}

    numbers = from_dataframe(
        df.dropna(), cache_dir=tmp_path, features=["s t.x", "s t.in"], nulls={"s t.in.k.k": "drop"}
    )
    inputs = numbers.schema.keras_inputs()
    total = keras.ops.cast(keras.ops.sum(inputs["s t"]["in"]["v"], axis=1), "float32") + inputs["s t.x"]
    model = keras.Model(inputs, total[:, None])
    keras.saving.save_model(model, tmp_path / "model.keras")
    (tmp_path / "schema.json").write_text(numbers.schema.to_json())
    scored = score(df, tmp_path)
    assert scored.columns == ["i", "s t", "prediction"]
    assert [row["prediction"] for row in scored.filter("i != 1").collect()] == [4.5, 5.0]


def test_structs_of_foreign_files_are_read_as_they_lie(tmp_path: Path) -> None:
    """Parquet files with structs need no Spark; only the chosen fields of a struct are read."""
    structs = [{"x": 1, "in": {"w": "a"}}, None, {"x": 3, "in": None}]
    pq.write_table(pa.table({"s": structs, "y": [0.5, 1.5, 2.5]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match=r"'s.in.w': expected no nulls, got 2"):
        from_parquet(tmp_path)
    handle = from_parquet(tmp_path, label="y", nulls={"s.x": ("fill", -1), "s.in.w": ("fill", "?")})
    ((features, _),) = handle.to_tf(global_batch=3, shuffle=False)
    assert features["s"]["x"].numpy().tolist() == [1, -1, 3]
    assert features["s"]["in"]["w"].numpy().tolist() == [b"a", b"?", b"?"]
    ready = batch_from_arrow(pq.read_table(tmp_path), handle.schema)
    assert ready["s.in.w"].tolist() == [b"a", b"?", b"?"]


def test_values_that_do_not_fit_their_dtype_are_found_while_writing(spark: SparkSession, tmp_path: Path) -> None:
    """Narrowing casts are proved for every row: the error has column, count and an example; NaN is no whole number."""
    df = spark.createDataFrame(
        [(1, 0.0, 5), (2**31, 1.0, -1), (None, float("nan"), 2**40)], "a bigint, b double, c bigint"
    )
    nulls = {"a": "mask"}
    with pytest.raises(DataError) as caught:
        from_dataframe(df, cache_dir=tmp_path, nulls=nulls, dtypes={"a": "int32", "b": "int8", "c": "uint64"})
    assert str(caught.value).splitlines() == [
        f"column 'a': expected values that fit int32, got 1 that do not, for example {2**31}; choose a wider dtype",
        f"column 'b': {WHOLE.format('int8')}, got 1 that do not, for example nan; {ROUND}",
        "column 'c': expected values that fit uint64, got 1 that do not, for example -1; choose a wider dtype",
    ]
    fits = from_dataframe(df.filter("b <= 1"), cache_dir=tmp_path, nulls=nulls, dtypes={"a": "uint32", "b": "int8"})
    assert sorted(read(fits)["a"]) == [1, 2**31]


def test_narrowing_casts_of_fractions_floats_and_arrays_are_proved(spark: SparkSession, tmp_path: Path) -> None:
    """Exact decimals pass, fractions do not; what float32 cannot hold is counted, in arrays and vectors too."""
    df = spark.sql(
        "select cast(a as decimal(38,20)) a, cast(b as decimal(38,0)) b, c, array(c, 0d) d, array(array(e), array()) e "
        "from values (9007199254740993BD, 9223372036854775807BD, 1d, 5), (1.5BD, 1e30BD, -1e39d, 200), "
        "(null, null, double('nan'), 6), (2BD, 2BD, double('inf'), 7) t(a, b, c, e)"
    ).coalesce(1)
    df = df.withColumn("v", array_to_vector("d"))
    nulls = {"a": "mask", "b": "mask"}
    dtypes = {"a": "int64", "b": "int64", "c": "float32", "d": "float32", "e": "int8", "v": "float32"}
    with pytest.raises(DataError) as caught:
        from_dataframe(df, cache_dir=tmp_path, nulls=nulls, dtypes=dtypes)
    expected, way = WHOLE.format("int64"), "choose 'scaled int64', 'float64' or 'string'"
    assert str(caught.value).splitlines() == [
        f"column 'a': {expected}, got 1 that do not, for example 1.50000000000000000000; {way}",
        f"column 'b': {expected}, got 1 that do not, for example {10**30}; {way}",
        "column 'c': expected values that fit float32, got 1 that do not, for example -1e+39; choose a wider dtype",
        "column 'd': expected values that fit float32, got 1 that do not, for example -1e+39; choose a wider dtype",
        "column 'e': expected values that fit int8, got 1 that do not, for example 200; choose a wider dtype",
        "column 'v': expected values that fit float32, got 1 that do not, for example -1e+39; choose a wider dtype",
    ]
    cut = spark.sql(
        "select c, float(c) f, array(c, 1d) d, array(array(float(c)), array()) e "
        "from values (1.5d), (-2d), (0.25d), (double('-inf')) t(c)"
    ).withColumn("v", array_to_vector("d"))
    with pytest.raises(DataError) as caught:
        from_dataframe(cut, cache_dir=tmp_path, dtypes=dict.fromkeys("cfdev", "int64"))
    assert str(caught.value).splitlines() == [
        f"column {name!r}: {WHOLE.format('int64')}, got 3 that do not, for example 1.5; {ROUND}" for name in "cfdev"
    ]
    kept = from_dataframe(cut.filter("c = -2"), cache_dir=tmp_path, dtypes=dict.fromkeys("cfdev", "int64"))
    (batch,) = kept.to_tf(global_batch=1)
    assert {name: _listed(v) for name, v in batch.items()} == {
        "c": [-2],
        "f": [-2],
        "d": [[-2, 1]],
        "e": [[[-2], []]],
        "v": [[-2, 1]],
    }
    fits = df.filter("c is null or isnan(c) or c > 0")
    handle = from_dataframe(
        fits, cache_dir=tmp_path, nulls=nulls, dtypes={k: dtypes[k] for k in "abc"}, features=list("abc")
    )
    rows = read(handle)
    assert rows["a"] == [2**53 + 1, 0, 2]
    assert rows["b"] == [2**63 - 1, 0, 2]
    assert str(rows["c"]) == "[1.0, nan, inf]"


def test_arrays_prove_their_length(spark: SparkSession, tmp_path: Path) -> None:
    """Length 10 in every row is found out; 3 and 5 are ragged, or padded; a dirty row deep in the data is counted."""
    df = spark.range(0, 5000, 1, 2).selectExpr("transform(sequence(1, 10), x -> float(x + id)) v")
    assert from_dataframe(df, cache_dir=tmp_path).element_spec_text == "v: float32[10]"
    uneven = df.selectExpr("slice(v, 1, if(v[0] > 9, 3, 5)) v")
    assert from_dataframe(uneven, cache_dir=tmp_path).element_spec_text == "v: float32[*]"
    assert from_dataframe(df, cache_dir=tmp_path, dtypes={"v": "float32[*]"}).element_spec_text == "v: float32[*]"
    nothing = from_dataframe(spark.range(3).selectExpr("cast(array() as array<int>) v"), cache_dir=tmp_path)
    assert read(nothing)["v"] == [[], [], []]
    padded = from_dataframe(uneven.filter("v[0] <= 9"), cache_dir=tmp_path, dtypes={"v": "float32[<=6]"})
    assert padded.element_spec_text == "v: float32[6]"
    assert max(read(padded)["v"]) == [9, 10, 11, 12, 13, 0]
    with pytest.raises(
        DataError,
        match=r"at most length 4, got lengths 3 to 5 \(.* row \d+ of .*\); say dtypes=.*float32\[\*\]",
    ):
        from_dataframe(uneven, cache_dir=tmp_path, dtypes={"v": "float32[<=4]"})
    dirty = df.selectExpr("transform(v, x -> if(x = 3010.0 and v[9] = 3010.0, null, x)) v")
    with pytest.raises(DataError, match="'v': expected no nulls inside its arrays, got 1"):
        from_dataframe(dirty, cache_dir=tmp_path)
    filled = from_dataframe(dirty, cache_dir=tmp_path, nulls={"v": ("fill", -1)})
    assert sum(min(row) == -1 for row in read(filled, 5000)["v"]) == 1


def test_lists_of_varying_length_are_ragged(spark: SparkSession, tmp_path: Path) -> None:
    """A null and an empty list change no dtype; texts in lists of lists and dates in lists arrive, in scoring too."""
    rows = [
        ([1, 2], [["x"], [], ["y", "z"]], [DAY]),
        ([], [], []),
        (None, [["w"] * 7], [DAY, DAY]),
        ([2**53 + 1], [[]], [dt.date(1970, 1, 3)]),
    ]
    df = spark.createDataFrame(rows, "n array<bigint>, t array<array<string>>, d array<date>").coalesce(1)
    handle = from_dataframe(df, cache_dir=tmp_path, nulls={"n": "mask"})
    assert handle.element_spec_text.splitlines() == [
        "n: int64[*]",
        "n_is_null: bool[]",
        "t: string[*, *]",
        "d: int32[*]",
    ]
    (batch,) = handle.to_tf(global_batch=4, shuffle=False)
    assert handle.to_tf(global_batch=4).element_spec == handle.element_spec
    wanted = {
        "n": [[1, 2], [], [], [2**53 + 1]],
        "n_is_null": [False, False, True, False],
        "t": [[[b"x"], [], [b"y", b"z"]], [], [[b"w"] * 7], [[]]],
        "d": [[0], [], [0, 0], [2]],
    }
    assert {name: _listed(values) for name, values in batch.items()} == wanted
    ready = batch_from_arrow(arrow_ready(df, handle.schema).toArrow(), handle.schema)
    assert {name: _listed(values) for name, values in as_tensors(ready).items()} == wanted
    again = from_parquet(handle.root)
    assert again.schema == handle.schema
    with pytest.raises(DataError, match="'n': expected no nulls, got 1"):
        from_dataframe(df, cache_dir=tmp_path)
    dirty = df.selectExpr("transform(t, x -> transform(x, y -> if(y = 'z', null, y))) t")
    with pytest.raises(DataError, match="'t': expected no nulls inside its arrays, got 1"):
        from_dataframe(dirty, cache_dir=tmp_path)


def test_packs_are_kept_with_the_data(spark: SparkSession, tmp_path: Path) -> None:
    """A frame's pack is that of its files when they are opened again, and is another data set than without."""
    df = spark.range(0, 5, 1, 1).selectExpr("float(id) a", "float(-id) b", "id")
    handle = from_dataframe(df, cache_dir=tmp_path, pack={"ab": ["b", "a"]})
    assert read(handle) == {"id": [0, 1, 2, 3, 4], "ab": [[-i, i] for i in range(5)]}
    assert from_parquet(handle.root).schema == handle.schema
    assert from_parquet(handle.root, features=["a", "id"]).element_spec_text == "a: float32[]\nid: int64[]"
    assert from_dataframe(df, cache_dir=tmp_path).root != handle.root


def test_data_has_a_time_to_live(spark: SparkSession, tmp_path: Path) -> None:
    """Using data again begins its time anew, the next writer in the folder deletes what is over, 0 days are refused."""
    df = spark.range(5)
    handle = from_dataframe(df, cache_dir=tmp_path, ttl_days=1)
    long_ago = time.time() - 2 * 86400
    os.utime(handle.root / "manifest.json", (long_ago, long_ago))
    other = from_dataframe(spark.range(6), cache_dir=tmp_path)
    assert not handle.root.exists()
    os.utime(other.root / "manifest.json", (long_ago, long_ago))
    assert from_dataframe(spark.range(6), cache_dir=tmp_path, ttl_days=1).manifest.ttl_days == 1
    from_dataframe(df, cache_dir=tmp_path)
    assert from_parquet(other.root).rows == 6
    with pytest.raises(ConfigError, match="ttl_days: expected days above 0"):
        from_dataframe(df, cache_dir=tmp_path, ttl_days=0)


def _listed(tensor: Any) -> list[Any]:
    return tensor.to_list() if hasattr(tensor, "to_list") else tensor.numpy().tolist()


@pytest.mark.parametrize(
    ("policy", "wanted"), [(("fill", -1), [1, -1, 9007199254740993]), ("drop", [1, 9007199254740993])]
)
def test_null_policies_apply_to_written_rows(
    spark: SparkSession, tmp_path: Path, policy: Any, wanted: list[int]
) -> None:
    """Fill and drop leave the other values exact; dropped rows are counted."""
    df = spark.createDataFrame([(1,), (None,), (9007199254740993,)], "v bigint").coalesce(1)
    handle = from_dataframe(df, cache_dir=tmp_path, nulls={"v": policy})
    assert read(handle) == {"v": wanted}
    assert handle.manifest.dropped_rows == 3 - handle.rows


def test_nulls_without_a_policy_are_counted_and_leave_nothing_behind(spark: SparkSession, tmp_path: Path) -> None:
    """Columns with nulls are refused together with their counts, and the cache has no trace of the attempt."""
    df = spark.range(10).selectExpr(
        "if(id % 5 = 0, null, id) n", "if(id = 3, null, repeat('x', 9000)) s", "if(id < 4, null, array(id)) a"
    )
    with pytest.raises(DataError) as caught:
        from_dataframe(df, cache_dir=tmp_path)
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "column 'n': expected no nulls, got 2",
        "column 's': expected no nulls, got 1",
        "column 'a': expected no nulls, got 4",
    ]
    assert list(tmp_path.iterdir()) == []


def test_empty_partitions_and_empty_frames(spark: SparkSession, tmp_path: Path) -> None:
    """Five empty partitions of eight do no harm; a frame without rows is refused when it is to be read."""
    df = spark.range(0, 80, 1, 8).filter("id >= 50")
    handle = from_dataframe(df, cache_dir=tmp_path)
    assert len(handle.manifest.fragments) == 3
    assert read(handle) == {"id": list(range(50, 80))}
    empty = from_dataframe(df.filter("id < 0"), cache_dir=tmp_path)
    assert empty.rows == 0
    with pytest.raises(ConfigError, match="empty data set"):
        empty.to_tf(global_batch=4)


def test_files_are_reused_while_plan_and_source_are_the_same(spark: SparkSession, tmp_path: Path) -> None:
    """The same plan is written once; another plan, choice of columns, or content of the source is written anew."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    spark.range(0, 100, 1, 2).selectExpr("id", "id * 2 as twice").write.parquet(str(source))

    def make(limit: int = 50, **choice: Any) -> Handle:
        df = spark.read.parquet(str(source)).filter(F.col("id") < limit)
        return from_dataframe(df, cache_dir=cache, **choice)

    first = make()
    assert make().root == first.root
    assert first.manifest == make().manifest
    others = [make(51), make(nulls={"id": "mask"}), make(label="twice"), make(features=["id"])]
    assert len({h.root for h in [first, *others]}) == 5
    shutil.rmtree(source)
    spark.range(0, 100, 1, 2).selectExpr("id", "id * 3 as twice").write.parquet(str(source))
    spark.catalog.clearCache()
    again = make()
    assert again.root != first.root
    assert sorted(read(again)["twice"]) == [3 * i for i in range(50)]


def test_rows_that_no_plan_tells_are_never_reused(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of the driver, random values, Python functions and cached frames are written anew each time."""
    add = F.udf(lambda v: v + 1, "bigint")
    frames = [
        spark.createDataFrame([(1,), (2,)], "a int"),
        spark.range(4).withColumn("r", F.rand(1)),
        spark.range(4).withColumn("u", add("id")),
        spark.range(7).cache(),
    ]
    for df in frames:
        first, second = (from_dataframe(df, cache_dir=tmp_path) for _ in range(2))
        assert first.root != second.root
        assert first.rows == second.rows
    frames[-1].unpersist()


def test_a_damaged_or_unfinished_folder_is_written_anew(spark: SparkSession, tmp_path: Path) -> None:
    """A lost file, a cut manifest, or only _SUCCESS: the next call repairs it in place."""

    def make() -> Handle:
        return from_dataframe(spark.range(0, 30, 1, 2), cache_dir=tmp_path)

    handle = make()
    lost = handle.root / handle.manifest.fragments[0].path
    lost.unlink()
    assert sorted(read(make())["id"]) == list(range(30))
    (handle.root / "manifest.json").write_text('{"version": 1, "rows"')
    assert sorted(read(make())["id"]) == list(range(30))
    for file in handle.root.glob("*"):
        if file.name != "_SUCCESS":
            file.unlink()
    repaired = make()
    assert repaired.root == handle.root
    assert sorted(read(repaired)["id"]) == list(range(30))
    assert [p for p in tmp_path.iterdir() if p != handle.root] == []


def test_two_writers_at_once_end_with_one_whole_folder(spark: SparkSession, tmp_path: Path) -> None:
    """Concurrent calls for the same frame return the same data, and nothing else stays."""
    with ThreadPoolExecutor(3) as threads:
        handles = list(threads.map(lambda _: from_dataframe(spark.range(0, 500, 1, 2), cache_dir=tmp_path), range(3)))
    assert len({h.root for h in handles}) == 1
    assert sorted(read(handles[0])["id"]) == list(range(500))
    assert list(tmp_path.iterdir()) == [handles[0].root]


def test_written_data_opens_by_its_own_names(spark: SparkSession, tmp_path: Path) -> None:
    """from_parquet of a written folder knows the frame's names and policies, and takes other choices."""
    df = spark.createDataFrame([(1, "a", None), (2, "b", 5.0)], "`x.y` int, s string, `n n` double").coalesce(1)
    handle = from_dataframe(df, cache_dir=tmp_path, label="x.y", nulls={"n n": "mask"})
    again = from_parquet(handle.root)
    assert again.schema == handle.schema
    assert read(from_parquet(handle.root, features=["n n"], nulls={"n n": ("fill", 2)})) == {"n n": [2, 5]}
    with pytest.raises(DataError, match="'n n': expected no nulls, got 1"):
        from_parquet(handle.root, nulls={"n n": "error"})


def test_row_groups_are_cut_for_shuffling(spark: SparkSession, tmp_path: Path) -> None:
    """A large partition becomes several row groups of at most 32,768 rows, so that shuffling can mix them."""
    handle = from_dataframe(spark.range(0, 100_000, 1, 1), cache_dir=tmp_path)
    (fragment,) = handle.manifest.fragments
    assert sum(fragment.row_groups) == 100_000
    assert max(fragment.row_groups) <= 32768
    assert json.loads((handle.root / "manifest.json").read_text())["rows"] == 100_000


def test_files_are_cut_and_packed_as_asked(spark: SparkSession, tmp_path: Path) -> None:
    """Row groups and compression are those asked for, each choice is another data set, and wrong ones are refused."""
    df = spark.range(0, 1000, 1, 1)
    roots = {from_dataframe(df, cache_dir=tmp_path).root}
    for compression, codec in {"zstd": "ZSTD", "lz4": "LZ4", "none": "UNCOMPRESSED"}.items():
        handle = from_dataframe(df, cache_dir=tmp_path, row_group_rows=300, compression=compression)
        (fragment,) = handle.manifest.fragments
        assert fragment.row_groups == (300, 300, 300, 100)
        footer = pq.read_metadata(handle.root / fragment.path)
        assert footer.row_group(0).column(0).compression == codec
        assert read(handle)["id"] == list(range(1000))
        roots.add(handle.root)
    assert len(roots) == 4
    with pytest.raises(ConfigError) as caught:
        from_dataframe(df, cache_dir=tmp_path, row_group_rows=0, compression="snapy")
    assert caught.value.problems == (
        "row_group_rows: expected a whole number of at least 1, got 0",
        "compression: expected one of 'snappy', 'zstd', 'lz4', 'gzip', 'none', got 'snapy'; did you mean 'snappy'?",
    )


def test_problems_are_found_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Missing columns, duplicates, unknown file systems: refused with the nearest name or the way out."""
    df = spark.range(3).selectExpr("id", "map('a', 1) m")
    with pytest.raises(DataError, match=r"'m': the type map<string,int> becomes no tensor; select the keys"):
        from_dataframe(df, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"'idd': not in the data.*did you mean 'id'"):
        from_dataframe(df, cache_dir=tmp_path, features=["idd"])
    with pytest.raises(DataError, match="'id': 2 columns have this name"):
        from_dataframe(spark.range(3).selectExpr("id", "id"), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="cache_dir: expected a path, or a URL of a file system that fsspec knows"):
        from_dataframe(df.select("id"), cache_dir="nofs://bucket/cache")
    assert list(tmp_path.iterdir()) == []


def test_a_wide_decimal_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """decimal(38,20) becomes float64 with a warning, an array of doubles beside it stays whole."""
    df = spark.sql("select cast(1.25 as decimal(38,20)) m, array(1.0d, 2.0d) x")
    with pytest.warns(UserWarning, match="'m'"):
        handle = from_dataframe(df, cache_dir=tmp_path)
    assert read(handle) == {"m": [1.25], "x": [[1, 2]]}
    exact = from_dataframe(df, cache_dir=tmp_path, dtypes={"m": "string", "x": "float32"})
    assert read(exact)["m"] == [b"1.25000000000000000000"]
    assert np.asarray(next(iter(exact.to_tf(global_batch=1)))["x"]).dtype == np.float32
