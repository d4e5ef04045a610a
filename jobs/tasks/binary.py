"""A yes-or-no label: how good predicted probabilities are, and what simple predictors reach. All computed by Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyspark.sql.functions as F
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame

from tfdist.errors import DataError

from ..source import quoted
from . import PREDICTION

_CLIP = 1e-7  # keeps the logarithm finite for a prediction of exactly 0 or 1; Keras' own value


def measure(scored: DataFrame, *, label: str) -> dict[str, float]:
    """Area under the ROC curve and log loss of the column ``prediction``, a probability.

    Args:
        scored: rows with the label (0 or 1) and the prediction.
        label: name of the label column.

    Raises:
        DataError: a label is neither 0 nor 1, or all are the same.
    """
    wanted = [F.col(quoted(label)).cast("double").alias("label"), F.col(PREDICTION).cast("double").alias("score")]
    pairs = scored.select(*wanted).toPandas()
    labels, scores = pairs["label"].to_numpy(), pairs["score"].to_numpy()
    found = np.unique(labels)
    if found.tolist() != [0.0, 1.0]:
        raise DataError(f"task.label: expected both 0 and 1 in the test rows of {label!r}, got {found[:5].tolist()}")
    return {"auc": roc_auc(labels, scores), "log_loss": log_loss(labels, scores)}


def roc_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve, exactly: the share of (1, 0) pairs in which the 1 has the higher score.

    A tie counts half (the Mann-Whitney U statistic over the number of pairs; Hanley and McNeil, 1982).

    Args:
        labels: ``[rows]``, each 0 or 1, both present.
        scores: ``[rows]``.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    ones = labels == 1
    n_ones, n_zeros = int(ones.sum()), int((~ones).sum())
    return float((mean_rank[place[ones]].sum() - n_ones * (n_ones + 1) / 2) / (n_ones * n_zeros))


def log_loss(labels: np.ndarray, scores: np.ndarray) -> float:
    """Mean of ``-log`` of the probability given to what happened.

    Args:
        labels: ``[rows]``, each 0 or 1.
        scores: ``[rows]`` probabilities of a 1.
    """
    p = np.clip(scores, _CLIP, 1 - _CLIP)
    return float(-np.mean(np.where(labels == 1, np.log(p), np.log1p(-p))))


def class_prior(train: DataFrame, test: DataFrame, *, label: str) -> DataFrame:
    """``test`` with the share of ones in ``train`` as the prediction of every row."""
    share = train.select(F.avg(F.col(quoted(label)).cast("double"))).head()[0]
    return test.withColumn(PREDICTION, F.lit(float(share)))


def logistic_regression(
    train: DataFrame, test: DataFrame, *, label: str, numeric: Sequence[str], categorical: Sequence[str]
) -> DataFrame:
    """``test`` with the probability of a Spark ML logistic regression fitted to ``train``.

    Categories are one-hot encoded (one more column for those that training never saw), numbers standardised. Rows with
    a missing number are left out of the fit, and get the mean of the training rows in ``test``.
    """
    # Names of our own, since Spark ML reads a dot in a column's name as a struct's field.
    numbers = {name: f"n{i}" for i, name in enumerate(numeric)}
    texts = {name: f"t{i}" for i, name in enumerate(categorical)}
    inputs = [F.col(quoted(name)).cast("double").alias(new) for name, new in numbers.items()]
    inputs += [F.coalesce(F.col(quoted(name)).cast("string"), F.lit("")).alias(new) for name, new in texts.items()]
    indexed, encoded = [f"{t}_index" for t in texts.values()], [f"{t}_onehot" for t in texts.values()]
    stages: list[Any] = [
        StringIndexer(inputCols=list(texts.values()), outputCols=indexed, handleInvalid="keep"),
        OneHotEncoder(inputCols=indexed, outputCols=encoded),
    ]
    regression = LogisticRegression(featuresCol="features", labelCol="target", predictionCol="class")
    assembler = VectorAssembler(inputCols=[*numbers.values(), *encoded], outputCol="features")
    pipeline = Pipeline(stages=[*(stages if categorical else []), assembler, regression])
    # Kept, and spread over all cores: every stage reads the rows again, and the plan behind them may be long.
    rows = train.select(*inputs, F.col(quoted(label)).cast("double").alias("target"))
    rows = rows.repartition(_parallelism(train))
    rows = rows.persist()
    try:
        means = rows.agg(*[F.avg(n).alias(n) for n in numbers.values()]).head().asDict() if numbers else {}
        fitted = pipeline.fit(rows.dropna(subset=list(numbers.values())) if numbers else rows)
    finally:
        rows.unpersist()
    test_rows = test.select("*", *inputs)
    scored = fitted.transform(test_rows.fillna(means) if means else test_rows)
    return scored.select(*map(quoted, test.columns), vector_to_array("probability")[1].alias(PREDICTION))


def _parallelism(df: DataFrame) -> int:
    """Tasks that Spark takes where nobody says how many; a range tells it, and over Spark Connect nothing else does."""
    return len(df.sparkSession.range(10_000).select(F.spark_partition_id()).distinct().collect())
