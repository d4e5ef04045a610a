"""Barrier jobs of a classic Spark session, started through spark-tensorflow-distributor's runner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tfdist.cluster import split_address
from tfdist.errors import LaunchError
from tfdist.launch import preflight
from tfdist.launch.channel import ChannelAddress
from tfdist.launch.protocol import LaunchPlan
from tfdist.launch.supervisor import supervise, supervise_with_rows

try:
    from spark_tensorflow_distributor import MirroredStrategyRunner as UpstreamRunner
except ImportError as error:
    raise LaunchError(
        "spark-tensorflow-distributor is not installed; it starts the barrier tasks: "
        "pip install --no-deps spark-tensorflow-distributor"
    ) from error

__all__ = ["BarrierRunner", "ClassicJob", "ClassicSession", "UpstreamRunner"]


def _only_warnings(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING  # upstream's progress messages tell a user of ours nothing


class BarrierRunner(UpstreamRunner):  # type: ignore[misc]
    """Upstream's runner with our supervisor as the program of each barrier task.

    Upstream contributes the barrier job and the check for Spark TLS. What it does inside a task (TF_CONFIG in the
    environment of the reused Python worker, a port closed before TensorFlow binds it) is replaced.
    """

    def __init__(
        self, spark: SparkSession, plan: LaunchPlan, channel: ChannelAddress, rows: DataFrame | None = None
    ) -> None:
        self.plan, self._channel, self.rows = plan, channel, rows
        logging.getLogger(type(self).__name__).addFilter(_only_warnings)
        super().__init__(
            num_slots=plan.slots,
            use_gpu=plan.use_gpu,
            gpu_resource_name=plan.gpu_resource_name,
            use_custom_strategy=True,
        )
        self.sc = spark.sparkContext

    def get_num_tasks(self) -> int:
        return self.plan.tasks

    def run(self, train_fn: Any, **kwargs: Any) -> Any:
        """The results of the chief's task, after the barrier job; the frame's tasks are its own partitions."""
        if self.rows is None:
            return super().run(train_fn, **kwargs)
        self._check_encryption()
        task = partial(supervise_with_rows, self.plan, train_fn, self._channel)
        return [bytes(row[0]) for row in self.rows.mapInArrow(task, "result binary", barrier=True).collect()]

    def _get_spark_task_program(self, train_fn: Any, **_kwargs: Any) -> Any:
        return partial(supervise, self.plan, train_fn, self._channel)


class ClassicJob:
    """A barrier job, told from others by its job group."""

    def __init__(self, runner: BarrierRunner) -> None:
        self._runner, self._group = runner, f"tfdist-{runner.plan.run_id}"

    def run(self, program: bytes) -> list[bytes]:
        self._runner.sc.setJobGroup(self._group, "tfdist training", interruptOnCancel=True)
        results: list[bytes] = self._runner.run(program)
        return results

    def cancel(self) -> None:
        self._runner.sc.cancelJobGroup(self._group)

    def was_cancelled(self, spark_error: str) -> bool:
        return self._group in spark_error

    def start_state(self) -> tuple[bool, str]:
        """Spark is busy while it runs anything else: other jobs, or stages that our rows come from."""
        tracker = self._runner.sc.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = [stage for job in jobs if job is not None for stage in job.stageIds]
        barrier = max(stages, default=None)  # the last stage of our only job
        running = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
        tasks = {stage: info.numActiveTasks for stage, info in running.items() if info is not None}
        return any(count for stage, count in tasks.items() if stage != barrier), (
            f"Spark started {tasks.get(barrier, 0)} of their tasks and nothing else is running. Look at the log of the "
            "executors: their Python does not start, or the tasks may run on some of the hosts only"
        )


class ClassicSession:
    """A session whose driver is this process and its JVM."""

    line_needed = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def application(self) -> str:
        return str(self._spark.sparkContext.applicationId)

    @property
    def python(self) -> str:
        return str(getattr(self._spark.sparkContext, "pythonExec", "python3"))

    def facts(self) -> preflight.SparkFacts:
        sc = self._spark.sparkContext
        java = sc._jsc.sc()  # no public call tells the number of concurrent tasks
        profile = java.resourceProfileManager().defaultResourceProfile()
        return preflight.SparkFacts(
            master=sc.master,
            conf=dict(sc.getConf().getAll()),
            concurrent_tasks=int(java.maxNumConcurrentTasks(profile)),
            cores=os.cpu_count() or 1,
        )

    def addresses(self) -> tuple[str, str]:
        conf = self._spark.sparkContext.getConf()
        host, _ = split_address(conf.get("spark.driver.host", "localhost") or "localhost")
        bind, _ = split_address(conf.get("spark.driver.bindAddress", host) or host)  # Spark writes IPv6 in brackets
        return host, bind

    def job(self, plan: LaunchPlan, channel: ChannelAddress, rows: DataFrame | None) -> ClassicJob:
        return ClassicJob(BarrierRunner(self._spark, plan, channel, rows))

    def texts(self, look: Callable[[Any], Iterator[str]], tasks: int, timeout_s: float) -> list[str]:  # noqa: ARG002
        # Spark refuses at once what does not fit, and RDDs ask for no package beside Python.
        found: list[str] = (
            self._spark.sparkContext.parallelize(range(tasks), tasks).barrier().mapPartitions(look).collect()
        )
        return found
