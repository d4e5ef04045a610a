"""Inputs that other tools get wrong, through Spark frames to tensors: exact values and exact errors."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from tfdist.data import Handle, from_dataframe, from_parquet
from tfdist.errors import ConfigError, DataError
from tfdist.testing import as_worker


def read(handle: Handle, rows: int = 200_000) -> dict[str, list[Any]]:
    """All rows in the order of the source, by the names of the tensors."""
    (batch,) = handle.to_tf(global_batch=rows, shuffle=False)
    return {name: v.to_list() if hasattr(v, "to_list") else v.numpy().tolist() for name, v in batch.items()}


def refused(df: DataFrame, cache: Path, **choice: Any) -> list[str]:
    """The lines of the error that a frame is refused with; nothing of it stays in the cache."""
    before = sorted(cache.iterdir())
    with pytest.raises(DataError) as caught:
        from_dataframe(df, cache_dir=cache, **choice)
    assert sorted(cache.iterdir()) == before
    return str(caught.value).splitlines()


MIXED = """
    select cast(1.25 as decimal(38,20)) m, array(1.0d, 2.0d) x, 16777217.0d d, 2147483648L b,
        cast(-128 as tinyint) t, cast(32767 as smallint) s, array(array(), array(9007199254740993L), array(1L, 2, 3, 4,
        5, 6, 7)) nested, interval '-1-2' year to month ym, interval '1 02:03:04.000005' day to second ds,
        array(interval '1' year, interval '5' month) yms, date'0001-01-01' day, cast('nan' as double) nan
    union all
    select -0.5, array(-1.0d, 0.1d), 0.1d, -2147483649L, cast(127 as tinyint), cast(-32768 as smallint),
        cast(array() as array<array<bigint>>), interval '178956970-7' year to month, interval '-1' second,
        array(interval '0' month, interval '-1' month), date'9999-12-31', 1.5d
"""
MIXED_SPEC = """\
m: string[]
x: float64[2]
d: float64[]
b: int64[]
t: int8[]
s: int16[]
nested: int64[*, *]
ym: int32[]
ds: int64[]
yms: int32[2]
day: int32[]
nan: float64[]"""


def test_values_of_mixed_types_stay_exact(spark: SparkSession, tmp_path: Path) -> None:
    """Long decimals, doubles and bigints past 32 bits, small integers, lists of lists, intervals and days."""
    handle = from_dataframe(spark.sql(MIXED).coalesce(1), cache_dir=tmp_path, dtypes={"m": "string"})
    assert handle.element_spec_text == MIXED_SPEC
    rows = read(handle)
    assert str(rows.pop("nan")) == "[nan, 1.5]"
    assert rows == {
        "m": [b"1.25000000000000000000", b"-0.50000000000000000000"],
        "x": [[1.0, 2.0], [-1.0, 0.1]],
        "d": [16777217.0, 0.1],
        "b": [2147483648, -2147483649],
        "t": [-128, 127],
        "s": [32767, -32768],
        "nested": [[[], [2**53 + 1], [1, 2, 3, 4, 5, 6, 7]], []],
        "ym": [-14, 2**31 - 1],
        "ds": [93784000005, -1000000],
        "yms": [[12, 5], [0, -1]],
        "day": [-719162, 2932896],
    }
    assert Decimal(rows["m"][0].decode()) == Decimal("1.25")


def test_types_without_a_tensor_are_refused_with_what_to_select(spark: SparkSession, tmp_path: Path) -> None:
    """Lists of structs, maps and variants are refused together; what the errors say to select is taken."""
    df = spark.sql(
        "select array(named_struct('a', array(1, 2), 'b', array(3)), named_struct('a', array(), 'b', array(4))) s, "
        "map('k', 1.5f) m, parse_json('{\"k\": 7}') v"
    )
    assert refused(df, tmp_path) == [
        (
            "column 's': the type array<struct<a:array<int>,b:array<int>>> becomes no tensor; select its fields as "
            "arrays of their own, for example col.field"
        ),
        (
            "column 'm': the type map<string,float> becomes no tensor; select the keys you need as columns, for "
            "example col['key']"
        ),
        "column 'v': the type variant becomes no tensor; take the values out with variant_get(col, path, type)",
    ]
    selected = df.selectExpr("s.a", "s.b", "m['k'] k", "variant_get(v, '$.k', 'int') v")
    nulls: Any = {"k": ("fill", 0), "v": ("fill", 0)}
    assert read(from_dataframe(selected, cache_dir=tmp_path, nulls=nulls)) == {
        "a": [[[1, 2], []]],
        "b": [[[3], [4]]],
        "k": [1.5],
        "v": [7],
    }


def test_a_null_inside_a_list_is_found_in_any_row_group(spark: SparkSession, tmp_path: Path) -> None:
    """The 3,000th of 5,000 rows alone is dirty: column, count, row and fix; a fill changes no other row."""
    df = spark.range(0, 5000, 1, 2).selectExpr("array('a', if(id = 2999, null, 'c'), 'b') tags")
    problem = (
        "column 'tags': expected no nulls inside its arrays, got 1 (row 2999 of the data); "
        "say nulls={'tags': ('fill', value)} or fill them in Spark with transform"
    )
    assert refused(df, tmp_path, row_group_rows=700) == [problem]
    assert refused(df, tmp_path, row_group_rows=700, nulls={"tags": "mask"}) == [problem]
    handle = from_dataframe(df, cache_dir=tmp_path, row_group_rows=700, nulls={"tags": ("fill", "?")})
    wanted = [[b"a", b"?" if i == 2999 else b"c", b"b"] for i in range(5000)]
    assert read(handle) == {"tags": wanted}


def test_a_missing_and_an_empty_list_change_no_other_row(spark: SparkSession, tmp_path: Path) -> None:
    """Of 100,000 lists of floats one is null and one is empty: the others stay float32, bit by bit."""
    df = (
        spark.range(0, 100_000, 1, 2)
        .selectExpr(
            "case when id = 77777 then null when id = 5 then cast(array() as array<float>) "
            "else array(float(id) / 3, float(id)) end seq"
        )
        .selectExpr("cast(seq as array<float>) seq")
    )
    fix = (
        "say nulls={'seq': 'drop'} (leave the rows out), 'mask' (adds 'seq_is_null') or ('fill', value), or filter "
        "them in Spark"
    )
    assert refused(df, tmp_path) == [f"column 'seq': expected no nulls, got 1; {fix}"]
    handle = from_dataframe(df, cache_dir=tmp_path, nulls={"seq": "mask"})
    assert handle.element_spec_text == "seq: float32[*]\nseq_is_null: bool[]"
    (batch,) = handle.to_tf(global_batch=100_000, shuffle=False)
    assert np.flatnonzero(batch["seq_is_null"]).tolist() == [77777]
    ids = np.delete(np.arange(100_000), [5, 77777])
    wanted = np.stack([ids.astype("float32").astype("float64") / 3, ids], axis=1).astype("float32")
    lengths = batch["seq"].row_lengths().numpy()
    assert np.flatnonzero(lengths != 2).tolist() == [5, 77777]
    np.testing.assert_array_equal(batch["seq"].flat_values.numpy().reshape(-1, 2), wanted)


def test_each_policy_keeps_a_bigint_beside_a_null(spark: SparkSession, tmp_path: Path) -> None:
    """1, null, 2**53 + 1 as bigint: with mask and error; fill and drop have tests of their own."""
    df = spark.createDataFrame([(1,), (None,), (9007199254740993,)], "v bigint").coalesce(1)
    masked = from_dataframe(df, cache_dir=tmp_path, nulls={"v": "mask"})
    assert read(masked) == {"v": [1, 0, 9007199254740993], "v_is_null": [False, True, False]}
    assert masked.manifest.null_counts == {"v": 1}
    fix = (
        "say nulls={'v': 'drop'} (leave the rows out), 'mask' (adds 'v_is_null') or ('fill', value), or filter them "
        "in Spark"
    )
    assert refused(df, tmp_path) == [f"column 'v': expected no nulls, got 1; {fix}"]


def test_a_list_of_another_length_is_named_with_its_row(spark: SparkSession, tmp_path: Path) -> None:
    """Declared and padded lengths that do not hold: column, lengths, how many rows and the first of them."""
    df = spark.range(0, 1000, 1, 2).selectExpr(
        "if(id in (614, 900), array(1), array(1, 2)) a", "if(id = 700, array(1, 2, 3), array(1)) p"
    )
    assert refused(df, tmp_path, dtypes={"a": "int32[2]", "p": "int32[<=2]"}, row_group_rows=100) == [
        (
            "column 'a': expected array<int> values of length 2, got lengths 1 to 2 (2 rows, the first is row "
            "614 of the data); say dtypes={'a': 'int32[*]'} for a ragged tensor, or dtypes={'a': "
            "'int32[<=2]'} to pad them"
        ),
        (
            "column 'p': expected array<int> values of at most length 2, got lengths 1 to 3 "
            "(row 700 of the data); say dtypes={'p': 'int32[*]'} for a ragged tensor, or dtypes={'p': 'int32[<=3]'} "
            "to pad them"
        ),
    ]


def shares(handle: Handle, world: int, batch: int) -> list[list[list[int]]]:
    """The rows of each step of each worker."""
    found = []
    for rank in range(world):
        with as_worker(rank, world):
            found.append([b["id"].numpy().tolist() for b in handle.to_tf(global_batch=batch)])
    return found


@pytest.mark.parametrize(
    ("rows", "partitions", "condition", "world"),
    [(5, 1, "true", 4), (80, 8, "id >= 50", 2), (240, 24, "true", 2)],
)
def test_any_partitions_give_every_worker_each_step(
    spark: SparkSession, tmp_path: Path, rows: int, partitions: int, condition: str, world: int
) -> None:
    """One partition, empty partitions and many small ones: each row once, in as many steps on each worker."""
    df = spark.range(0, rows, 1, partitions).filter(condition)
    handle = from_dataframe(df, cache_dir=tmp_path)
    found = shares(handle, world, 16)
    assert {len(steps) for steps in found} == {handle.steps(16)}
    assert all(step for steps in found for step in steps)
    wanted = [row[0] for row in df.collect()]
    assert sorted(i for steps in found for step in steps for i in step) == sorted(wanted)


def test_a_thousand_tiny_files_and_a_skew_of_ten_thousand(tmp_path: Path) -> None:
    """999 files of a row and one of 10,000, in row groups and in one: three workers read each row once."""
    for i in range(1000):
        ids = np.arange(10_000) + 1000 if i == 500 else np.array([i])
        pq.write_table(pa.table({"id": ids}), tmp_path / f"part-{i:04}.parquet")
    handle = from_parquet(tmp_path)
    wanted = sorted([*(i for i in range(1000) if i != 500), *range(1000, 11_000)])
    found = shares(handle, 3, 512)
    assert {len(steps) for steps in found} == {handle.steps(512)}
    assert sorted(i for steps in found for step in steps for i in step) == wanted


def test_what_lies_behind_the_caches_back_is_never_used(spark: SparkSession, tmp_path: Path) -> None:
    """A deleted folder, only _SUCCESS, other bytes of the same size, and another cache folder are each written anew."""

    def make(cache: str = "one", source: str = "source") -> Handle:
        return from_dataframe(spark.read.parquet(str(tmp_path / source)), cache_dir=tmp_path / cache)

    spark.range(0, 30, 1, 1).write.parquet(str(tmp_path / "source"))
    first = make()
    shutil.rmtree(first.root)
    assert read(make()) == {"id": list(range(30))}
    for file in Path(first.root).iterdir():
        if file.name != "_SUCCESS":
            file.unlink()
    assert read(make()) == {"id": list(range(30))}
    file = next(Path(first.root).glob("*.parquet"))
    content = bytearray(file.read_bytes())
    content[-12] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"is missing or damaged"):
        from_parquet(first.root)
    assert read(make()) == {"id": list(range(30))}
    other = make("two")
    assert Path(other.root).parent == tmp_path / "two"
    assert read(other) == {"id": list(range(30))}
    spark.range(100, 130, 1, 1).write.mode("overwrite").parquet(str(tmp_path / "source"))
    again = make()
    assert again.root != first.root
    assert read(again) == {"id": list(range(100, 130))}


def build_dense(schema: Any) -> Any:
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs["x"]))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def test_184_columns_of_a_frame_are_one_input_of_a_dense_layer(spark: SparkSession, tmp_path: Path) -> None:
    """One matrix [rows, 184] instead of 184 tensors, each value in its place, feeds a Dense layer."""
    names = [f"c{i}" for i in range(184)]
    df = spark.range(0, 20_000, 1, 2).selectExpr("id", *[f"float(id % 97 + {i}) c{i}" for i in range(184)])
    handle = from_dataframe(df, cache_dir=tmp_path, label="id", pack={"x": names})
    assert handle.element_spec_text == "x: float32[184]\nlabel id: int64[]"
    rows = 0
    for features, label in handle.to_tf(global_batch=4096):
        wanted = (label.numpy() % 97)[:, None] + np.arange(184)
        np.testing.assert_array_equal(features["x"], wanted.astype("float32"))
        rows += len(wanted)
    assert rows == 20_000
    small = from_parquet(handle.root, features=names, label="id", pack={"x": names})
    assert len(build_dense(small.schema).fit(small.to_tf(global_batch=10_000), verbose=0).history["loss"]) == 1


def test_a_duplicated_name_is_refused_and_other_names_are_not(spark: SparkSession, tmp_path: Path) -> None:
    """Two columns of one name cannot be told apart, nor a struct's field and a column named like it."""
    df = spark.sql("select 1 `a b`, 2 `a b`, named_struct('x', 3) s, 4 `s.x`")
    assert refused(df, tmp_path, features=["a b", "s.x"]) == [
        "column 'a b': 2 columns have this name; rename all but one",
        "column 's.x': 2 columns have this name; rename all but one",
    ]
    assert read(from_dataframe(df.select("s"), cache_dir=tmp_path, features=["s.x"])) == {"s.x": [3]}
    with pytest.raises(ConfigError, match="features: 'a b' is named 2 times"):
        from_dataframe(df.select("s").selectExpr("s", "1 `a b`"), cache_dir=tmp_path, features=["a b", "a b"])


def test_bytes_are_numbers_where_a_dtype_says_so(spark: SparkSession, tmp_path: Path) -> None:
    """Pixels and embeddings kept as bytes are tensors of their numbers, through files, a stream and in any order."""
    pixels = np.arange(40 * 6, dtype=np.uint8).reshape(40, 6)
    vectors = np.random.default_rng(0).normal(size=(40, 3))
    rows = [(i, bytearray(pixels[i]), bytearray(vectors[i].tobytes())) for i in range(40)]
    rows[7] = (7, None, rows[7][2])
    df = spark.createDataFrame(rows, "row int, pixels binary, vector binary").repartition(3)
    choice: Any = {"dtypes": {"pixels": "uint8[6]", "vector": "float64[3]"}, "nulls": {"pixels": ("fill", 255)}}
    pixels[7] = 255
    handle = from_dataframe(df, cache_dir=tmp_path / "c", **choice)
    assert handle.element_spec_text == "row: int32[]\npixels: uint8[6]\nvector: float64[3]"
    for shuffle in (False, True, "pool"):
        seen = 0
        for batch in handle.to_tf(global_batch=16, shuffle=shuffle):
            order = batch["row"].numpy()
            seen += len(order)
            np.testing.assert_array_equal(batch["pixels"], pixels[order])
            np.testing.assert_array_equal(batch["vector"], vectors[order])
        assert seen == 40
    (line,) = refused(df, tmp_path / "c", dtypes={"vector": "float32[3]"}, nulls={"pixels": "mask"})
    assert "column 'vector': expected binary values of length 12, got lengths 24 to 24" in line
    assert line.endswith("float32[3] takes 12 bytes; leave its dtype out for texts")
    for wrong in ("uint8", "uint8[*]", "uint8[<=6]", "bool[6]"):
        with pytest.raises(ConfigError, match=r"expected for bytes that are numbers .* 'uint8\[784\]'"):
            from_dataframe(df, cache_dir=tmp_path / "c", features=["pixels"], dtypes={"pixels": wrong})


def test_dates_of_the_old_calendar_are_refused_where_they_lie(spark: SparkSession, tmp_path: Path) -> None:
    """Files that Spark wrote with the calendar before 1582 give Spark's dates through Spark, and no others without."""
    modes = ("spark.sql.parquet.datetimeRebaseModeInWrite", "spark.sql.parquet.int96RebaseModeInWrite")
    for year in (1500, 1600, 1900):
        for mode in modes:
            spark.conf.set(mode, "LEGACY")
        try:
            frame = spark.sql(f"select date'{year}-01-02' d, timestamp'{year}-01-02 00:00:00 UTC' t, {year} n")
            frame.write.parquet(str(tmp_path / str(year)))
        finally:
            for mode in modes:
                spark.conf.unset(mode)
    old = tmp_path / "1500"
    for folder, column in ((old, "d"), (old, "t"), (tmp_path / "1600", "t")):
        with pytest.raises(DataError, match=f"column '{column}': expected dates since 1582-10-15 .* got part-0.*older"):
            from_parquet(folder, features=[column])
    assert read(from_parquet(old, features=["n"])) == {"n": [1500]}
    whole = read(from_dataframe(spark.read.parquet(str(old)), cache_dir=tmp_path / "c"))
    assert whole["d"] == [-171663]  # days to 1500-01-02 of the calendar that goes on backwards, as Python counts
    assert read(from_parquet(tmp_path / "1600", features=["d"])) == {"d": [-135139]}
    recent = read(from_parquet(tmp_path / "1900"))
    assert recent == {"d": [-25566], "t": [-25566 * 86_400_000_000], "n": [1900]}


def test_a_cache_that_cannot_be_made_is_refused_by_its_setting(spark: SparkSession, tmp_path: Path) -> None:
    """A cache folder below a file is a wrong setting, and said so."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache_dir: expected a folder that can be made, got .*below"):
        from_dataframe(spark.range(3), cache_dir=tmp_path / "file" / "below")
