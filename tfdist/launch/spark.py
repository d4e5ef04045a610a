"""The Spark launcher: each worker is a barrier task of a session, be it classic or of Spark Connect."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession

from tfdist.errors import ConfigError, LaunchError, PreflightError, TfdistError, WorkerError
from tfdist.launch import preflight
from tfdist.launch.channel import Channel, listen
from tfdist.launch.failures import cause, find_report, lacks_slots, lost_task, spark_message, worker_error
from tfdist.launch.ports import with_other_ports
from tfdist.launch.protocol import Event, Failure, LaunchPlan
from tfdist.launch.session import BarrierJob, session_of
from tfdist.launch.slots import check_cluster, spark_facts, wait_for_slots
from tfdist.launch.vigil import OF_OURS, Vigil

_CANCEL_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_CHECK_EVERY_S = 0.5


class SparkLauncher:
    """Starts each worker as a barrier task of ``spark``.

    Args:
        spark: the session.
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
        session = session_of(self.spark)
        shared = plan.use_gpu and preflight.shares_gpus(session.facts().conf, plan.gpu_resource_name)
        plan = replace(plan, application=session.application, gpus_shared=shared)
        addresses = session.addresses()
        return with_other_ports(lambda: self._launch(program, plan, on_event, rows, addresses))

    def _launch(
        self,
        program: bytes,
        plan: LaunchPlan,
        on_event: Callable[[Event], None],
        rows: DataFrame | None,
        addresses: tuple[str, str],
    ) -> list[bytes]:
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        session = session_of(self.spark)
        with listen(*addresses, inbox.put, needed=session.line_needed) as channel:
            vigil = Vigil(plan.tasks, plan.stall_timeout_s, self.startup_timeout_s)
            job = session.job(plan, channel.address, rows)
            run = _Run(self.spark, job, plan, program, rows is not None, channel, inbox, vigil, self.startup_timeout_s)
            return run.follow(on_event)


class _Run:
    """One barrier job in a thread of its own, so that the caller's thread can deliver events and be interrupted."""

    def __init__(
        self,
        spark: SparkSession,
        job: BarrierJob,
        plan: LaunchPlan,
        program: bytes,
        with_rows: bool,
        channel: Channel,
        inbox: queue.SimpleQueue[Event],
        vigil: Vigil,
        startup_timeout_s: float,
    ) -> None:
        self.vigil, self.startup_timeout_s, self.asked = vigil, startup_timeout_s, time.monotonic()
        self.spark, self.job, self.plan, self.program, self.with_rows = spark, job, plan, program, with_rows
        self.channel, self.inbox, self.started = channel, inbox, time.monotonic()
        self.results: list[bytes] | None = None
        self.error: Exception | None = None
        self.failures: list[Failure] = []

    def follow(self, on_event: Callable[[Event], None]) -> list[bytes]:
        name = f"tfdist-{self.plan.run_id}"
        thread = InheritableThread(target=self._run, session=self.spark, name=name, daemon=True)
        thread.start()
        try:
            self._deliver(on_event)
        except BaseException:
            # Ctrl-C, or an error of the caller's own callback: nothing of this run may go on.
            self._end(thread)
            raise
        thread.join()
        if self.results is not None:
            return self.results
        raise self._explain()

    def _run(self) -> None:
        try:
            self.results = self.job.run(self.program)
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            self.error = error
        finally:
            self.inbox.put({"kind": "job-ended", "rank": 0})

    def _end(self, thread: threading.Thread) -> None:
        give_up_at = time.monotonic() + _CANCEL_TIMEOUT_S
        while thread.is_alive() and time.monotonic() < give_up_at:
            self.job.cancel()
            thread.join(_CHECK_EVERY_S)

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
        busy, what = self.job.start_state()
        if busy:
            self.asked = time.monotonic()
            return
        raise LaunchError(
            f"0 of {self.plan.tasks} workers came in {self.startup_timeout_s:.0f} s (compute.startup_timeout_s); {what}"
        )

    def _note_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        if not failure.secondary:
            self.job.cancel()  # the survivors may be blocked in a collective

    def _explain(self) -> Exception:
        assert self.error is not None
        if isinstance(self.error, TfdistError):
            return self.error
        text = str(self.error)
        if lacks_slots(text):
            facts, waited_s = spark_facts(self.spark), time.monotonic() - self.started
            return PreflightError(preflight.not_enough_now(facts, self.plan.tasks, waited_s))
        reported = find_report(text)
        failures = self.failures + ([reported] if reported else [])
        lost = lost_task(text, self.vigil.hosts)
        if lost is not None and all(f.secondary for f in failures):  # what survivors say follows from it
            failures = [lost]
        of_ours = bool(reported or lost) or "LaunchError: " in text or self.job.was_cancelled(text)
        if self.with_rows and not of_ours:
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
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


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
