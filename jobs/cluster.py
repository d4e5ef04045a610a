"""What a job's Spark session says of itself before it trains: its configuration, its hosts, and the job's folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tfdist.config import ComputeConfig
from tfdist.data.location import default_cache_dir, open_storage
from tfdist.errors import ConfigError, LaunchError, PreflightError
from tfdist.launch import hosts, preflight
from tfdist.launch.hosts import HostFacts

from .spec import JobSpec


@dataclass(frozen=True)
class Cluster:
    """The driver and the slots of a job, as far as they could be looked at.

    Args:
        driver: the driver; None where no task could be started.
        workers: the slots, by rank.
        problems: what would stop the job.
        notes: what does no harm.
    """

    driver: HostFacts | None
    workers: tuple[HostFacts, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def look_at_cluster(spec: JobSpec, spark: SparkSession) -> Cluster:
    """Compare the session with what a job needs; a barrier job of about a second looks at the hosts."""
    from tfdist.launch.probe import probe, why_not_started
    from tfdist.launch.slots import spark_facts

    compute = spec.compute
    if compute.launcher != "spark":
        return Cluster(None, (), (), ())
    facts = spark_facts(spark)
    gpus: Any = {"use_gpu": compute.use_gpu, "gpu_resource_name": compute.gpu_resource_name}
    tasks, problems = preflight.tasks_for(compute.slots, facts.conf, **gpus)
    least = None if compute.min_slots is None else preflight.tasks_for(compute.min_slots, facts.conf, **gpus)[0]
    problems += preflight.problems(facts, tasks, least)
    notes = preflight.notes(facts)
    most = preflight.most_tasks(facts)
    some = tasks if most is None else min(tasks, most)
    if some < 1 or not preflight.runs_barriers(facts):
        return Cluster(None, (), tuple(problems), tuple(notes))
    try:
        some = _wait_for(spark, some, some if least is None else min(least, some), compute)
    except PreflightError as error:
        problems += error.problems
        some = min(some, spark_facts(spark).concurrent_tasks or 0)
        if some < 1:
            return Cluster(None, (), tuple(problems), tuple(notes))
    if least is not None and least <= some < tasks:
        notes.append(f"compute.slots: {some} of {tasks} are there; an elastic training begins with these")
    folders = shared_folders(spec)
    try:
        driver, workers = probe(spark, some, folders, compute.startup_timeout_s)
    except PreflightError as error:
        return Cluster(None, (), (*problems, *error.problems), tuple(notes))
    except Exception as error:
        why = why_not_started(error, spark)
        if why is None:
            raise LaunchError(f"Spark could not look at its executors: {error}") from error
        return Cluster(None, (), (*problems, why), tuple(notes))
    problems += hosts.problems(driver, workers, {setting: str(path) for setting, path in folders.items()})
    if compute.use_gpu:
        problems += hosts.device_problems(workers, compute.gpu_resource_name)
    notes += hosts.notes(workers, compute.gpu_resource_name)
    return Cluster(driver, tuple(workers), tuple(problems), tuple(notes))


def _wait_for(spark: SparkSession, tasks: int, least: int, compute: ComputeConfig) -> int:
    """How many tasks run at once, after the waiting of a launch."""
    from tfdist.launch.slots import gather_slots, wait_for_slots

    if compute.min_slots is None:
        wait_for_slots(spark, tasks, compute.startup_timeout_s, lambda _event: None)
        return tasks
    limits = (compute.startup_timeout_s, compute.last_call_timeout_s)
    return gather_slots(spark, tasks, least, *limits, lambda _event: None)


def shared_folders(spec: JobSpec) -> dict[str, Path]:
    """The folders, by their setting, that the driver and the executors of a job write to; not those behind URLs."""
    found: dict[str, Any] = {
        "cache_dir": _path_of(spec.cache_dir),
        "fit.output_dir": spec.fit.output_dir,
        "fit.checkpoint_dir": spec.fit.checkpoint_dir,
    }
    if None in (spec.fit.output_dir, spec.fit.checkpoint_dir):
        found["output_dir"] = spec.output_dir
    return {setting: Path(place).absolute() for setting, place in found.items() if place is not None}


def _path_of(cache_dir: str | None) -> Path | None:
    try:
        place = default_cache_dir() if cache_dir is None else open_storage(cache_dir, where="cache_dir").location
    except ConfigError:  # told where the source is prepared
        return None
    return place if isinstance(place, Path) else None


def described(one: HostFacts, resource: str) -> Mapping[str, str]:
    """A host as a line of a table: heading to text."""
    versions = one.versions
    devices = ", ".join(one.devices.get(resource, ()))
    if one.cuda_visible_devices is not None:
        devices = f"{devices} of CUDA_VISIBLE_DEVICES={one.cuda_visible_devices}" if devices else ""
    return {
        "": "driver" if one.rank < 0 else f"slot {one.rank}",
        "host": one.host,
        "address": one.address,
        "Python": f"{one.python} {one.interpreter}",
        "tfdist": versions["tfdist"] or "-",
        "TensorFlow": versions["tensorflow"] or "-",
        "Keras": versions["keras"] or "-",
        "numpy": versions["numpy"] or "-",
        "pyarrow": versions["pyarrow"] or "-",
        "GPUs": devices or "-",
        "cores": str(one.cores),
        "free memory": f"{one.free_memory / 2**30:.1f} GiB",
        "free disk": f"{one.free_disk / 2**30:.1f} GiB in {one.local_dir}",
    }
