"""Numbers and categories of a row decide a yes-or-no label: normalisation, embeddings, dense layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyspark.sql.functions as F
from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, IntegralType, NumericType, StringType, StructType

from tfdist.config import FitConfig
from tfdist.errors import DataError

from ..source import quoted
from ..spec import Tabular
from . import Task, binary

if TYPE_CHECKING:
    from tfdist.data import Schema

_MOST_CATEGORIES = 100_000  # the vocabulary is collected on the driver and stored in the model


@dataclass(frozen=True)
class Number:
    """A numeric column with the statistics of the training rows."""

    name: str
    mean: float
    variance: float


@dataclass(frozen=True)
class Category:
    """A categorical column with its values in the training rows, sorted; others share one embedding."""

    name: str
    vocabulary: tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True)
class TabularModel:
    """Builds the Keras model; picklable. Preprocessing is part of the model, so that it takes the raw columns.

    Args:
        numbers: the numeric columns.
        categories: the categorical columns.
        embedding: most numbers in an embedding.
        hidden: units of each dense layer.
        dropout: share of units left out while training.
        learning_rate: of Adam, at the start.
        decay_steps: steps over which it falls to 0 along a cosine; None keeps it.
    """

    numbers: tuple[Number, ...]
    categories: tuple[Category, ...]
    embedding: int
    hidden: tuple[int, ...]
    dropout: float
    learning_rate: float
    decay_steps: int | None = None

    def __call__(self, schema: Schema) -> Any:
        """A compiled ``keras.Model``.

        Args:
            schema: of the training data.

        Returns:
            A model from a dict of columns, each ``[batch]``, to the probability ``[batch, 1] float32``. (Keras' binary
            cross-entropy takes the mean over the last dimension: with ``[batch]`` that would be the batch.)
        """
        import keras

        inputs = schema.keras_inputs()
        known = {c.name for c in self.numbers} | {c.name for c in self.categories}
        # A column with the null policy `mask` comes with an input that says where it was null.
        flags = [name for name in inputs if name not in known]
        parts = [_normalised(inputs[c.name], c) for c in self.numbers]
        parts += [_embedded(inputs[c.name], c, self.embedding) for c in self.categories]
        parts += [keras.ops.cast(_column(inputs[name]), "float32") for name in flags]
        x = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
        for units in self.hidden:
            x = keras.layers.Dense(units, activation="relu")(x)
            x = keras.layers.Dropout(self.dropout)(x) if self.dropout else x
        model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="probability")(x))
        rate: Any = self.learning_rate
        if self.decay_steps is not None:
            rate = keras.optimizers.schedules.CosineDecay(self.learning_rate, self.decay_steps)
        model.compile(
            optimizer=keras.optimizers.Adam(rate),
            loss="binary_crossentropy",
            metrics=[keras.metrics.AUC(name="auc")],
        )
        return model


def tabular_task(section: Tabular, fit: FitConfig) -> Task:
    """The task that a section ``task`` with ``kind: tabular`` describes.

    Args:
        section: the section.
        fit: tells the number of steps, for a learning rate that follows a schedule.
    """
    label = section.label
    columns = {"numeric": section.numeric, "categorical": section.categorical}
    return Task(
        label=label,
        features=(*section.numeric, *section.categorical),
        places={
            "task.numeric": tuple(section.numeric),
            "task.categorical": tuple(section.categorical),
            "task.label": (label,),
        },
        check=partial(_check, section),
        learn=partial(_learn, section, fit),
        measure=partial(binary.measure, label=label),
        baselines={
            "class_prior": partial(binary.class_prior, label=label),
            "logistic_regression": partial(binary.logistic_regression, label=label, **columns),
        },
    )


def _check(section: Tabular, schema: StructType) -> list[str]:
    types = {field.name: field.dataType for field in schema.fields}
    problems = [
        f"task.numeric: expected a column of numbers or booleans, got {name!r} of type {types[name].simpleString()}; "
        "cast it in prepare.columns or make it categorical"
        for name in section.numeric
        if name in types and not isinstance(types[name], NumericType | BooleanType)
    ]
    problems += [
        f"task.categorical: expected a column of text or whole numbers, got {name!r} of type "
        f"{types[name].simpleString()}; cast it in prepare.columns"
        for name in section.categorical
        if name in types and not isinstance(types[name], StringType | IntegralType)
    ]
    label = types.get(section.label)
    if label is not None and not isinstance(label, NumericType | BooleanType):
        problems.append(
            f"task.label: expected a column of 0 and 1, got {section.label!r} of type {label.simpleString()}; "
            "make it a condition in prepare.columns and cast it"
        )
    return problems


def _learn(section: Tabular, fit: FitConfig, train: DataFrame) -> Callable[[Schema], Any]:
    """Statistics and vocabularies of the training rows, in one pass of Spark."""
    numbers = {c: F.col(quoted(c)).cast("double") for c in section.numeric}
    label = F.col(quoted(section.label)).cast("double")
    row = train.agg(
        F.collect_set(label),
        *[F.avg(c) for c in numbers.values()],
        *[F.var_pop(c) for c in numbers.values()],
        *[F.collect_set(quoted(c)) for c in section.categorical],
        F.count(F.lit(1)),
    ).head()
    n = len(numbers)
    labels, means, variances, vocabularies = row[0], row[1 : n + 1], row[n + 1 : 2 * n + 1], row[2 * n + 1 : -1]
    problems = []
    if sorted(labels) != [0.0, 1.0]:
        some = ", ".join(f"{v:g}" for v in sorted(labels)[:5]) or "no value"
        problems.append(f"task.label: expected both 0 and 1 in the training rows of {section.label!r}, got {some}")
    problems += [
        f"task.numeric: expected finite numbers in the training rows of {name!r}, got a mean of {mean}; "
        "fill or filter its values in prepare"
        for name, mean in zip(numbers, means, strict=True)
        if mean is None or not math.isfinite(mean)
    ]
    problems += [
        f"task.categorical: expected at most {_MOST_CATEGORIES} different values in {name!r}, got {len(values)}; "
        "group them in prepare.columns"
        for name, values in zip(section.categorical, vocabularies, strict=True)
        if len(values) > _MOST_CATEGORIES
    ]
    problems += [
        f"task.categorical: expected values in the training rows of {name!r}, got only nulls"
        for name, values in zip(section.categorical, vocabularies, strict=True)
        if not values
    ]
    if problems:
        raise DataError("\n".join(problems))
    return TabularModel(
        numbers=tuple(map(Number, numbers, means, variances)),
        categories=tuple(Category(c, tuple(sorted(v))) for c, v in zip(section.categorical, vocabularies, strict=True)),
        embedding=section.embedding,
        hidden=tuple(section.hidden),
        dropout=section.dropout,
        learning_rate=section.learning_rate,
        decay_steps=math.ceil(row[-1] / fit.global_batch) * fit.epochs if section.schedule == "cosine" else None,
    )


def _column(value: Any) -> Any:
    import keras

    return keras.layers.Reshape((1,))(value)


def _normalised(value: Any, column: Number) -> Any:
    """``[batch]`` of any number type to ``[batch, 1] float32`` with mean 0 and variance 1 over the training rows."""
    import keras

    layer = keras.layers.Normalization(axis=None, mean=column.mean, variance=column.variance)
    return layer(keras.ops.cast(_column(value), "float32"))


def _embedded(value: Any, column: Category, most: int) -> Any:
    """``[batch]`` text or whole numbers to ``[batch, width] float32``."""
    import keras

    if isinstance(column.vocabulary[0], str):
        index = keras.layers.StringLookup(vocabulary=list(column.vocabulary))(value)
    else:
        index = keras.layers.IntegerLookup(vocabulary=list(column.vocabulary))(keras.ops.cast(value, "int64"))
    size = len(column.vocabulary) + 1
    return keras.layers.Embedding(size, min(most, (size + 1) // 2))(index)
