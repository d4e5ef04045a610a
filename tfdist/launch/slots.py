"""How many tasks a Spark session runs at once, now and as far as its configuration says; waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdist.errors import PreflightError
from tfdist.launch import preflight
from tfdist.launch.protocol import Event
from tfdist.launch.session import session_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COMPLETE_AFTER_S = 15.0
"""Without a fixed size to compare with, a cluster that stopped growing for so long is taken as complete."""
_LOOK_EVERY_S = 0.2


def spark_facts(spark: SparkSession) -> preflight.SparkFacts:
    """A snapshot of the session's configuration and of the tasks that can run at once now."""
    return session_of(spark).facts()


def check_cluster(
    spark: SparkSession, slots: int, *, use_gpu: bool, gpu: str, tasks: int | None = None, least: int | None = None
) -> None:
    """Compare what a training asks for with the session's configuration.

    Args:
        spark: the session.
        slots: number of workers (CPU) or GPUs.
        use_gpu: whether slots are GPUs.
        gpu: the name of their Spark resource.
        tasks: the number of barrier tasks, where it is decided already.
        least: the number of tasks with which an elastic training begins.

    Raises:
        PreflightError: they do not fit, with all reasons.
    """
    facts = spark_facts(spark)
    needed, found = preflight.tasks_for(slots, facts.conf, use_gpu=use_gpu, gpu_resource_name=gpu)
    found += preflight.problems(facts, tasks or needed, least)
    if found:
        raise PreflightError(found)


def wait_for_slots(
    spark: SparkSession, tasks: int, startup_timeout_s: float, on_event: Callable[[Event], None]
) -> None:
    """Wait until the session runs ``tasks`` tasks at once; ``on_event`` is told of each step.

    Raises:
        PreflightError: it does not after ``startup_timeout_s``, or has stopped growing.
    """
    fixed = preflight.most_tasks(spark_facts(spark)) is not None
    patience_s = startup_timeout_s if fixed else min(_COMPLETE_AFTER_S, startup_timeout_s)
    _wait(spark, tasks, tasks, startup_timeout_s, patience_s, 0.0, on_event)


def gather_slots(
    spark: SparkSession,
    tasks: int,
    least: int,
    startup_timeout_s: float,
    last_call_timeout_s: float,
    on_event: Callable[[Event], None],
) -> int:
    """Wait until the session runs ``tasks`` tasks at once, or at least ``least`` and no more in time.

    Args:
        spark: the session.
        tasks: how many are wanted.
        least: how many will do.
        startup_timeout_s: how long ``least`` are waited for.
        last_call_timeout_s: how long the others are waited for, once ``least`` are there.
        on_event: is told of each step.

    Returns:
        How many run at once, from ``least`` to ``tasks``.

    Raises:
        PreflightError: ``least`` are not there after ``startup_timeout_s``.
    """
    most = preflight.most_tasks(spark_facts(spark))
    # What the configuration excludes need not be waited for.
    tasks = tasks if most is None else max(least, min(tasks, most))
    return _wait(spark, tasks, least, startup_timeout_s, startup_timeout_s, last_call_timeout_s, on_event)


def _wait(
    spark: SparkSession,
    tasks: int,
    least: int,
    startup_timeout_s: float,
    patience_s: float,
    last_call_timeout_s: float,
    on_event: Callable[[Event], None],
) -> int:
    facts = spark_facts(spark)
    start = time.monotonic()
    grown_at = start
    before = None if least < tasks else facts.concurrent_tasks  # who waits in vain shall know for what
    enough_since: float | None = None
    while facts.concurrent_tasks is not None and facts.concurrent_tasks < tasks:
        now = time.monotonic()
        if facts.concurrent_tasks != before:
            grown_at, before = now, facts.concurrent_tasks
            on_event({"kind": "waiting", "rank": 0, "ready": before, "wanted": tasks})
        if facts.concurrent_tasks < least:
            enough_since = None
            if now - grown_at > patience_s or now - start > startup_timeout_s:
                raise PreflightError(preflight.not_enough_now(facts, tasks, now - start, least))
        else:
            enough_since = now if enough_since is None else enough_since
            if now - enough_since >= last_call_timeout_s:
                return facts.concurrent_tasks
        threading.Event().wait(_LOOK_EVERY_S)
        facts = spark_facts(spark)
    return tasks
