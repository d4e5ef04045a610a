"""What can be known before a barrier job starts: pure rules over a snapshot of the Spark configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CLEAR_TEXT = "tensorflow.spark.distributor.ignoreSsl"
"""The key by which a user accepts clear text; that of spark-tensorflow-distributor."""
DISCOVERY_SCRIPT = Path(__file__).with_name("discover_gpus.sh")
"""Lists a host's GPUs in the form that Spark wants; to be copied to the hosts."""

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?$")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]$")
_SIZE = re.compile(r"(\d+)\s*(?:([kmgtp])?b?)$")
_POWERS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# Of fit come a history for each rank and what Spark says of each task; 1m is less than a long history takes.
_LEAST_RESULT = 8 * 2**20
_ENCRYPTION = {
    "spark.ssl.enabled": "encrypts what Spark sends",
    "spark.network.crypto.enabled": "encrypts what Spark sends",
    "spark.authenticate": "lets only processes that know a secret take part",
}


@dataclass(frozen=True)
class SparkFacts:
    """A snapshot of what Spark says of itself.

    Args:
        master: the master URL.
        conf: the Spark configuration.
        concurrent_tasks: how many tasks can run at once now; None when Spark does not say.
        cores: cores of the driver's host, for ``local[*]``; None when that is not known.
        not_known: what the session does not tell and the rules would ask, in words.
    """

    master: str
    conf: Mapping[str, str]
    concurrent_tasks: int | None = None
    cores: int | None = 1
    not_known: tuple[str, ...] = ()


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
        return slots, [_no_gpus(key, gpu_resource_name)]
    try:
        whole = max(1, math.floor(float(amount)))  # a fraction means that several tasks share one GPU
    except (ValueError, OverflowError):
        return slots, [f"{key}: expected a number, got {amount!r}"]
    return math.ceil(slots / whole), []


def shares_gpus(conf: Mapping[str, str], gpu_resource_name: str) -> bool:
    """Whether Spark gives one GPU to several tasks: a task takes a fraction of it."""
    try:
        return 0 < float(conf.get(f"spark.task.resource.{gpu_resource_name}.amount", "1")) < 1
    except ValueError:
        return False


def uneven_devices(slots: int, tasks: int, strategy: str) -> list[str]:
    """What is wrong with GPUs that do not divide evenly.

    TensorFlow: the workers of a MultiWorkerMirroredStrategy "need to use the same number of devices, otherwise the
    behavior is undefined".
    """
    if strategy == "mirrored" and tasks > 1:
        found = (
            f"compute.strategy: 'mirrored' takes the GPUs of one worker, and {slots} GPUs are those of {tasks} Spark "
            "tasks; use 'multi_worker_mirrored', or give a task more of them (spark.task.resource.*.amount)"
        )
        return [found]
    if slots % tasks == 0:
        return []
    fewer = slots - slots % tasks
    found = (
        f"compute.slots: expected as many GPUs for each worker, got {slots} over {tasks} Spark tasks; TensorFlow's "
        f"strategy needs the same number everywhere: use {fewer} or {fewer + tasks} slots, or another "
        "spark.task.resource.*.amount"
    )
    return [found]


def _no_gpus(key: str, name: str) -> str:
    executor = f"spark.executor.resource.{name}"
    return (
        f"{key}: expected the number of GPUs of each task, got nothing; train with use_gpu=False, or start the session "
        f"with {key}=1, {executor}.amount=(GPUs of an executor) and {executor}.discoveryScript="
        f"{DISCOVERY_SCRIPT} (copy that script to the same place on every host; the Workers of a standalone cluster "
        f"need spark.worker.resource.{name}.amount and .discoveryScript instead of the last)"
    )


def most_tasks(facts: SparkFacts) -> int | None:
    """How many tasks the cluster can ever run at once, where the configuration fixes it; None elsewhere."""
    executors, cores = _executors(facts)
    if executors is None or cores is None:
        return None
    return executors * min([cores // _task_cpus(facts), *_by_resources(facts.conf)])


def problems(facts: SparkFacts, tasks: int, least: int | None = None) -> list[str]:
    """Everything that keeps ``tasks`` barrier tasks from running at the same time, each with what to change.

    Also what the user would not want in silence: clear text beside Spark's own encryption, and results that the
    driver would not accept.

    Args:
        facts: what Spark says of itself.
        tasks: how many are wanted.
        least: how many will do for an elastic training; None: all.
    """
    found = [*_encryption(facts.conf), *_results(facts.conf)]
    if not runs_barriers(facts):
        found.append(
            "spark.dynamicAllocation.enabled: expected false, got true; Spark runs no barrier stage with dynamic "
            "allocation: set it to false and give spark.executor.instances"
        )
    per_task, (_, cores) = _task_cpus(facts), _executors(facts)
    if cores is not None and per_task > cores:
        found.append(
            f"spark.task.cpus: expected at most the {cores} cores of an executor ({facts.master}, "
            f"spark.executor.cores), got {per_task}, so that no task ever starts; lower it, or raise "
            "spark.executor.cores"
        )
        return found
    most = most_tasks(facts)
    if most is not None and most < (least or tasks):
        found.append(_too_few(facts, least or tasks, most, "slots" if least is None else "min_slots"))
    return found


def runs_barriers(facts: SparkFacts) -> bool:
    """Whether Spark takes a barrier stage at all; in one process it does not allocate, whatever the setting says."""
    return not _is_on(facts.conf, "spark.dynamicAllocation.enabled") or bool(_LOCAL.match(facts.master))


def notes(facts: SparkFacts) -> list[str]:
    """What a user may wonder about and what does no harm."""
    found = []
    if _is_on(facts.conf, "spark.speculation"):
        found.append(
            "spark.speculation is on; Spark starts no second copy of a barrier task, so that training is as without"
        )
    return [*found, *facts.not_known]


def _encryption(conf: Mapping[str, str]) -> list[str]:
    if _is_on(conf, CLEAR_TEXT):
        return []
    return [
        f"{key}: expected false, got true; it {what}, but TensorFlow's workers speak to each other in clear text and "
        f"without a password: set {CLEAR_TEXT}=true in the Spark configuration to accept that model parameters, and "
        "possibly training data, cross the network so, or train in one that is protected otherwise, with "
        f"{key}=false"
        for key, what in _ENCRYPTION.items()
        if _is_on(conf, key)
    ]


def _results(conf: Mapping[str, str]) -> list[str]:
    key = "spark.driver.maxResultSize"
    size = _bytes(conf.get(key, "1g"))
    if size is None or size == 0 or size >= _LEAST_RESULT:  # 0: no limit
        return []
    found = f"{key}: expected at least {_LEAST_RESULT >> 20}m, got {conf[key]}"
    return [f"{found}; the driver would refuse what the workers return in the end: raise it, or leave it out (1g)"]


def _too_few(facts: SparkFacts, tasks: int, most: int, setting: str) -> str:
    executors, cores = _executors(facts)
    resources = "".join(
        f", {key.removesuffix('.amount')}={amount}" for key, amount in sorted(_task_resources(facts.conf).items())
    )
    return (
        f"compute.{setting}: {tasks} tasks must run at the same time and the cluster ({facts.master}) runs {most} at "
        f"most ({executors} executors x {cores} cores / spark.task.cpus={_task_cpus(facts)}{resources}); use at most "
        f"{most} slots, or give the session more executors or cores"
    )


def _executors(facts: SparkFacts) -> tuple[int | None, int | None]:
    """Number of executors, and of the cores of each, where the configuration fixes them."""
    local = _LOCAL.match(facts.master)
    if local:
        return 1, facts.cores if local[1] == "*" else int(local[1] or 1)
    cores = _whole(facts.conf.get("spark.executor.cores"))
    cluster = _LOCAL_CLUSTER.match(facts.master)
    if cluster:
        return int(cluster[1]), int(cluster[2])
    if facts.master.startswith("spark://"):
        return None, cores  # a host runs as many executors as fit
    return _whole(facts.conf.get("spark.executor.instances")), cores


def _task_resources(conf: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value for key, value in conf.items() if key.startswith("spark.task.resource.") and key.endswith(".amount")
    }


def _by_resources(conf: Mapping[str, str]) -> list[int]:
    """For each resource of a task, such as GPUs, the tasks that an executor's share of it is enough for."""
    found = []
    for key, amount in _task_resources(conf).items():
        held = conf.get(key.replace("spark.task.", "spark.executor.", 1))
        try:
            share, whole = float(amount), int(held or 0)
            tasks = whole * math.floor(1 / share) if share < 1 else math.floor(whole / share)
        except (ValueError, ZeroDivisionError):
            continue  # Spark says so itself
        if held is not None:
            found.append(tasks)
    return found


def _task_cpus(facts: SparkFacts) -> int:
    return _whole(facts.conf.get("spark.task.cpus")) or 1


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _is_on(conf: Mapping[str, str], key: str) -> bool:
    return conf.get(key, "false").strip().lower() == "true"


def _bytes(text: str) -> int | None:
    """A size as Spark writes it, such as ``512m``; None for what it would refuse."""
    found = _SIZE.match(text.strip().lower())
    return int(found[1]) * 1024 ** _POWERS[found[2]] if found else None


def not_enough_now(facts: SparkFacts, tasks: int, waited_s: float, least: int | None = None) -> str:
    """The problem text for a cluster that still offers too few tasks after ``waited_s`` seconds."""
    least = least or tasks
    setting = "slots" if least == tasks else "min_slots"
    offered = "fewer" if facts.concurrent_tasks is None else str(facts.concurrent_tasks)
    return (
        f"compute.{setting}: {least} tasks must run at the same time and {facts.master} offers {offered} after "
        f"{waited_s:.0f} s; use fewer slots, give the session more executors or cores, or raise "
        "compute.startup_timeout_s if executors are still coming"
    )
