"""What callers say of columns, and casts and lengths that are right for every value; no Spark and no TensorFlow."""

from __future__ import annotations

import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tfdist.data import Schema, batch_from_arrow, from_dataframe, from_parquet, lengths
from tfdist.data.arrow import values_of
from tfdist.data.fields import Field
from tfdist.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"features": "si"}, r"features: expected a list of column names, got 'si'; say \['si'\]"),
        ({"features": 3}, "features: expected a list of column names, got 3"),
        ({"features": ["a", 3]}, "features: expected column names, got 3"),
        ({"label": ["a"]}, r"label: expected the name of a column, got \['a'\]"),
        ({"nulls": "drop"}, "nulls: expected a dict such as {'column': 'drop'}, got 'drop'"),
        ({"dtypes": "float32"}, "dtypes: expected a dict such as {'column': 'float32'}, got 'float32'"),
        ({"dtypes": {"a": np.float32}}, r"dtypes\['a'\]: expected a text such as 'float32', got builtins.type"),
        ({"pack": ["a", "b"]}, "pack: expected a dict such as"),
        ({"pack": {"x": "ab"}}, r"pack\['x'\]: expected a list of column names, got 'ab'"),
    ],
)
def test_an_argument_of_another_form_is_refused(choice: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A text in place of a list or a dict, and other forms, are told with what was expected, in both ways in."""
    pq.write_table(pa.table({"a": [1], "b": [2], "s": ["x"], "i": [3]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=words):
        from_parquet(tmp_path, **choice)
    with pytest.raises(ConfigError, match=words):
        Schema.from_fields([Field(name, "int", name) for name in "absi"], **choice)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (pd.DataFrame({"a": [1]}), r"got pandas.*DataFrame; make one with spark\.createDataFrame"),
        (pa.table({"a": [1]}), r"got pyarrow.*Table; make one with spark\.createDataFrame"),
        ("/data/rows", r"got '/data/rows'; say from_dataframe\(spark\.read\.parquet\(path\)\)"),
        (None, r"got builtins\.NoneType; select the rows with a Spark session"),
    ],
)
def test_rows_that_are_no_spark_frame_are_refused(rows: Any, words: str) -> None:
    """from_dataframe of a pandas frame, an Arrow table, a path or nothing says how to get a Spark DataFrame."""
    with pytest.raises(ConfigError, match=f"df: expected a Spark DataFrame, {words}"):
        from_dataframe(rows)


def test_a_warning_points_at_the_line_of_the_user(tmp_path: Path) -> None:
    """The warning of a long decimal has the file and line of the call into tfdist, however deep it arose."""
    pq.write_table(pa.table({"m": pa.array([Decimal(1)], pa.decimal128(38, 20))}), tmp_path / "a.parquet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_parquet(tmp_path)
        Schema.from_fields([Field("m", "decimal(38,20)", "c0")])
    assert [w.filename for w in caught] == [__file__] * 2
    assert caught[0].lineno == caught[1].lineno - 1


def cast(values: list[Any], arrow: pa.DataType, spark_type: str, dtype: str) -> np.ndarray:
    schema = Schema.from_fields([Field("v", spark_type, "c0")], dtypes={"v": dtype}, nulls={"v": ("fill", 7)})
    return batch_from_arrow(pa.table({"v": pa.array(values, arrow)}), schema)["v"]


def test_decimals_become_whole_numbers_exactly() -> None:
    """decimal to int64 and uint64 keeps all digits beyond 2**53; a fraction or a value out of range is refused."""
    kind = pa.decimal128(38, 2)
    assert cast([Decimal(2**53 + 1), None, Decimal(-3)], kind, "decimal(38,2)", "int64").tolist() == [2**53 + 1, 7, -3]
    assert cast([Decimal(2**64 - 1)], kind, "decimal(38,2)", "uint64").tolist() == [2**64 - 1]
    for value, dtype in ((Decimal("1.50"), "int64"), (Decimal(2**63), "int64"), (Decimal(-1), "uint8")):
        words = (
            f"'v': expected whole numbers that fit {dtype}, got 1 that do not, for example {value}.*; choose 'scaled"
        )
        with pytest.raises(DataError, match=words):
            cast([Decimal(1), value], kind, "decimal(38,2)", dtype)


@pytest.mark.parametrize(("arrow", "spark_type"), [(pa.float64(), "double"), (pa.float32(), "float")])
def test_floats_become_whole_numbers_only_where_they_are(arrow: pa.DataType, spark_type: str) -> None:
    """A fraction is counted with an example, as are NaN, infinity and the first number beyond the dtype's range."""
    assert cast([1.0, None, -128.0, 127.0], arrow, spark_type, "int8").tolist() == [1, 7, -128, 127]
    assert cast([2.0**63 - 2**40], arrow, spark_type, "int64").tolist() == [2**63 - 2**40]
    with pytest.raises(
        DataError,
        match=r"'v': expected whole numbers that fit int64, got 2 that do not, for example 1\.5; round",
    ):
        cast([1.0, 1.5, None, -0.25], arrow, spark_type, "int64")
    for value, dtype in (
        (2.0**63, "int64"),
        (-1.0, "uint8"),
        (128.0, "int8"),
        (float("nan"), "int8"),
        (-np.inf, "int8"),
    ):
        with pytest.raises(DataError, match=f"expected whole numbers that fit {dtype}, got 1 that do not"):
            cast([1.0, value], arrow, spark_type, dtype)


def test_a_finite_number_never_becomes_infinite() -> None:
    """float64 to float32 and whole numbers to float16 refuse what would be infinite; NaN and infinity stay."""
    largest = float(np.finfo(np.float32).max)
    got = cast([largest, float("inf"), float("nan"), 3.4028235677973362e38], pa.float64(), "double", "float32")
    assert np.isfinite(got).tolist() == [True, False, False, True]
    with pytest.raises(
        DataError, match=r"'v': expected values that fit float32, got 2 that do not, for example 1e\+39"
    ):
        cast([1.0, 1e39, float("inf"), -1e39], pa.float64(), "double", "float32")
    with pytest.raises(DataError, match="expected values that fit float16, got 1 that do not, for example 70000"):
        cast([1, 70000], pa.int64(), "bigint", "float16")


def write(folder: Path, *files: list[Any], **options: Any) -> Path:
    folder.mkdir()
    for i, rows in enumerate(files):
        lists = pa.list_(pa.int32())
        structs = pa.array([{"w": row} for row in rows], pa.struct([("w", lists)]))
        table = pa.table({"v": pa.array(rows, lists), "s": structs})
        pq.write_table(table, folder / f"{i}.parquet", **options)
    return folder


def test_the_length_of_lists_is_read_not_guessed(tmp_path: Path) -> None:
    """Lists of one length are dense, uneven ones whose average is even are ragged, missing lists do not count."""
    uneven = write(tmp_path / "a", [[1, 2], [3, 4]], [[1], [2, 3, 4]], row_group_size=1)
    assert from_parquet(uneven).element_spec_text == "v: int32[*]\ns.w: int32[*]"
    even = write(tmp_path / "b", [[1, 2, 3], None, [4, 5, 6]], [None], row_group_size=1)
    nulls = {"v": "mask", "s.w": ("fill", 0)}
    handle = from_parquet(even, nulls=nulls)
    assert handle.element_spec_text == "v: int32[3]\nv_is_null: bool[]\ns.w: int32[3]"
    (batch,) = handle.to_tf(global_batch=4, shuffle=False)
    assert batch["v"].numpy().tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6], [0, 0, 0]]
    empty = write(tmp_path / "c", [[], []])
    assert from_parquet(empty, features=["v"]).element_spec_text == "v: int32[*]"
    assert from_parquet(write(tmp_path / "d", []), features=["v"]).element_spec_text == "v: int32[1]"


def test_lists_are_read_once_and_only_where_nothing_is_declared(tmp_path: Path) -> None:
    """A declared layout opens lists that cannot be decoded; without one they are read, and anew when a file changes."""
    folder = write(tmp_path / "a", [[1, 2]] * 500, compression="none", use_dictionary=False)
    file = folder / "0.parquet"
    whole = file.read_bytes()
    start = pq.read_metadata(file).row_group(0).column(0).data_page_offset
    file.write_bytes(whole[:start] + b"\xff" * 20 + whole[start + 20 :])
    for declared, shape in (("int32[2]", "2"), ("int32[<=3]", "3"), ("int32[*]", "*")):
        handle = from_parquet(folder, features=["v"], dtypes={"v": declared})
        assert handle.element_spec_text == f"v: int32[{shape}]"
    with pytest.raises((OSError, DataError)):
        from_parquet(folder, features=["v"])
    file.write_bytes(whole)
    assert from_parquet(folder, features=["v"]).element_spec_text == "v: int32[2]"
    known = dict(lengths._remembered)
    assert from_parquet(folder, features=["v"]).element_spec_text == "v: int32[2]"
    assert lengths._remembered == known
    write(tmp_path / "b", [[1], [2, 3, 4]])
    (tmp_path / "b" / "0.parquet").replace(file)
    assert from_parquet(folder, features=["v"]).element_spec_text == "v: int32[*]"


def test_an_index_that_pandas_left_is_no_feature(tmp_path: Path) -> None:
    """A frame that was filtered before it was written gives its columns alone; its index is there when it is named."""
    pd.DataFrame({"a": [1, 2, 3]}).query("a > 1").to_parquet(tmp_path / "a.parquet")
    assert from_parquet(tmp_path).element_spec_text == "a: int64[]"
    assert from_parquet(tmp_path, features=["__index_level_0__"]).element_spec_text == "__index_level_0__: int64[]"


def test_folders_that_cannot_be_made_are_refused_by_their_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder below a file is a wrong setting, told before anything is read."""
    (tmp_path / "file").touch()
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    monkeypatch.setenv("TFDIST_LOCAL_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="TFDIST_LOCAL_DIR: expected a folder that can be made"):
        from_parquet(tmp_path / "a.parquet").to_tf(global_batch=1)
    monkeypatch.setenv("TFDIST_LOCAL_DIR", str(tmp_path / "new"))
    assert len(list(from_parquet(tmp_path / "a.parquet").to_tf(global_batch=1))) == 2


def test_bytes_of_files_are_numbers_where_a_dtype_says_so(tmp_path: Path) -> None:
    """Row groups whose bytes begin anywhere give aligned numbers; another length is told with its row."""
    vectors = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    content = pa.array([None, *(v.tobytes() for v in vectors)], pa.binary())[1:]
    pq.write_table(pa.table({"v": content}), tmp_path / "a.parquet", row_group_size=7)
    handle = from_parquet(tmp_path, dtypes={"v": "float32[2]"})
    (batch,) = handle.to_tf(global_batch=50, shuffle=False)
    np.testing.assert_array_equal(batch["v"], vectors)
    (column,) = handle.manifest.schema.columns
    odd = pa.Array.from_buffers(
        pa.binary(), 1, [None, pa.py_buffer(np.int32([1, 9])), pa.py_buffer(b"x" + vectors[0].tobytes())]
    )
    (values,) = values_of(odd, column)
    assert isinstance(values, np.ndarray)
    assert values.flags.aligned
    np.testing.assert_array_equal(values, vectors[:1])
    with pytest.raises(DataError, match=r"'v': expected 12 bytes for float32\[3\], got 8 in row 0"):
        values_of(odd, replace(column, shape=(3,)))
