"""How many workers a training has: of its slots, its rows, and the GPUs that Spark gives to a task."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from tfdist.config import ComputeConfig
from tfdist.data import Handle, Stream
from tfdist.errors import PreflightError
from tfdist.launch import preflight


def with_rows_for_all(compute: ComputeConfig, train: Handle | Stream) -> ComputeConfig:
    """As many workers as there are rows at most: a worker without a row has nothing to normalise by."""
    slots = min(compute.slots, max(train.rows, 1))
    if slots < compute.slots:
        warnings.warn(
            f"compute.slots: {train.rows} rows train on {slots} workers instead of {compute.slots}", stacklevel=3
        )
        least = compute.min_slots and min(compute.min_slots, slots)
        compute = replace(compute.with_slots(slots), min_slots=least)
    return compute


def count_workers(compute: ComputeConfig, spark: Any) -> int:
    """The number of workers for ``compute.slots``: one for each on the CPU, and one for each task's GPUs.

    Args:
        compute: where the training runs.
        spark: the session; None takes the active one, where Spark launches.

    Raises:
        PreflightError: Spark schedules no GPUs, or they do not divide evenly.
        ConfigError: there is no session.
    """
    if not compute.use_gpu:
        return compute.slots
    if compute.launcher == "local":  # there each worker has a process and a GPU of its own
        return 1 if compute.strategy_in_force == "mirrored" else compute.slots
    from tfdist.launch.slots import spark_facts
    from tfdist.launch.spark import active_session

    conf = spark_facts(spark or active_session()).conf
    tasks, problems = preflight.tasks_for(
        compute.slots, conf, use_gpu=True, gpu_resource_name=compute.gpu_resource_name
    )
    problems += [] if problems else preflight.uneven_devices(compute.slots, tasks, compute.strategy_in_force)
    if problems:
        raise PreflightError(problems)
    return tasks
