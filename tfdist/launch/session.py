"""What a launch asks of a Spark session, be it a classic one or one of Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from tfdist.launch.channel import ChannelAddress
from tfdist.launch.preflight import SparkFacts
from tfdist.launch.protocol import LaunchPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_BYTES = 120 * 2**20
"""Of what is sent with a plan over Spark Connect; gRPC takes messages of 128 MiB on both sides."""


class BarrierJob(Protocol):
    """A barrier job with a task for each worker."""

    def run(self, program: bytes) -> list[bytes]:
        """What the workers returned; for a thread of its own, which the call holds until the job has ended."""

    def cancel(self) -> None:
        """End the job; from any other thread. May be called again, since a job that is just starting is not seen."""

    def was_cancelled(self, spark_error: str) -> bool:
        """Whether Spark's error says that :meth:`cancel` ended the job."""

    def start_state(self) -> tuple[bool, str]:
        """Of a job none of whose workers came: whether Spark is busy with what must come first, and what it does."""


class Session(Protocol):
    """The seam between launching and Spark."""

    line_needed: bool
    """Whether a worker without a line to this process must give up."""

    @property
    def application(self) -> str:
        """Identifies the Spark application."""

    @property
    def python(self) -> str:
        """What the executors start as Python, as far as known."""

    def facts(self) -> SparkFacts:
        """A snapshot of the configuration and of the tasks that can run at once now."""

    def addresses(self) -> tuple[str, str]:
        """The name under which executors reach this process, and the address on which to listen."""

    def job(self, plan: LaunchPlan, channel: ChannelAddress, rows: DataFrame | None) -> BarrierJob:
        """The job of a launch, whose tasks are the partitions of ``rows`` where there are some."""

    def texts(self, look: Callable[[Any], Iterator[str]], tasks: int, timeout_s: float) -> list[str]:
        """What ``look`` yields in each of so many barrier tasks; it gets an iterator of no use."""


def session_of(spark: Any) -> Session:
    """The session as a launch sees it."""
    # Which class a session of Spark Connect has depends on the release; none has a JVM in this process.
    if hasattr(spark, "_jsparkSession"):
        from tfdist.launch.classic import ClassicSession

        return ClassicSession(spark)
    from tfdist.launch.connect import ConnectSession

    return ConnectSession(spark)
