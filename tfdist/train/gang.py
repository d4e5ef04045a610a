"""Where the workers of a training run: the slots that there are for them, and their launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.config import ComputeConfig
from tfdist.errors import LaunchError, PreflightError
from tfdist.launch.local import LocalLauncher
from tfdist.launch.protocol import Event, LaunchPlan


def gathered(compute: ComputeConfig, wanted: int, spark: Any, on_event: Callable[[Event], None]) -> int:
    """How many workers the next launch gets: all that are wanted, or for an elastic training those that there are.

    Args:
        compute: where they run.
        wanted: how many workers ``compute.slots`` are; all have as many slots.
        spark: the session, or None for the active one.
        on_event: is told of slots that are waited for.

    Raises:
        PreflightError: an elastic training does not get ``min_slots``.
    """
    if compute.min_slots is None or compute.launcher == "local":
        return wanted  # the launcher waits for them
    from tfdist.launch.slots import check_cluster, gather_slots
    from tfdist.launch.spark import active_session

    session, least = spark or active_session(), -(-compute.min_slots * wanted // compute.slots)
    check_cluster(
        session, compute.slots, use_gpu=compute.use_gpu, gpu=compute.gpu_resource_name, tasks=wanted, least=least
    )
    return gather_slots(session, wanted, least, compute.startup_timeout_s, compute.last_call_timeout_s, on_event)


def launch(
    program: bytes,
    compute: ComputeConfig,
    plan: LaunchPlan,
    spark: Any,
    on_event: Callable[[Event], None],
    rows: Any = None,
) -> list[bytes]:
    """Run ``program`` on the workers of ``plan``, which get the partitions of the frame ``rows``.

    Raises:
        ConfigError: the Spark launcher was asked for and there is no session.
        LaunchError: slots of an elastic training were lost again before the workers came.
    """
    if compute.launcher == "local":
        return LocalLauncher().launch(program, plan, on_event)
    from tfdist.launch.spark import SparkLauncher, active_session

    session = spark or active_session()
    try:
        return SparkLauncher(session, compute.startup_timeout_s).launch(program, plan, on_event, rows)
    except PreflightError as error:
        if compute.min_slots is None:
            raise
        raise LaunchError(f"slots were lost before the workers came: {error}") from error
