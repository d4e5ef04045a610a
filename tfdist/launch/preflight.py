"""What can be known before a barrier job starts: pure rules over a snapshot of the Spark configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?$")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]$")


@dataclass(frozen=True)
class SparkFacts:
    """A snapshot of what Spark says of itself.

    Args:
        master: the master URL.
        conf: the Spark configuration.
        concurrent_tasks: how many tasks can run at once now; None when Spark does not say.
        cores: cores of the driver's host, for ``local[*]``.
    """

    master: str
    conf: Mapping[str, str]
    concurrent_tasks: int | None = None
    cores: int = 1


def tasks_for(slots: int, conf: Mapping[str, str], *, use_gpu: bool, gpu_resource_name: str) -> tuple[int, list[str]]:
    """Number of barrier tasks for ``slots``, with what is wrong in the GPU configuration.

    Each CPU slot is a task; with GPUs a task holds ``spark.task.resource.<name>.amount`` of them, as in
    spark-tensorflow-distributor.
    """
    if not use_gpu:
        return slots, []
    key = f"spark.task.resource.{gpu_resource_name}.amount"
    amount = conf.get(key)
    if amount is None:
        missing = (
            f"{key}: expected the number of GPUs of each task, got nothing; set it, with "
            f"spark.executor.resource.{gpu_resource_name}.amount and a discovery script, or train with use_gpu=False"
        )
        return slots, [missing]
    try:
        whole = max(1, math.floor(float(amount)))  # a fraction means that several tasks share one GPU
    except ValueError:
        return slots, [f"{key}: expected a number, got {amount!r}"]
    return math.ceil(slots / whole), []


def most_tasks(facts: SparkFacts) -> int | None:
    """How many tasks the cluster can ever run at once, where the configuration fixes it; None elsewhere."""
    per_task = int(facts.conf.get("spark.task.cpus", "1"))
    local = _LOCAL.match(facts.master)
    if local:
        cores = {None: 1, "*": facts.cores}.get(local[1]) or int(local[1])
        return cores // per_task
    cluster = _LOCAL_CLUSTER.match(facts.master)
    if cluster:
        return int(cluster[1]) * (int(cluster[2]) // per_task)
    instances, cores_each = facts.conf.get("spark.executor.instances"), facts.conf.get("spark.executor.cores")
    if instances and cores_each and not facts.master.startswith("spark://"):
        return int(instances) * (int(cores_each) // per_task)
    return None


def problems(facts: SparkFacts, tasks: int) -> list[str]:
    """Everything that keeps ``tasks`` barrier tasks from running at the same time, each with what to change."""
    found = []
    if facts.conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        found.append(
            "spark.dynamicAllocation.enabled: expected false, got true; Spark runs no barrier stage with dynamic "
            "allocation: set it to false and give spark.executor.instances"
        )
    most = most_tasks(facts)
    if most is not None and most < tasks:
        found.append(_too_few(facts, tasks, most))
    return found


def _too_few(facts: SparkFacts, tasks: int, most: int) -> str:
    per_task = facts.conf.get("spark.task.cpus", "1")
    return (
        f"compute.slots: {tasks} tasks must run at the same time and the cluster ({facts.master}) runs {most} at most "
        f"(executors x cores / spark.task.cpus={per_task}); use at most {most} slots, or give the session more "
        "executors or cores"
    )


def not_enough_now(facts: SparkFacts, tasks: int, waited_s: float) -> str:
    """The problem text for a cluster that still offers too few tasks after ``waited_s`` seconds."""
    return (
        f"compute.slots: {tasks} tasks must run at the same time and {facts.master} offers {facts.concurrent_tasks} "
        f"after {waited_s:.0f} s; use fewer slots, give the session more executors or cores, or raise "
        "compute.startup_timeout_s if executors are still coming"
    )
