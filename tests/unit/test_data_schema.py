"""Spark types as tensors, null policies and Arrow columns as arrays; no Spark and no TensorFlow."""

from __future__ import annotations

import datetime as dt
import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data import Schema, batch_from_arrow, from_parquet
from tfdist.data.fields import Field
from tfdist.data.manifest import Fragment, Manifest
from tfdist.data.tables import rows_kept
from tfdist.errors import ConfigError, DataError
from tfdist.testing import tiny_parquet

EPOCH = dt.datetime(1970, 1, 1)
ZONE = dt.timezone(dt.timedelta(hours=1))


def make_schema(columns: dict[str, str], **choice: Any) -> Schema:
    return Schema.from_fields([Field(n, t, f"c{i}") for i, (n, t) in enumerate(columns.items())], **choice)


def spark_json(*fields: tuple[str, Any]) -> Any:
    class Struct:
        def jsonValue(self) -> dict[str, Any]:
            raw = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in fields]
            return {"type": "struct", "fields": raw}

    return Struct()


VALUES = [
    ("boolean", pa.bool_(), [True, False, True], "bool", [True, False, True]),
    ("tinyint", pa.int8(), [-128, 0, 127], "int8", [-128, 0, 127]),
    ("smallint", pa.int16(), [-32768, 0, 32767], "int16", [-32768, 0, 32767]),
    ("int", pa.int32(), [-(2**31), 0, 2**31 - 1], "int32", [-(2**31), 0, 2**31 - 1]),
    ("bigint", pa.int64(), [2**53 + 1, 0, -(2**63)], "int64", [2**53 + 1, 0, -(2**63)]),
    ("float", pa.float32(), [0.1, -0.0, 1.5], "float32", np.array([0.1, -0.0, 1.5], np.float32).tolist()),
    ("double", pa.float64(), [16777217.0, 1e300, -0.1], "float64", [16777217.0, 1e300, -0.1]),
    ("decimal(38,20)", pa.decimal128(38, 20), [Decimal("1.25"), Decimal(0), Decimal(-3)], "float64", [1.25, 0, -3]),
    ("string", pa.string(), ["a", "", "ä☃"], "string", [b"a", b"", "ä☃".encode()]),
    ("binary", pa.binary(), [b"\x00\xff", b"", b"z"], "string", [b"\x00\xff", b"", b"z"]),
    (
        "date",
        pa.date32(),
        [dt.date(1, 1, 1), dt.date(1970, 1, 2), dt.date(9999, 12, 31)],
        "int32",
        [-719162, 1, 2932896],
    ),
    (
        "timestamp",
        pa.timestamp("us", "Europe/Berlin"),
        [0, -62135596800000000, 253402300799999999],
        "int64",
        [0, -62135596800000000, 253402300799999999],
    ),
    ("timestamp_ntz", pa.timestamp("ms"), [EPOCH, EPOCH, dt.datetime(1970, 1, 2)], "int64", [0, 0, 86400000000]),
    ("interval day to second", pa.duration("us"), [1, 0, -1], "int64", [1, 0, -1]),
]


@pytest.mark.parametrize(("spark_type", "arrow", "values", "dtype", "wanted"), VALUES, ids=[v[0] for v in VALUES])
def test_values_of_each_type_become_the_tensor_of_the_contract(
    spark_type: str, arrow: pa.DataType, values: list[Any], dtype: str, wanted: list[Any]
) -> None:
    """Each scalar type keeps its values, with nulls beside them too, alone and as an array of fixed length."""
    schema = make_schema({"v": spark_type}, nulls={"v": "mask"}, dtypes={"v": dtype})
    assert schema.tensors[0][:3] == ("v", dtype, ())
    batch = batch_from_arrow(pa.table({"v": pa.array(values, arrow)}), schema)
    assert batch["v"].tolist() == wanted
    assert batch["v"].dtype == (object if dtype == "string" else dtype)
    with_null = batch_from_arrow(pa.table({"v": pa.array([*values, None], arrow)}), schema)
    assert with_null["v"].tolist()[:-1] == wanted
    assert with_null["v"].dtype == batch["v"].dtype
    assert with_null["v_is_null"].tolist() == [False] * len(values) + [True]
    arrays = make_schema({"v": f"array<{spark_type}>"}, dtypes={"v": f"{dtype}[{len(values)}]"})
    batch = batch_from_arrow(pa.table({"v": pa.array([values, values[::-1]], pa.list_(arrow))}), arrays)
    assert batch["v"].tolist() == [wanted, wanted[::-1]]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [(("fill", -1), [1, -1, 9007199254740993]), ("drop", [1, 9007199254740993]), ("mask", [1, 0, 9007199254740993])],
)
def test_a_null_among_large_integers_follows_its_policy_and_leaves_the_others_exact(
    policy: Any, wanted: list[int]
) -> None:
    """bigint 2**53 + 1 beside a null survives fill, drop and mask."""
    table = pa.table({"v": pa.array([1, None, 9007199254740993])})
    schema = make_schema({"v": "bigint"}, nulls={"v": policy})
    batch = batch_from_arrow(table, schema)
    assert batch["v"].tolist() == wanted
    kept = rows_kept(table, schema)
    assert (None if kept is None else kept.tolist()) == ([True, False, True] if policy == "drop" else None)


def test_nulls_without_a_policy_are_an_error_with_column_count_and_fix() -> None:
    """The default policy refuses nulls and says what to do."""
    with pytest.raises(DataError, match=r"'a\.b'.*got 2; say nulls=\{'a\.b': 'drop'\}"):
        batch_from_arrow(pa.table({"a.b": pa.array([1, None, None])}), make_schema({"a.b": "bigint"}))


def test_not_a_number_is_not_a_null() -> None:
    """NaN stays NaN where nulls are filled."""
    schema = make_schema({"v": "double"}, nulls={"v": ("fill", 7.5)})
    batch = batch_from_arrow(pa.table({"v": pa.array([float("nan"), None, 1.0], from_pandas=False)}), schema)
    assert np.isnan(batch["v"][0])
    assert batch["v"].tolist()[1:] == [7.5, 1.0]


def test_missing_texts_and_arrays_are_filled() -> None:
    """Fill works for text, for whole arrays and for values inside them."""
    schema = make_schema(
        {"t": "string", "a": "array<float>", "w": "array<string>"},
        nulls={"t": ("fill", "?"), "a": ("fill", -1), "w": ("fill", "-")},
        dtypes={"a": "float32[2]", "w": "string[2]"},
    )
    table = pa.table({"t": ["x", None], "a": [[1.0, None], None], "w": [["p", None], None]})
    batch = batch_from_arrow(table.set_column(1, "a", table["a"].cast(pa.list_(pa.float32()))), schema)
    assert {k: v.tolist() for k, v in batch.items()} == {
        "t": [b"x", b"?"],
        "a": [[1, -1], [-1, -1]],
        "w": [[b"p", b"-"], [b"-", b"-"]],
    }


@pytest.mark.parametrize(
    ("spark_type", "arrow", "dtype", "fill", "expected"),
    [
        ("binary", pa.binary(), None, b"\xff\x00", b"\xff\x00"),
        ("binary", pa.binary(), None, "é", "é".encode()),
        ("string", pa.string(), None, b"?", b"?"),
        ("date", pa.date32(), None, dt.date(1970, 1, 11), 10),
        ("date", pa.date32(), "float32", dt.date(1969, 12, 31), -1.0),
        (
            "timestamp",
            pa.timestamp("us", "UTC"),
            None,
            dt.datetime(1970, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
            0,
        ),
        ("timestamp_ntz", pa.timestamp("us"), None, dt.datetime(1970, 1, 1, 0, 0, 1, 5), 1_000_005),
        ("decimal(5,2)", pa.decimal128(5, 2), None, Decimal("0.10"), 0.1),
        ("decimal(5,2)", pa.decimal128(5, 2), "scaled int64", Decimal("0.1"), 10),
    ],
)
def test_a_fill_value_may_be_of_the_type_that_the_column_holds(
    spark_type: str, arrow: pa.DataType, dtype: str | None, fill: Any, expected: Any
) -> None:
    """Bytes, dates, times and decimals are filled as the tensor has them, also from a schema that was kept as JSON."""
    schema = make_schema({"v": spark_type}, nulls={"v": ("fill", fill)}, dtypes={"v": dtype} if dtype else None)
    table = pa.table({"v": pa.array([None], arrow)})
    for one in (schema, Schema.from_json(schema.to_json())):
        assert batch_from_arrow(table, one)["v"].tolist() == [expected]


@pytest.mark.parametrize(
    ("spark_type", "dtype", "fill", "words"),
    [
        ("date", None, "2020-01-01", r"int32 \(days since 1970-01-01\), or a date, got '2020-01-01'"),
        ("date", None, dt.datetime(2020, 1, 1), "or a date, got"),
        ("timestamp", None, dt.datetime(2020, 1, 1), "or a datetime with a time zone"),
        ("timestamp_ntz", None, dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), "or a datetime without a time zone"),
        ("decimal(5,2)", "scaled int64", Decimal("0.001"), "type int64"),
        ("int", None, b"1", "type int32"),
        ("binary", None, 1, "type bytes or string"),
    ],
)
def test_a_fill_value_that_the_column_cannot_hold_is_refused(
    spark_type: str, dtype: str | None, fill: Any, words: str
) -> None:
    """Texts for dates, times without the zone that they need, lost digits: the message says what is taken."""
    with pytest.raises(ConfigError, match=f"expected a fill value of .*{words}"):
        make_schema({"v": spark_type}, nulls={"v": ("fill", fill)}, dtypes={"v": dtype} if dtype else None)


@pytest.mark.parametrize("tail", [3, 5])
def test_an_array_of_another_length_is_named_with_its_row(tail: int) -> None:
    """A row of another length than the schema's is an error with column, row and both lengths."""
    schema = make_schema({"v": "array<double>"}, dtypes={"v": "float64[4]"})
    rows = pa.table({"v": [[0.0] * 4, [0.0] * tail]})
    with pytest.raises(DataError, match=f"'v': expected arrays of length 4, got {tail} in row 1"):
        batch_from_arrow(rows, schema)


def test_shorter_arrays_are_padded_to_the_declared_length() -> None:
    """Zeros, the empty text or the fill value come after the values; a longer array is an error with its row."""
    schema = make_schema(
        {"a": "array<int>", "w": "array<string>", "f": "array<float>"},
        nulls={"f": ("fill", -1.0)},
        dtypes={"a": "int32[<=3]", "w": "string[<=2]", "f": "float32[<=2]"},
    )
    assert schema.describe().splitlines() == ["a: int32[3]", "w: string[2]", "f: float32[2]"]
    table = pa.table(
        {
            "a": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32())),
            "w": pa.array([["p"], [], ["q", "r"]], pa.list_(pa.string())),
            "f": pa.array([None, [2.0, None], [3.0]], pa.list_(pa.float32())),
        }
    )
    batch = batch_from_arrow(table, schema)
    assert {name: np.asarray(values).tolist() for name, values in batch.items()} == {
        "a": [[1, 2, 3], [0, 0, 0], [4, 0, 0]],
        "w": [[b"p", b""], [b"", b""], [b"q", b"r"]],
        "f": [[-1, -1], [2, -1], [3, -1]],
    }
    long = table.set_column(0, "a", pa.array([[1], [1, 2, 3, 4], []], pa.list_(pa.int32())))
    with pytest.raises(DataError, match="'a': expected at most 3 values in its arrays, got 4 in row 1"):
        batch_from_arrow(long, schema)


def test_columns_are_packed_to_a_matrix() -> None:
    """Features of one dtype become [rows, features] in the order given, masks and other columns stay by themselves."""
    schema = make_schema(
        {"a": "float", "k": "string", "b": "double", "y": "int", "c": "float"},
        label="y",
        nulls={"a": "mask", "c": ("fill", 9.0)},
        dtypes={"b": "float32"},
        pack={"x": ["c", "a", "b"]},
    )
    assert schema.describe().splitlines() == ["a_is_null: bool[]", "k: string[]", "x: float32[3]", "label y: int32[]"]
    assert Schema.from_json(schema.to_json()) == schema
    rows = 1300
    numbers = np.arange(rows, dtype=np.float32)
    table = pa.table({"b": numbers.astype("float64") + 0.5, "a": pa.array([None, *numbers[1:].tolist()], pa.float32())})
    table = table.append_column("c", pa.array([*(-numbers[:-1]).tolist(), None], pa.float32()))
    batch = batch_from_arrow(table.append_column("k", pa.array(["t"] * rows)), schema)
    wanted = np.stack([[*-numbers[:-1], 9.0], numbers, numbers + 0.5], axis=1)
    np.testing.assert_array_equal(np.asarray(batch["x"]), wanted)
    assert list(batch) == ["a_is_null", "k", "x"]


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        ({"x": ["a", "bb"]}, "got 'bb'; did you mean 'b'"),
        ({"x": ["a", "y"]}, "expected features, got 'y'"),
        ({"x": ["a", "t"]}, "expected single numbers, got column 't' of type string"),
        ({"x": ["a", "d"]}, "1 of float32, 1 of float64; cast them"),
        ({"x": []}, "at least one column"),
        ({"d": ["a", "b"]}, "another tensor has this name"),
        ({"x": ["a"], "z": ["b", "a"]}, "column 'a' is packed 2 times"),
    ],
)
def test_a_pack_that_makes_no_sense_is_refused(pack: dict[str, list[str]], words: str) -> None:
    """Each wrong pack is refused with the pack's name and what to change."""
    with pytest.raises(ConfigError, match=words):
        make_schema({"a": "float", "b": "float", "d": "double", "t": "string", "y": "int"}, label="y", pack=pack)


def test_a_scaled_decimal_keeps_all_digits() -> None:
    """ "scaled int64" is the number of units of the last digit, exactly, with nulls filled; 19 digits are refused."""
    values = [Decimal("9999999999999999.99"), Decimal("-0.01"), None, Decimal("1.20")]
    schema = make_schema({"m": "decimal(18,2)"}, nulls={"m": ("fill", -7)}, dtypes={"m": "scaled int64"})
    batch = batch_from_arrow(pa.table({"m": pa.array(values, pa.decimal128(18, 2))}).slice(0), schema)
    assert batch["m"].tolist() == [999999999999999999, -1, -7, 120]
    assert batch_from_arrow(pa.table({"m": pa.array(values, pa.decimal128(18, 2))[1:]}), schema)["m"].tolist() == [
        -1,
        -7,
        120,
    ]
    with pytest.raises(ConfigError, match="int64 holds 18 digits; use 'string'"):
        make_schema({"m": "decimal(19,2)"}, dtypes={"m": "scaled int64"})
    with pytest.raises(ConfigError, match="only decimals are scaled"):
        make_schema({"m": "double"}, dtypes={"m": "scaled int64"})


def test_casts_are_explicit_and_checked() -> None:
    """A dtype casts, text from numbers included; values that do not fit are refused, not wrapped."""
    schema = make_schema(
        {"a": "double", "b": "bigint", "c": "decimal(38,2)"}, dtypes={"a": "float32", "b": "int8", "c": "string"}
    )
    table = pa.table(
        {"a": [0.1], "b": [100], "c": pa.array([Decimal("12345678901234567890.12")], pa.decimal128(38, 2))}
    )
    batch = batch_from_arrow(table, schema)
    assert batch["a"].dtype == np.float32
    assert batch["b"].dtype == np.int8
    assert batch["c"].tolist() == [b"12345678901234567890.12"]
    with pytest.raises(DataError, match="'b': expected values that fit int8, got 1 that do not, for example 300"):
        batch_from_arrow(pa.table({"a": [0.1, 1], "b": [0, 300], "c": table["c"].take([0, 0])}), schema)
    with pytest.raises(
        DataError, match="'b': expected values of the Spark type bigint, got Arrow values of type string"
    ):
        batch_from_arrow(pa.table({"a": [0.1], "b": ["1"], "c": table["c"]}), schema)


REFUSED = [
    ({"type": "map", "keyType": "string", "valueType": "float", "valueContainsNull": True}, "map<string,float>", "key"),
    ({"type": "struct", "fields": []}, "struct<>", "features"),
    (
        {"type": "array", "elementType": {"type": "struct", "fields": [{"name": "x", "type": "long"}]}},
        "array<struct<x:bigint>>",
        "col.field",
    ),
    ("variant", "variant", "variant_get"),
    ("void", "void", "features"),
    (
        {"type": "array", "elementType": {"type": "array", "elementType": {"type": "array", "elementType": "long"}}},
        "array<array<array<bigint>>>",
        "flatten",
    ),
]


@pytest.mark.parametrize(("kind", "name", "way"), REFUSED, ids=[r[1] for r in REFUSED])
def test_types_without_a_tensor_are_refused_by_name_with_a_way_out(kind: Any, name: str, way: str) -> None:
    """The refusal names column and Spark type, and what to do instead."""
    with pytest.raises(DataError) as caught:
        Schema.from_spark(spark_json(("m n", kind)))
    assert all(text in str(caught.value) for text in ("'m n'", name, way))


def test_spark_json_types_are_understood() -> None:
    """Names of JSON types, vectors and their size from the metadata, strings with a length or collation."""
    vector = {"type": "udt", "class": "org.apache.spark.ml.linalg.VectorUDT", "sqlType": {}}
    struct = spark_json(
        ("v", vector), ("s", "varchar(3)"), ("i", "integer"), ("a", {"type": "array", "elementType": "byte"})
    )
    raw = struct.jsonValue()
    raw["fields"][0]["metadata"] = {"ml_attr": {"num_attrs": 4}}
    struct.jsonValue = lambda: raw
    schema = Schema.from_spark(struct)
    assert [tuple(t)[:3] for t in schema.tensors] == [
        ("v", "float64", (4,)),
        ("s", "string", ()),
        ("i", "int32", ()),
        ("a", "int8", (None,)),
    ]


def test_structs_are_dicts_or_single_columns_by_dotted_names() -> None:
    """A struct as a whole lies in nested dicts, a field named with its struct by itself; a lost name is refused."""
    inner = {"type": "struct", "fields": [{"name": "z.z", "type": "string", "nullable": True}]}
    kind = {
        "type": "struct",
        "fields": [{"name": "x", "type": "long", "nullable": False}, {"name": "in", "type": inner}],
    }
    kind["fields"][1]["nullable"] = False
    fields = spark_json(("s", kind), ("y", "float"))
    whole = Schema.from_spark(fields, label="y", nulls={"s.in.z.z": "mask"})
    assert whole.describe().splitlines() == [
        "s.x: int64[]",
        "s.in.z.z: string[]",
        "s.in.z.z_is_null: bool[]",
        "label y: float32[]",
    ]
    numbers = {t.name: i for i, t in enumerate(whole.inputs)}
    assert whole.as_batch(numbers) == {"s": {"x": 0, "in": {"z.z": 1, "z.z_is_null": 2}}}
    assert Schema.from_json(whole.to_json()) == whole
    part = Schema.from_spark(fields, features=["s.x", "s.in"], label="y")
    assert part.as_batch({"s.x": 0, "s.in.z.z": 1}) == {"s.x": 0, "s": {"in": {"z.z": 1}}}
    assert Schema.from_spark(fields, features=["y"], label="s.x").label == "s.x"
    with pytest.raises(DataError, match=r"did you mean 's\.x'"):
        Schema.from_spark(fields, features=["s.X"])
    with pytest.raises(DataError, match="2 columns have this name"):
        Schema.from_spark(spark_json(("s", kind), ("s.x", "float")))


def test_all_problems_of_a_schema_are_told_together() -> None:
    """Unknown columns with the nearest name, unknown policies, wrong fills: one error."""
    with pytest.raises(DataError) as caught:
        make_schema({"carrier": "string", "n": "int"}, features=["carier", "n"], nulls={"n": ("fill", 2.5)})
    assert "did you mean 'carrier'" in str(caught.value)
    assert "nulls['n']: expected a fill value of type int32, got 2.5" in str(caught.value)
    with pytest.raises(DataError, match=r"'label_b'.*did you mean 'Label_B'"):
        make_schema({"label_a": "int", "Label_B": "int"}, label="label_b")
    with pytest.raises(ConfigError) as wrong:
        make_schema({"a": "int", "b": "string"}, nulls={"a": "ignore"}, dtypes={"b": "int32"})
    assert len(wrong.value.problems) == 2


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"features": ["a", "y"], "label": "y"}, "is the label"),
        ({"features": ["a", "a"]}, "named 2 times"),
        ({"features": []}, "at least one column"),
        ({"label": "y", "nulls": {"y": "mask"}}, "a label has no mask"),
        ({"nulls": {"a": "mask"}}, "rename that column"),
        ({"nulls": {"z": "drop"}}, "got 'z'"),
        ({"dtypes": {"a": "float31"}}, "did you mean 'float32'"),
        ({"dtypes": {"a": "int32[3]"}}, "no length"),
        ({"dtypes": {"a": "int32[*]"}}, "no length"),
        ({"dtypes": {"v": "int32[0]"}}, "at least 1"),
        ({"nulls": {"a": ("fill", 2**31)}}, "type int32"),
        ({"nulls": {"a": ("fill", 1e39)}, "dtypes": {"a": "float32"}}, "type float32"),
        ({"nulls": {"a": ("fill", 10**400)}, "dtypes": {"a": "float64"}}, "type float64"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choice: dict[str, Any], words: str) -> None:
    """Each wrong argument is refused in words that say what is wrong."""
    with pytest.raises(ConfigError, match=words):
        make_schema({"a": "int", "a_is_null": "boolean", "v": "array<int>", "y": "int"}, **choice)


def test_a_duplicate_name_is_refused_only_when_it_is_chosen() -> None:
    """Two columns of one name cannot be told apart; names that differ in case can."""
    fields = [Field("a", "int", "c0"), Field("a", "int", "c1"), Field("A", "int", "c2")]
    with pytest.raises(DataError, match="'a': 2 columns have this name"):
        Schema.from_fields(fields)
    assert Schema.from_fields(fields, features=["A"]).features == ("A",)


def test_a_long_decimal_warns_and_an_explicit_dtype_does_not(recwarn: pytest.WarningsRecorder) -> None:
    """decimal(38,20) as float64 loses digits: said with the column's name unless it was asked for."""
    with pytest.warns(UserWarning, match=r"'m'.*decimal\(38,20\)"):
        make_schema({"m": "decimal(38,20)"})
    make_schema({"m": "decimal(38,20)", "n": "decimal(15,2)"}, dtypes={"m": "float64"})
    assert not recwarn.list


NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True)


@given(NAMES, st.sampled_from([v[0] for v in VALUES]), st.sampled_from(["error", "drop", "mask"]))
def test_schema_and_manifest_survive_json(names: list[str], spark_type: str, policy: str) -> None:
    """What is written reads back equal, whatever the names."""
    fields = [Field(n, spark_type, f"c{i}") for i, n in enumerate(names)]
    choice: dict[str, Any] = {"nulls": {names[0]: policy}, "dtypes": {}}
    if "decimal" in spark_type:
        choice["dtypes"] = dict.fromkeys(names, "float64")
    if any(f"{names[0]}_is_null" == n for n in names):
        choice["nulls"] = {}
    schema = Schema.from_fields(fields, **choice)
    assert Schema.from_json(schema.to_json()) == schema
    manifest = Manifest("/d", (Fragment("p", (3, 4), 99),), schema, "ab", 8, {names[0]: 1}, 2)
    assert Manifest.from_json(manifest.to_json(), "/d") == manifest
    assert manifest.rows == 7


def test_a_handle_is_small_and_unpickles_without_pyspark_and_tensorflow(tmp_path: Path) -> None:
    """A pickled handle opens in a process that imports neither, and says rows, steps and spec."""
    handle = tiny_parquet(tmp_path, 100)
    raw = pickle.dumps(handle)
    assert len(raw) < 4000
    code = (
        "import sys, pickle; h = pickle.load(sys.stdin.buffer); print(h.rows, h.steps(32), h.schema.label)\n"
        "print(h.element_spec_text); assert not {'tensorflow', 'pyspark', 'keras'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=raw, capture_output=True, check=True)
    assert done.stdout.decode().splitlines()[0] == "100 4 label"
    assert "kind: string[]" in done.stdout.decode()


def test_parquet_files_are_read_as_they_lie(tmp_path: Path) -> None:
    """Footers give rows, fixed array lengths and nulls; names with dots and folders of several files work."""
    for i in range(2):
        table = pa.table({"a.b": [1.0, 2.0, 3.0], "v": [[1, 2]] * 3, "n": [1, None, 3]})
        pq.write_table(table, tmp_path / f"part-{i}.parquet", row_group_size=2)
    with pytest.raises(DataError, match="'n': expected no nulls, got 2"):
        from_parquet(tmp_path)
    with pytest.raises(DataError, match="cannot be dropped"):
        from_parquet(tmp_path, nulls={"n": "drop"})
    handle = from_parquet(str(tmp_path), nulls={"n": "mask"}, label="a.b")
    assert handle.rows == 6
    assert [f.row_groups for f in handle.manifest.fragments] == [(2, 1), (2, 1)]
    assert handle.element_spec_text == "v: int64[2]\nn: int64[]\nn_is_null: bool[]\nlabel a.b: float64[]"
    assert from_parquet(tmp_path, features=["v"]).manifest.fingerprint == handle.manifest.fingerprint


def test_what_is_no_parquet_data_is_refused_with_the_place(tmp_path: Path) -> None:
    """Nothing there, no files, a damaged file, partition folders, files that disagree."""
    with pytest.raises(DataError, match="found nothing"):
        from_parquet(tmp_path / "no")
    with pytest.raises(DataError, match="found none"):
        from_parquet(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet: expected a Parquet file"):
        from_parquet(tmp_path)
    (tmp_path / "bad.parquet").unlink()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"a": [1.5]}), tmp_path / "two.parquet")
    with pytest.raises(DataError, match=r"'a': expected int64 in every file as in one\.parquet, got double in two"):
        from_parquet(tmp_path)
    (tmp_path / "k=1").mkdir()
    (tmp_path / "two.parquet").rename(tmp_path / "k=1" / "two.parquet")
    with pytest.raises(DataError, match="partitioned"):
        from_parquet(tmp_path)
