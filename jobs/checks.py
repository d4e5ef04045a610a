"""Everything about a job that can be known before it trains."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from pyspark.sql import SparkSession

from tfdist.data import Schema
from tfdist.data.elements import Element, elements
from tfdist.errors import ConfigError, DataError, UnsupportedVersionError
from tfdist.launch import preflight
from tfdist.strategies.versions import check_keras_version

from .runner import null_policies, prepared_parts
from .source import null_counts, null_problems
from .spec import JobSpec
from .tasks import task_of


def check_job(spec: JobSpec, spark: SparkSession) -> list[Element]:
    """Look at versions, slots, source, columns, types and nulls; Spark counts the nulls, nothing is trained.

    Returns:
        The element spec of the training data, with the nulls of the training and validation rows.

    Raises:
        ConfigError: ``problems`` holds everything that would stop the job.
    """
    problems = [*_version_problems(spec), *_slot_problems(spec, spark)]
    schema, counts = None, {}
    try:
        task = task_of(spec)
        parts = prepared_parts(spark, spec, task)
        schema = Schema.from_spark(parts.train.schema, label=task.label, nulls=null_policies(spec))
        counts = null_counts(parts)
        problems += null_problems(counts, spec)
    except ConfigError as error:
        problems += error.problems
    except DataError as error:
        problems += str(error).splitlines()
    if problems or schema is None:
        raise ConfigError(problems)
    return elements(schema, counts)


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


def _slot_problems(spec: JobSpec, spark: SparkSession) -> list[str]:
    from tfdist.launch.spark import spark_facts

    if spec.compute.launcher != "spark":
        return []
    facts = spark_facts(spark)
    tasks, problems = preflight.tasks_for(
        spec.compute.slots,
        facts.conf,
        use_gpu=spec.compute.use_gpu,
        gpu_resource_name=spec.compute.gpu_resource_name,
    )
    return [*problems, *preflight.problems(facts, tasks)]
