"""Vectors of Spark ML as sparse tensors: written, read in every order, trained on and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

import tfdist
from tfdist.data import Handle, from_dataframe, from_parquet
from tfdist.errors import DataError
from tfdist.testing import as_worker

ROWS, SIZE = 203, 9


def make_matrix() -> np.ndarray:
    """Mostly zeros; each row has its own number in front, so row 0 has a zero there, and row 7 has zeros only."""
    rng = np.random.default_rng(1)
    matrix = np.where(rng.random((ROWS, SIZE)) < 0.3, rng.integers(1, 9, (ROWS, SIZE)), 0).astype("float64")
    matrix[:, 0] = np.arange(ROWS) / 64
    matrix[7] = 0
    return matrix


MATRIX = make_matrix()
LABELS = MATRIX @ np.linspace(-1, 1, SIZE)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """Dense and sparse vectors, one of them with a zero as an entry; in one partition."""
    rows = []
    for i, (row, label) in enumerate(zip(MATRIX, LABELS, strict=True)):
        places = [*np.nonzero(row)[0].tolist(), *([8] if row[8] == 0 else [])]
        vector = Vectors.sparse(SIZE, places, row[places].tolist()) if i % 3 else Vectors.dense(row.tolist())
        rows.append((i, vector, float(label)))
    return spark.createDataFrame(rows, ["i", "v", "y"]).coalesce(1)


@pytest.fixture(scope="module")
def handle(df: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Handle:
    return from_dataframe(
        df,
        cache_dir=tmp_path_factory.mktemp("cache"),
        label="y",
        dtypes={"v": "sparse float32", "y": "float32"},
        row_group_rows=40,
    )


def dense_rows(batches: Any) -> tuple[list[int], list[list[float]]]:
    import tensorflow as tf

    numbers, rows = [], []
    for features, _ in batches:
        assert isinstance(features["v"], tf.SparseTensor)
        assert np.all(features["v"].values != 0)
        numbers += features["i"].numpy().tolist()
        rows += tf.sparse.to_dense(features["v"]).numpy().tolist()
    return numbers, rows


@pytest.mark.parametrize(("shuffle", "world"), [(False, 1), (True, 1), (True, 3), ("pool", 2)])
def test_sparse_rows_stay_whole_in_every_order(handle: Handle, shuffle: Any, world: int) -> None:
    """Entries follow their row through shuffling, the disk, shares and the smaller last batch, in both epochs."""
    assert handle.element_spec_text == "i: int64[]\nv: sparse float32[9]\nlabel y: float32[]"
    for repeat in (False, True):
        read = []
        for rank in range(world):
            with as_worker(rank, world):
                batches = handle.to_tf(global_batch=30, shuffle=shuffle, repeat=repeat)
                assert batches.element_spec == handle.element_spec
                steps = handle.steps(30)
                both = [batches.take(2 * steps)] if repeat else [batches, batches]
                for numbers, rows in map(dense_rows, both):
                    assert rows == MATRIX[numbers].tolist()
                    read += numbers
        assert sorted(read) == sorted([*range(ROWS)] * 2)


def test_only_entries_are_written(handle: Handle, df: DataFrame, tmp_path: Path) -> None:
    """A vector of a million places takes the room of its entries, in the file and in what is planned in memory."""
    session = df.sparkSession
    wide = session.createDataFrame([(Vectors.sparse(10**6, [3, 10**6 - 1], [1.0, float("nan")]),)] * 3, ["v"])
    made = from_dataframe(wide.coalesce(1), cache_dir=tmp_path, dtypes={"v": "sparse float64"})
    assert made.manifest.row_bytes < 100
    assert sum(f.size_bytes for f in made.manifest.fragments) < 10_000
    (batch,) = made.to_tf(global_batch=3)
    assert batch["v"].shape == (3, 10**6)
    assert batch["v"].indices.numpy().tolist() == [[i, place] for i in range(3) for place in (3, 10**6 - 1)]
    assert str(batch["v"].values.numpy().tolist()) == str([1.0, float("nan")] * 3)
    assert from_parquet(made.root).schema == made.schema
    assert from_parquet(made.root, dtypes={"v": "float64"}).manifest.row_bytes == 8 * 10**6
    ((whole, _),) = from_parquet(handle.root, dtypes={"v": "float64"}).to_tf(global_batch=ROWS, shuffle=False)
    assert whole["v"].numpy().tolist() == MATRIX.tolist()


def test_sparse_vectors_are_checked_and_filled(spark: SparkSession, tmp_path: Path) -> None:
    """Sizes that differ and missing vectors are errors; a mask and a fill of 0 give an empty row."""
    rows = [(Vectors.dense([0, 2]),), (None,), (Vectors.sparse(2, [0], [9.5]),)]
    frame = spark.createDataFrame(rows, ["v"]).coalesce(1)
    choice: dict[str, Any] = {"cache_dir": tmp_path, "dtypes": {"v": "sparse float32"}}
    with pytest.raises(DataError, match="'v': expected no nulls, got 1"):
        from_dataframe(frame, **choice)
    for policy in ("mask", ("fill", 0)):
        (batch,) = from_dataframe(frame, nulls={"v": policy}, **choice).to_tf(global_batch=3, shuffle=False)
        assert batch["v"].indices.numpy().tolist() == [[0, 1], [2, 0]]
        assert batch["v"].values.numpy().tolist() == [2, 9.5]
    assert from_dataframe(frame, nulls={"v": "drop"}, **choice).rows == 2
    uneven = spark.createDataFrame([*rows, (Vectors.sparse(5, [0], [1e39]),)], ["v"]).dropna()
    problems = (
        "column 'v': expected values that fit float32, got 1 that do not, for example 1e+39; choose a wider dtype\n"
        "column 'v': expected vector values of one length, got lengths 2 to 5; the vectors of a column have one size"
    )
    for check in (
        lambda: from_dataframe(uneven, **choice),
        lambda: tfdist.data.stream(uneven, dtypes=choice["dtypes"]),
    ):
        with pytest.raises(DataError) as caught:
            check()
        assert str(caught.value).replace(" (row 2 of the data)", "") == problems


def build_linear(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs["v"]))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def test_a_model_with_a_sparse_input_trains_and_scores(handle: Handle, df: DataFrame, tmp_path: Path) -> None:
    """Two workers on sparse rows end with the weights of one on dense rows, a row validates, and Spark scores alike."""
    choice: dict[str, Any] = {"features": ["v"], "label": "y", "dtypes": {"v": "sparse float32[9]", "y": "float32"}}
    few = from_dataframe(df.limit(1), cache_dir=tmp_path, **choice)
    plain = from_parquet(handle.root, features=["v"], label="y", dtypes={"v": "float32"})
    sparse = from_parquet(handle.root, features=["v"], label="y")
    results = [
        tfdist.fit(
            build_linear,
            data,
            validation=validation,
            compute=tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1),
            fit=tfdist.FitConfig(epochs=2, global_batch=48, seed=1, output_dir=tmp_path / f"model{slots}"),
        )
        for slots, data, validation in ((1, plain, None), (2, sparse, few))
    ]
    one, two = (np.asarray(result.model().trainable_variables[0]) for result in results)
    np.testing.assert_allclose(two, one, rtol=1e-5)
    np.testing.assert_allclose(results[1].history["loss"], results[0].history["loss"], rtol=1e-5)
    assert len(results[1].history["val_loss"]) == 2
    scored = {row["i"]: row["prediction"] for row in tfdist.score(df, results[1], batch_rows=17).collect()}
    np.testing.assert_allclose([scored[i] for i in range(ROWS)], (MATRIX @ one)[:, 0], rtol=1e-4, atol=1e-5)
    alone = tfdist.score(df, results[1].model(), batch_rows=50).collect()
    assert {row["i"]: row["prediction"] for row in alone} == pytest.approx(scored, rel=1e-5)


def test_a_stream_of_sparse_rows_trains(spark: SparkSession, df: DataFrame) -> None:
    """Two barrier workers X of a stream's sparse rows, twice; the losses are those of plain arithmetic."""
    rows = tfdist.data.stream(df, features=["v"], label="y", dtypes={"v": "sparse float32", "y": "float32"})
    fit = tfdist.FitConfig(epochs=2, global_batch=ROWS)
    result = tfdist.fit(build_linear, rows, compute=tfdist.ComputeConfig(slots=2), fit=fit, spark=spark)
    weights = 0.01 * 2 / ROWS * MATRIX.T @ LABELS
    wanted = [np.mean(LABELS**2), np.mean((LABELS - MATRIX @ weights) ** 2)]
    np.testing.assert_allclose(result.history["loss"], wanted, rtol=1e-5)
