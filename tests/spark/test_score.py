"""Scoring a DataFrame on the executors, against Keras in one process."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tfdist
from tfdist.data.schema import Schema
from tfdist.errors import ConfigError, DataError
from tfdist.inference import predictor

ROWS = 60
KINDS = ["a", "b", "ü"]
TYPES = (
    "id int, `x.1` double, kind string, extra struct<a:int,`b.c`:string>, tags map<string,int>, `day of` date, "
    "at timestamp, price decimal(20,3), raw binary, n bigint, long interval day to second"
)


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Rows of every kind of type; the model reads the columns ``x.1`` and ``kind`` only. Two partitions are empty."""
    rng = np.random.default_rng(3)
    day = datetime.date(2020, 2, 29)
    rows = [
        (
            i,
            None if i == 5 else float(rng.normal()),
            None if i == 7 else KINDS[i % 3],
            (i, "y"),
            {"k": i},
            day,
            datetime.datetime(1969, 7, 20, 20, 17, 40, i),
            Decimal(i) / 8,
            bytes([i]),
            None if i % 2 else 2**53 + 1,
            datetime.timedelta(days=i, microseconds=1),
        )
        for i in range(ROWS)
    ]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 3), TYPES).union(
        spark.createDataFrame(spark.sparkContext.parallelize([], 2), TYPES)
    )


def schema_of(frame: DataFrame, kind: Any = ("fill", "a"), x: Any = ("fill", 0.5)) -> Schema:
    nulls = {"x.1": x, "kind": kind}
    return Schema.from_spark(frame.schema, features=["x.1", "kind"], nulls=nulls, dtypes={"x.1": "float32"})


def build(schema: Schema, units: int) -> Any:
    keras.utils.set_random_seed(4)
    inputs = schema.keras_inputs()
    kind = keras.layers.StringLookup(vocabulary=KINDS, output_mode="one_hot")(inputs["kind"])
    numbers = [keras.ops.expand_dims(keras.ops.cast(inputs[n], "float32"), -1) for n in inputs if n != "kind"]
    return keras.Model(inputs, keras.layers.Dense(units)(keras.layers.Concatenate()([kind, *numbers])))


def publish(model: Any, schema: Schema, folder: Path) -> Path:
    """The folder that a training leaves."""
    model.save(folder / "model.keras")
    (folder / "schema.json").write_text(schema.to_json())
    return folder


def expected(model: Any, x: list[float], kinds: list[str]) -> np.ndarray:
    given = {"x.1": np.array(x, "float32"), "kind": np.array(kinds, object)}
    return np.asarray(model.predict({n: keras.ops.convert_to_tensor(v) for n, v in given.items()}, verbose=0))


def test_predictions_equal_those_of_keras_and_nothing_else_changes(frame: DataFrame, tmp_path: Path) -> None:
    """Every row gets Keras' own prediction, whatever its partition and slice; other columns come back as they were."""
    schema = schema_of(frame)
    model = build(schema, 1)
    scored = tfdist.score(frame, publish(model, schema, tmp_path), batch_rows=7)
    assert scored.schema[:-1] == frame.schema
    assert scored.schema[-1].simpleString() == "prediction:float"
    rows = scored.collect()
    assert [row[:-1] for row in rows] == [tuple(row) for row in frame.collect()]
    x = [0.5 if row["x.1"] is None else row["x.1"] for row in rows]
    wanted = expected(model, x, [row.kind or "a" for row in rows])[:, 0]
    np.testing.assert_allclose([row.prediction for row in rows], wanted, rtol=1e-6, atol=1e-6)
    assert scored.filter("prediction IS NULL").count() == 0


def test_a_vector_of_predictions_is_an_array(frame: DataFrame) -> None:
    """A Keras model object scores as it is, its inputs found by name; several values become an array."""
    model = build(schema_of(frame), 3)
    complete = frame.filter("`x.1` IS NOT NULL AND kind IS NOT NULL")
    scored = tfdist.score(complete, model, output="class.scores")
    assert scored.schema[-1].simpleString() == "class.scores:array<float>"
    rows = scored.collect()
    wanted = expected(model, [row["x.1"] for row in rows], [row.kind for row in rows])
    np.testing.assert_allclose([row["class.scores"] for row in rows], wanted, rtol=1e-6, atol=1e-6)


def test_null_policies_act_as_in_the_training(frame: DataFrame, tmp_path: Path) -> None:
    """A row of the policy ``drop`` gets null in place of a prediction, and a mask reaches the model."""
    schema = schema_of(frame, kind="drop", x="mask")
    model = build(schema, 2)
    path = publish(model, schema, tmp_path)
    rows = tfdist.score(frame.filter("id < 10"), path).orderBy("id").collect()
    assert [row.id for row in rows if row.prediction is None] == [7]
    given = {
        "x.1": np.array([row["x.1"] or 0.0 for row in rows], "float32"),
        "x.1_is_null": np.array([row.id == 5 for row in rows]),
        "kind": np.array([row.kind or "" for row in rows], object),
    }
    wanted = model.predict({n: keras.ops.convert_to_tensor(v) for n, v in given.items()}, verbose=0)
    for row, prediction in zip(rows, wanted, strict=True):
        if row.id != 7:
            np.testing.assert_allclose(row.prediction, prediction, rtol=1e-6, atol=1e-6)
    nothing = tfdist.score(frame.filter("id = 7"), path).collect()
    assert [row.prediction for row in nothing] == [None]


def test_ml_vectors_score_and_pass_through(spark: SparkSession) -> None:
    """Dense and sparse Spark ML vectors reach a one-input model as rows of a matrix and stay vectors in the result."""
    inputs = keras.Input((3,), name="features")
    model = keras.Sequential([inputs, keras.layers.Dense(1)])
    dense = [[1.0, 2.0, 3.0], [0.0, 4.0, 0.0], [5.0, 0.0, 6.0]]
    vectors = [Vectors.dense(dense[0]), Vectors.sparse(3, {1: 4.0}), Vectors.dense(dense[2])]
    frame = spark.createDataFrame([(i, v) for i, v in enumerate(vectors)], ["i", "features"])
    rows = tfdist.score(frame, model).collect()
    assert [(row.i, row.features) for row in rows] == list(enumerate(vectors))
    np.testing.assert_allclose([r.prediction for r in rows], model.predict(np.array(dense), verbose=0)[:, 0], rtol=1e-6)


def test_names_in_two_cases_and_twice_do_not_matter(spark: SparkSession) -> None:
    """Columns that differ in case only are told apart; a double name is no harm where the model does not read it."""
    model = keras.Sequential([keras.Input((1,), name="x"), keras.layers.Rescaling(10.0)])
    frame = spark.createDataFrame([(1.0, 2.0, 3, 4)], ["x", "X", "twice", "other"]).toDF("x", "X", "twice", "twice")
    scored = tfdist.score(frame, model)
    assert scored.columns == ["x", "X", "twice", "twice", "prediction"]
    assert [tuple(row) for row in scored.collect()] == [(1.0, 2.0, 3, 4, 10.0)]
    with pytest.raises(DataError, match="column 'x': 2 columns have this name"):
        tfdist.score(frame.toDF("x", "x", "a", "b"), model)


def test_nothing_runs_before_the_result_is_used(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    """Calling score starts no Spark job; what does not fit is an error then and there, with every reason at once."""
    schema = schema_of(frame)
    path = publish(build(schema, 1), schema, tmp_path)
    context = spark.sparkContext
    context.setJobGroup("score", "")
    try:
        tfdist.score(frame, path)
        with pytest.raises(DataError) as caught:
            tfdist.score(frame.withColumnRenamed("x.1", "x1").withColumn("kind", F.lit(1)), path)
        assert str(caught.value).splitlines() == [
            "column 'x.1': the model reads it, and it is not among the rows' columns; did you mean 'x1'?",
            "column 'kind': expected string as in the training, got int; cast it to string",
        ]
        with pytest.raises(DataError, match="already have a column 'id'"):
            tfdist.score(frame, path, output="id")
        with pytest.raises(ConfigError, match="batch_rows: expected"):
            tfdist.score(frame, path, batch_rows=0)
        with pytest.raises(ConfigError, match=r"found no file .*absent"):
            tfdist.score(frame, tmp_path / "absent")
        with pytest.raises(ConfigError, match="got dict"):
            tfdist.score(frame, {})
        assert list(context.statusTracker().getJobIdsForGroup("score")) == []
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)


def test_a_model_is_loaded_once_in_each_python_worker(spark: SparkSession, tmp_path: Path) -> None:
    """Partitions and queries after the first find the model in their Python worker, by its content."""
    model = keras.Sequential([keras.Input((1,), name="x"), keras.layers.Dense(1)])
    model.save(tmp_path / "m.keras")
    content = (tmp_path / "m.keras").read_bytes()
    file = predictor.ModelFile(content, hashlib.sha256(content).hexdigest(), one_input=True)
    assert predictor.load(file) is predictor.load(predictor.ModelFile(bytes(content), file.digest, one_input=True))

    frame = spark.range(0, 40, 1, 8).select(F.col("id").cast("float").alias("x"))

    def models_in_this_worker(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from tfdist.inference.predictor import _loaded

        for _ in batches:
            models = [f"{digest} {id(model)}" for digest, model in _loaded.items()]
            yield pa.RecordBatch.from_pydict({"pid": [os.getpid()], "models": [models]})

    def seen() -> dict[int, set[str]]:
        tfdist.score(frame, tmp_path / "m.keras").collect()
        rows = spark.range(0, 8, 1, 8).mapInArrow(models_in_this_worker, "pid bigint, models array<string>").collect()
        return {row.pid: set(row.models) for row in rows}

    before, after = seen(), seen()
    assert before == {pid: before[pid] for pid in after}
    assert all(after.values())


def test_refused_nulls_end_the_query(frame: DataFrame, tmp_path: Path) -> None:
    """Without a policy a null is an error, as in the training, that names the column and the ways out."""
    schema = schema_of(frame, kind="error")
    scored = tfdist.score(frame, publish(build(schema, 1), schema, tmp_path))
    with pytest.raises(PythonException, match=r"DataError: column 'kind': expected no nulls, got 1; say nulls="):
        scored.collect()


def test_only_what_tensorflow_always_says_is_left_out_of_the_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """TensorFlow's greeting is not shown while a model is loaded; anything else is, also when loading fails."""
    greeting = b"WARNING: All log messages before absl::InitializeLog() are\nI0 oneDNN custom operations are on.\n"

    def load() -> None:
        with predictor._without_greeting():
            os.write(2, greeting + b"E0000 no such library\n")
            raise ImportError

    with pytest.raises(ImportError):
        load()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "E0000 no such library\nafter\n"
    script = "from tfdist.inference.predictor import _without_greeting\nwith _without_greeting():\n import tensorflow"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "oneDNN" not in process.stderr
    assert "absl" not in process.stderr
