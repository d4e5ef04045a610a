"""Everything about a job that can be known before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tfdist.data import Schema
from tfdist.data.elements import Element, elements
from tfdist.errors import ConfigError, DataError, UnsupportedVersionError
from tfdist.strategies.versions import check_keras_version
from tfdist.train.checks import settings_problems

from .cluster import Cluster, look_at_cluster
from .runner import null_policies, source_of
from .source import divide, examine, null_counts, null_problems
from .spec import JobSpec
from .tasks import task_of


@dataclass(frozen=True)
class Report:
    """What a check found.

    Args:
        elements: the element spec of the training data, with the nulls of the training and validation rows; empty
            where columns or types are wrong.
        cluster: the hosts.
        problems: everything that would stop the job.
    """

    elements: tuple[Element, ...]
    cluster: Cluster
    problems: tuple[str, ...]


def check_job(spec: JobSpec, spark: SparkSession) -> Report:
    """Look at versions, hosts, slots, source, columns, types and nulls; Spark counts the nulls, nothing is trained."""
    cluster = look_at_cluster(spec, spark)
    output_dir = Path(spec.fit.output_dir or Path(spec.output_dir) / "model").absolute()
    settings = settings_problems(spec.compute, spec.fit, output_dir)
    found, rows = _rows(spec, spark)
    problems = dict.fromkeys((*_version_problems(spec), *settings, *cluster.problems, *rows))
    return Report(tuple(found), cluster, tuple(problems))


def _rows(spec: JobSpec, spark: SparkSession) -> tuple[list[Element], list[str]]:
    """The element spec, and the problems of source, columns, types and nulls."""
    task = task_of(spec)
    try:
        examined = examine(source_of(spark, spec), spec, task.places)
    except ConfigError as error:
        return [], list(error.problems)
    usable = StructType([field for field in examined.rows.schema if field.name not in examined.broken])
    problems = [*examined.problems, *task.check(usable)]
    if not examined.divisible:
        return [], problems
    columns = [name for name in (*task.features, task.label) if name in usable.names]
    parts = divide(examined.rows, spec, columns)
    counts = null_counts(parts)
    problems += null_problems(counts, spec)
    if examined.problems:
        return [], problems
    try:
        schema = Schema.from_spark(parts.train.schema, label=task.label, nulls=null_policies(spec))
    except ConfigError as error:
        return [], [*problems, *error.problems]
    except DataError as error:
        return [], [*problems, *str(error).splitlines()]
    return elements(schema, counts), problems


def _version_problems(spec: JobSpec) -> list[str]:
    needed = ("tensorflow", "mlflow", "matplotlib")
    problems = [
        f"{name}: expected to be installed, found nothing; pip install {name}"
        for name in needed
        if find_spec(name) is None
    ]
    if spec.compute.strategy_in_force != "single":
        try:
            check_keras_version(version("keras"))
        except UnsupportedVersionError as error:
            problems.append(str(error))
    return problems
