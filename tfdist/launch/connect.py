"""Barrier jobs of a Spark Connect session: the same tasks, started through a server that runs Spark's driver."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession

from tfdist.errors import ConfigError, PreflightError
from tfdist.launch import preflight
from tfdist.launch.channel import ChannelAddress
from tfdist.launch.failures import lacks_slots
from tfdist.launch.protocol import LaunchPlan
from tfdist.launch.session import MOST_BYTES
from tfdist.launch.supervisor import supervise_alone, supervise_with_rows

DRIVER_HOST = "TFDIST_DRIVER_HOST"
"""The variable that names this machine as executors reach it."""

_JOIN_S = 0.5
_GIVE_UP_S = 10.0


@contextmanager
def tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """Mark the operations that this thread starts inside, so that ``interruptTag`` ends them."""
    spark.addTag(tag)
    try:
        yield
    finally:
        spark.removeTag(tag)


def interrupt(spark: SparkSession, tag: str) -> None:
    """End the operations that carry a tag."""
    with suppress(Exception):  # the server may be gone; what led here is what there is to tell
        spark.interruptTag(tag)


class ConnectJob:
    """A barrier job, told from others by a tag."""

    def __init__(self, spark: SparkSession, plan: LaunchPlan, channel: ChannelAddress, rows: DataFrame | None) -> None:
        self._plan, self._channel, self._rows = plan, channel, rows
        self._spark = spark if rows is None else rows.sparkSession
        self._tag = f"tfdist-{plan.run_id}"
        self._tasks_running = 0

    def run(self, program: bytes) -> list[bytes]:
        if len(program) > MOST_BYTES:
            raise ConfigError(
                f"train function: expected at most {MOST_BYTES >> 20} MiB of code and captured values over Spark "
                f"Connect, got {len(program) >> 20} MiB; read large data inside the function"
            )
        tasks = self._plan.tasks
        # The numbers of a range lie one in each of its partitions; those of repartition need not.
        frame = self._spark.range(0, tasks, 1, tasks) if self._rows is None else self._rows
        supervise = supervise_alone if self._rows is None else supervise_with_rows
        task = partial(supervise, self._plan, program, self._channel)
        with tagged(self._spark, self._tag), self._watched():
            return [bytes(row[0]) for row in frame.mapInArrow(task, "result binary", barrier=True).collect()]

    def cancel(self) -> None:
        interrupt(self._spark, self._tag)

    def was_cancelled(self, spark_error: str) -> bool:
        return "OPERATION_CANCELED" in spark_error or self._tag in spark_error

    def start_state(self) -> tuple[bool, str]:
        """Only of this job is known what runs: while tasks do, rows may still have to be made."""
        return self._rows is not None and self._tasks_running > 0, (
            f"Spark started {self._tasks_running} of their tasks. Spark Connect does not tell what else the cluster "
            "runs: it may have too few slots, or be busy with other jobs (use fewer slots, or raise "
            "compute.startup_timeout_s), or the executors' Python does not start (look at their log)"
        )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note how many tasks run; Spark tells it in the thread that waits for the job."""
        ours = threading.get_ident()

        def note(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:  # noqa: ARG001
            if threading.get_ident() == ours:
                self._tasks_running = inflight_tasks

        self._spark.registerProgressHandler(note)
        try:
            yield
        finally:
            self._spark.removeProgressHandler(note)


class ConnectSession:
    """A session of which this process is the client.

    Raises:
        ConfigError: the client is older than the calls that are needed.
    """

    line_needed = True  # what a worker says is all that this process hears of it

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        if not hasattr(spark, "registerProgressHandler"):
            raise ConfigError(
                "spark: expected pyspark 4.0 or later for a Spark Connect session, got an older one; update pyspark on "
                "the client, or use a classic session"
            )

    @property
    def application(self) -> str:
        return self._conf().get("spark.app.id", "")

    @property
    def python(self) -> str:
        return self._conf().get("spark.pyspark.python", "python3")

    def _conf(self) -> dict[str, str]:
        return dict(self._spark.conf.getAll)

    def facts(self) -> preflight.SparkFacts:
        conf = self._conf()
        nor = "" if "spark.master" in conf else ", nor is the configuration of the cluster"
        return preflight.SparkFacts(
            master=conf.get("spark.master", "the Spark Connect server"),
            conf=conf,
            cores=None,
            not_known=(f"how many tasks can run at once is not known over Spark Connect{nor}; a barrier job shows it",),
        )

    def addresses(self) -> tuple[str, str]:
        """See :data:`DRIVER_HOST`; without it the address that leads from here to the server.

        Raises:
            ConfigError: this machine has no such address.
        """
        host = bind = os.environ.get(DRIVER_HOST) or ""
        if not host:
            server = self._spark.client.host
            host = bind = _towards(server)
            if host in _addresses_of(server):  # it runs here too, so what its executors reach leads here
                conf = self._conf()
                host = conf.get("spark.driver.host", host)
                bind = conf.get("spark.driver.bindAddress", host)
        try:
            family, _, _, _, place = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
            socket.create_server((str(place[0]), 0), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"{DRIVER_HOST}: expected an address of this machine that executors reach, to hear from the workers, "
                f"got {bind} ({error.strerror or error}); set that environment variable"
            ) from error
        return host, str(place[0])

    def job(self, plan: LaunchPlan, channel: ChannelAddress, rows: DataFrame | None) -> ConnectJob:
        return ConnectJob(self._spark, plan, channel, rows)

    def texts(self, look: Callable[[Any], Iterator[str]], tasks: int, timeout_s: float) -> list[str]:
        # A function in a function is sent by value: executors may lack tfdist.
        def in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pyarrow

            yield pyarrow.record_batch({"text": list(look(list(batches)))})

        frame = self._spark.range(0, tasks, 1, tasks).mapInArrow(in_arrow, "text string", barrier=True)
        started = time.monotonic()
        try:
            return [row[0] for row in _collected(self._spark, frame, timeout_s)]
        except Exception as error:
            if not isinstance(error, TimeoutError) and not lacks_slots(str(error)):
                raise
            waited_s = time.monotonic() - started
            raise PreflightError(preflight.not_enough_now(self.facts(), tasks, waited_s)) from error


def _collected(spark: SparkSession, frame: DataFrame, timeout_s: float) -> list[Any]:
    """The rows of a frame; its operation is ended when this thread is interrupted or the time is over.

    Raises:
        TimeoutError: the time is over.
    """
    tag, outcome = f"tfdist-{uuid.uuid4().hex}", Future[list[Any]]()

    def call() -> None:
        try:
            with tagged(spark, tag):
                outcome.set_result(frame.collect())
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            outcome.set_exception(error)

    thread = InheritableThread(target=call, session=spark, name=tag, daemon=True)
    thread.start()
    try:
        if not wait([outcome], timeout_s).done:
            raise TimeoutError
    finally:
        give_up_at = time.monotonic() + _GIVE_UP_S
        while thread.is_alive() and not outcome.done() and time.monotonic() < give_up_at:
            interrupt(spark, tag)
            thread.join(_JOIN_S)
    return outcome.result()


def _towards(server: str) -> str:
    """The address from which packets go to a server; nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(server, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as line:
            line.connect(place)
            return str(line.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _addresses_of(server: str) -> set[str]:
    try:
        return {str(place[0]) for *_, place in socket.getaddrinfo(server, None)}
    except OSError:
        return set()
