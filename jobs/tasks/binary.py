"""A yes-or-no label: how good predicted probabilities are, and what simple predictors reach. All computed by Spark."""

from __future__ import annotations

from collections.abc import Sequence

import pyspark.sql.functions as F
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame

from ..source import quoted
from . import PREDICTION

_CLIP = 1e-7  # keeps the logarithm finite for a prediction of exactly 0 or 1; Keras' own value


def measure(scored: DataFrame, *, label: str) -> dict[str, float]:
    """Area under the ROC curve and log loss of the column ``prediction``, a probability.

    Args:
        scored: rows with the label (0 or 1) and the prediction.
        label: name of the label column.
    """
    pairs = scored.select(
        F.col(quoted(label)).cast("double").alias("label"), F.col(PREDICTION).cast("double").alias("score")
    ).persist()
    try:
        p = F.least(F.greatest(F.col("score"), F.lit(_CLIP)), F.lit(1 - _CLIP))
        loss = pairs.select(F.avg(-F.when(F.col("label") == 1, F.log(p)).otherwise(F.log(1 - p)))).head()
        # Without bins the curve has every distinct score, so that ties count half and the area is exact.
        evaluator = BinaryClassificationEvaluator(
            rawPredictionCol="score", labelCol="label", metricName="areaUnderROC", numBins=0
        )
        return {"auc": float(evaluator.evaluate(pairs)), "log_loss": float(loss[0])}
    finally:
        pairs.unpersist()


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
    names = {name: f"c{i}" for i, name in enumerate([*numeric, *categorical])}

    def renamed(df: DataFrame) -> DataFrame:
        numbers = [F.col(quoted(c)).cast("double").alias(names[c]) for c in numeric]
        texts = [F.coalesce(F.col(quoted(c)).cast("string"), F.lit("")).alias(names[c]) for c in categorical]
        return df.select("*", *numbers, *texts, F.col(quoted(label)).cast("double").alias("target"))

    means = {names[c]: train.select(F.avg(quoted(c))).head()[0] for c in numeric}
    indexed = [f"{names[c]}_index" for c in categorical]
    encoded = [f"{names[c]}_onehot" for c in categorical]
    stages = [
        StringIndexer(inputCols=[names[c] for c in categorical], outputCols=indexed, handleInvalid="keep"),
        OneHotEncoder(inputCols=indexed, outputCols=encoded, handleInvalid="keep"),
    ]
    regression = LogisticRegression(featuresCol="features", labelCol="target", maxIter=100, predictionCol="class")
    assembler = VectorAssembler(inputCols=[names[c] for c in numeric] + encoded, outputCol="features")
    pipeline = Pipeline(stages=[*(stages if categorical else []), assembler, regression])
    numbers = [names[c] for c in numeric]
    fitted = pipeline.fit(renamed(train).dropna(subset=numbers) if numbers else renamed(train))
    scored = fitted.transform(renamed(test).fillna(means) if means else renamed(test))
    return scored.select(*map(quoted, test.columns), vector_to_array("probability")[1].alias(PREDICTION))
