"""Vectors of which only the values that are not 0 are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data import Schema, batch_from_arrow
from tfdist.data.fields import Field
from tfdist.data.sparse import Sparse, dense_of_entries, entries_of_dense
from tfdist.data.values import Ragged, gathered, joined, part
from tfdist.errors import ConfigError, DataError

MATRIX = [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0], [-2.0, 0.0, 3.0]]
STORED = pa.struct({"size": pa.int32(), "entries": pa.list_(pa.struct({"place": pa.int32(), "value": pa.float64()}))})


def make_schema(wanted: str, **choice: Any) -> Schema:
    return Schema.from_fields([Field("v", "vector", "c0", length=3)], dtypes={"v": wanted}, **choice)


def as_stored(rows: list[list[float] | None], size: int = 3) -> pa.Array:
    """Vectors as they lie in files."""
    stored = [
        None if row is None else {"size": size, "entries": [{"place": i, "value": v} for i, v in enumerate(row) if v]}
        for row in rows
    ]
    return pa.array(stored, STORED)


def dense(rows: Any) -> list[list[float]]:
    matrix = np.zeros(rows.shape, rows.values.dtype)
    matrix[tuple(rows.indices.T)] = rows.values
    return matrix.tolist()


@given(st.lists(st.lists(st.sampled_from([0.0, 0.0, -1.5, 2.0]), min_size=4, max_size=4), min_size=1), st.data())
def test_rows_of_entries_behave_like_rows(rows: list[list[float]], data: st.DataObject) -> None:
    """Any part, any joining and any choice of rows of entries is that of the matrix."""
    matrix = np.array(rows)
    places = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1))), np.int64)
    cut = data.draw(st.integers(0, len(rows)))
    entries = entries_of_dense(matrix)

    def back(made: Any) -> Any:
        assert isinstance(made, Ragged)
        return dense_of_entries(made, 4).tolist()

    assert back(entries) == rows
    assert back(gathered(entries, places)) == matrix[places].tolist()
    assert back(joined([part(entries, 0, cut), part(entries, cut, len(rows))])) == rows


@pytest.mark.parametrize("given_as", ["entries", "arrays"])
def test_stored_entries_and_arrays_become_either_tensor(given_as: str) -> None:
    """What was written sparse is read dense and the other way round, cast, missing vectors by their policy."""
    rows = [*MATRIX, None]
    array = as_stored(rows) if given_as == "entries" else pa.array(rows, pa.list_(pa.float64()))
    for table in (pa.table({"v": array}), pa.table({"v": pa.concat_arrays([array, array])}).slice(4)):
        batch = batch_from_arrow(table, make_schema("sparse float32", nulls={"v": "mask"}))
        got = batch["v"]
        assert isinstance(got, Sparse)
        assert (got.values.dtype, got.indices.tolist()) == (np.dtype("float32"), [[0, 1], [2, 0], [2, 2]])
        assert dense(got) == [*MATRIX, [0, 0, 0]]
        assert np.asarray(batch["v_is_null"]).tolist() == [False] * 3 + [True]
        plain = batch_from_arrow(table, make_schema("float64", nulls={"v": ("fill", 7.0)}))
        assert np.asarray(plain["v"]).tolist() == [*MATRIX, [7, 7, 7]]


def test_vectors_of_another_size_and_values_that_do_not_fit_are_refused() -> None:
    """A vector of another size is named with its row, a value that the dtype does not hold with an example."""
    two_sizes = pa.concat_arrays([as_stored(MATRIX), as_stored([[1.0]], 4)])
    with pytest.raises(DataError, match="'v': expected vectors of size 3, got one of 4 in row 3"):
        batch_from_arrow(pa.table({"v": two_sizes}), make_schema("sparse float64"))
    with pytest.raises(DataError, match=r"'v': expected whole numbers that fit int64, got 1 that do not, .* 1\.5"):
        batch_from_arrow(pa.table({"v": as_stored(MATRIX)}), make_schema("sparse int64"))


def test_a_sparse_choice_is_told_and_survives_json() -> None:
    """The element spec says sparse, the declaration gives the same column again, and so does JSON."""
    schema = make_schema("sparse float32")
    assert schema.describe() == "v: sparse float32[3]"
    assert make_schema(schema.column("v").declared) == schema
    assert Schema.from_json(schema.to_json()) == schema
    (made,) = schema.keras_inputs().values()
    assert (made.shape, made.sparse) == ((None, 3), True)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"dtypes": {"a": "sparse float32"}}, r"dtypes\['a'\]: expected a vector of Spark ML .*array_to_vector"),
        ({"dtypes": {"v": "sparse float32[<=4]"}}, r"dtypes\['v'\]: expected one length of a sparse tensor"),
        ({"dtypes": {"v": "sparse"}}, "did you mean 'sparse float64'"),
        ({"dtypes": {"v": "sparse string"}}, r"dtypes\['v'\]: vector cannot be cast to sparse string"),
        ({"dtypes": {"v": "sparse float32"}, "nulls": {"v": ("fill", 1.0)}}, r"nulls\['v'\]: expected \('fill', 0\)"),
        ({"dtypes": {"v": "sparse float32"}, "label": "v"}, r"dtypes\['v'\]: a label is dense"),
        ({"dtypes": {"v": "sparse float32"}, "pack": {"x": ["v"]}}, "expected single numbers, got column 'v'"),
    ],
)
def test_sparse_choices_that_make_no_sense_are_refused(choice: dict[str, Any], words: str) -> None:
    """Each refusal names the column and what to do."""
    with pytest.raises(ConfigError, match=words):
        Schema.from_fields([Field("v", "vector", "c0"), Field("a", "array<double>", "c1")], **choice)
