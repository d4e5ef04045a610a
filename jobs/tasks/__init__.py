"""What can be learnt: each task is a record of functions, made from its section of the job file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..spec import JobSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

PREDICTION = "prediction"


@dataclass(frozen=True)
class Task:
    """A task over the columns of a DataFrame.

    Args:
        label: the column to predict.
        features: the columns that the model reads.
        places: setting of the job to the columns that it names, of features and label.
        check: problems that the schema of the prepared rows shows.
        learn: statistics and vocabularies of the training rows -> the function that builds the model.
        measure: rows with the label and the column ``prediction`` -> quality by name.
        baselines: name -> function of (training rows, test rows) that returns the test rows with ``prediction``.
    """

    label: str
    features: tuple[str, ...]
    places: Mapping[str, tuple[str, ...]]
    check: Callable[[StructType], list[str]]
    learn: Callable[[DataFrame], Callable[[Any], Any]]
    measure: Callable[[DataFrame], dict[str, float]]
    baselines: Mapping[str, Callable[[DataFrame, DataFrame], DataFrame]]


def task_of(spec: JobSpec) -> Task:
    """The task that a job asks for."""
    from .tabular import tabular_task

    return tabular_task(spec.task, spec.fit)
