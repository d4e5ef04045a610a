"""Everything about a job that can be known before it trains."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from tfdist.data import Schema
from tfdist.errors import ConfigError
from tfdist.launch import preflight

from .runner import null_policies, prepared_parts
from .source import null_problems
from .spec import JobSpec
from .tasks import task_of


@dataclass(frozen=True)
class Findings:
    """What a check found.

    Args:
        problems: everything that would stop the job.
        schema: columns and tensors of the training data; None when the columns could not be decided.
    """

    problems: tuple[str, ...]
    schema: Schema | None


def check_job(spec: JobSpec, spark: SparkSession) -> Findings:
    """Look at versions, slots, source, columns, types and nulls; Spark counts the nulls, nothing is trained."""
    problems = [*_version_problems(spec), *_slot_problems(spec, spark)]
    schema = None
    try:
        task = task_of(spec)
        parts = prepared_parts(spark, spec, task)
        problems += null_problems(parts, spec)
        schema = Schema.from_spark(parts.train.schema, label=task.label, nulls=null_policies(spec))
    except ConfigError as error:
        problems += error.problems
    return Findings(tuple(problems), schema)


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
