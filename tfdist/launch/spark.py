"""The Spark launcher: barrier tasks of a classic session, started through spark-tensorflow-distributor's runner."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession

from tfdist.cluster import split_address
from tfdist.errors import ConfigError, LaunchError, WorkerError
from tfdist.launch.channel import Channel, ChannelAddress, listen
from tfdist.launch.failures import cause, find_report, lost_task, spark_message, worker_error
from tfdist.launch.ports import with_other_ports
from tfdist.launch.protocol import Event, Failure, LaunchPlan
from tfdist.launch.slots import check_cluster, wait_for_slots
from tfdist.launch.supervisor import supervise, supervise_with_rows
from tfdist.launch.vigil import OF_OURS, Vigil

try:
    from spark_tensorflow_distributor import MirroredStrategyRunner as UpstreamRunner
except ImportError as error:
    raise LaunchError(
        "spark-tensorflow-distributor is not installed; it starts the barrier tasks: "
        "pip install --no-deps spark-tensorflow-distributor"
    ) from error

__all__ = [
    "BarrierRunner",
    "SparkLauncher",
    "UpstreamRunner",
    "active_session",
    "session_or_new",
]

_CANCEL_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_CHECK_EVERY_S = 0.5


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


class SparkLauncher:
    """Starts each worker as a barrier task of ``spark``.

    Args:
        spark: a classic session.
        startup_timeout_s: how long executors may take to appear.
    """

    def __init__(self, spark: SparkSession, startup_timeout_s: float = 120.0) -> None:
        self.spark, self.startup_timeout_s = spark, startup_timeout_s

    def launch(
        self,
        program: bytes,
        plan: LaunchPlan,
        on_event: Callable[[Event], None],
        rows: DataFrame | None = None,
    ) -> list[bytes]:
        """Run ``program`` once on each of ``plan.tasks`` workers.

        Args:
            program: what the workers run.
            plan: how they are started.
            on_event: receives their events.
            rows: a frame of ``plan.tasks`` partitions; each worker gets the rows of one, see
                ``tfdist.data.spool``.

        Returns:
            The bytes that ``program`` returned on each rank, or of the chief only when ``plan.results`` says so.

        Raises:
            PreflightError: the cluster cannot run that many tasks at once.
            WorkerError: a worker failed; the others were ended.
            LaunchError: the workers could not meet.
        """
        check_cluster(self.spark, plan.slots, use_gpu=plan.use_gpu, gpu=plan.gpu_resource_name, tasks=plan.tasks)
        wait_for_slots(self.spark, plan.tasks, self.startup_timeout_s, on_event)
        plan = replace(plan, application=self.spark.sparkContext.applicationId)
        conf = self.spark.sparkContext.getConf()
        host, _ = split_address(conf.get("spark.driver.host", "localhost") or "localhost")
        bind = conf.get("spark.driver.bindAddress", host) or host
        return with_other_ports(lambda: self._launch(program, plan, on_event, rows, (host, bind)))

    def _launch(
        self,
        program: bytes,
        plan: LaunchPlan,
        on_event: Callable[[Event], None],
        rows: DataFrame | None,
        addresses: tuple[str, str],
    ) -> list[bytes]:
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with listen(*addresses, inbox.put) as channel:
            vigil = Vigil(plan.tasks, plan.stall_timeout_s, self.startup_timeout_s)
            runner = BarrierRunner(self.spark, plan, channel.address, rows)
            job = _Job(runner, program, channel, inbox, vigil, self.startup_timeout_s)
            return job.follow(on_event)


class _Job:
    """One barrier job in a thread of its own, so that the caller's thread can deliver events and be interrupted."""

    def __init__(
        self,
        runner: BarrierRunner,
        program: bytes,
        channel: Channel,
        inbox: queue.SimpleQueue[Event],
        vigil: Vigil,
        startup_timeout_s: float,
    ) -> None:
        self.vigil, self.startup_timeout_s, self.asked = vigil, startup_timeout_s, time.monotonic()
        self.runner, self.program, self.channel, self.inbox = runner, program, channel, inbox
        self.group = f"tfdist-{runner.plan.run_id}"
        self.results: list[bytes] | None = None
        self.error: Exception | None = None
        self.failures: list[Failure] = []

    def follow(self, on_event: Callable[[Event], None]) -> list[bytes]:
        thread = InheritableThread(target=self._run, name=self.group, daemon=True)
        thread.start()
        try:
            self._deliver(on_event)
        except BaseException:
            # Ctrl-C, or an error of the caller's own callback: nothing of this run may go on.
            self.runner.sc.cancelJobGroup(self.group)
            thread.join(_CANCEL_TIMEOUT_S)
            raise
        thread.join()
        if self.results is not None:
            return self.results
        raise self._explain()

    def _run(self) -> None:
        try:
            self.runner.sc.setJobGroup(self.group, "tfdist training", interruptOnCancel=True)
            self.results = self.runner.run(self.program)
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            self.error = error
        finally:
            self.inbox.put({"kind": "job-ended", "rank": 0})

    def _deliver(self, on_event: Callable[[Event], None]) -> None:
        ended = False
        while not (ended and self.inbox.empty()):
            if not ended:
                self._check_on_workers()
            try:
                event = self.inbox.get(timeout=_CHECK_EVERY_S)
            except queue.Empty:
                continue
            if event["kind"] != "job-ended":
                self.vigil.note(event, time.monotonic())
            if event["kind"] == "job-ended":
                ended = True
                self.channel.wait_until_closed(_CLOSE_TIMEOUT_S)
            elif event["kind"] == "failed":
                self._note_failure(Failure.from_json(event["failure"]))
            elif event["kind"] not in OF_OURS:
                on_event(event)

    def _check_on_workers(self) -> None:
        now = time.monotonic()
        self.vigil.check_arrivals(now)
        if not self.vigil.anybody_came and now - self.asked >= self.startup_timeout_s:
            self._check_that_spark_starts_us()
        primary = any(not f.secondary for f in self.failures)
        found = self.vigil.stall(now) or (self.vigil.blame(now) if self.failures else None)
        if found and not primary:
            self._note_failure(found)

    def _check_that_spark_starts_us(self) -> None:
        """Wait on while Spark is busy with anything else: other jobs, or stages that our rows come from.

        Raises:
            LaunchError: it is not, and no worker has come.
        """
        tracker = self.runner.sc.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.group)]
        stages = [stage for job in jobs if job is not None for stage in job.stageIds]
        barrier = max(stages, default=None)  # the last stage of our only job
        running = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
        tasks = {stage: info.numActiveTasks for stage, info in running.items() if info is not None}
        if any(count for stage, count in tasks.items() if stage != barrier):
            self.asked = time.monotonic()
            return
        raise LaunchError(
            f"0 of {self.runner.plan.tasks} workers came in {self.startup_timeout_s:.0f} s "
            f"(compute.startup_timeout_s); Spark started {tasks.get(barrier, 0)} of their tasks and nothing else is "
            "running. Look at the log of the executors: their Python does not start, or the tasks may run on some of "
            "the hosts only"
        )

    def _note_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        if not failure.secondary:
            self.runner.sc.cancelJobGroup(self.group)  # the survivors may be blocked in a collective

    def _explain(self) -> Exception:
        assert self.error is not None
        text = str(self.error)
        reported = find_report(text)
        failures = self.failures + ([reported] if reported else [])
        lost = lost_task(text, self.vigil.hosts)
        if lost is not None and all(f.secondary for f in failures):  # what survivors say follows from it
            failures = [lost]
        # The name of the group is in the text when the run was cancelled by us.
        of_ours = bool(reported or lost) or "LaunchError: " in text or self.group in text
        if self.runner.rows is not None and not of_ours:
            # The plan of the rows failed in Spark's own process; what the workers say follows from that.
            broken = WorkerError(
                f"Spark could not compute the rows of the training, or lost a task: {spark_message(text)}"
            )
            broken.__cause__ = self.error
            return broken
        if failures:
            failed = worker_error(cause(failures))
            failed.__cause__ = None
            return failed
        handshake = next((line for line in text.splitlines() if "LaunchError: " in line), None)
        if handshake:
            return LaunchError(handshake.partition("LaunchError: ")[2])
        ended = WorkerError(f"Spark ended the training before a worker could say why: {text}")
        ended.__cause__ = self.error
        return ended


def session_or_new() -> SparkSession:
    """The active session, or a new one as the machine's Spark settings describe it."""
    return SparkSession.builder.getOrCreate()


def active_session() -> SparkSession:
    """The session that is active in this thread or process.

    Raises:
        ConfigError: there is none.
    """
    session = SparkSession.getActiveSession()
    if session is None:
        raise ConfigError(
            "spark: expected an active session, found none; create one with SparkSession.builder.getOrCreate(), or "
            "train on this host with ComputeConfig(launcher='local')"
        )
    return session
