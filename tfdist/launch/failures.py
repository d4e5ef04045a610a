"""From what the workers report to the one error that the driver raises."""

from __future__ import annotations

import builtins
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tfdist.errors import StallError, WorkerError
from tfdist.launch.protocol import Failure
from tfdist.launch.signals import ended_by, more_memory

SECONDARY_GRACE_S = 5.0
"""How long a survivor's broken collective waits for the report of the worker that caused it."""

_SHOWN_LINES = 20


def cause(failures: Sequence[Failure]) -> Failure:
    """The failure that came first and is no consequence of another."""
    return next((f for f in failures if not f.secondary), failures[0])


def worker_error(failure: Failure) -> WorkerError:
    """The error to raise for ``failure``: a WorkerError that is also of the worker's own exception type.

    The type is looked up among modules that the driver has imported already, never imported or unpickled on a
    worker's word. A type that cannot be combined with WorkerError is named in the text only.
    """
    name = failure.error_type.removeprefix("builtins.")
    stalled = _lookup(failure.error_type) is StallError  # its message names all the ranks that it concerns
    parts = [failure.message if stalled else f"rank {failure.rank} on {failure.host}: {name}: {failure.message}"]
    if failure.traceback:
        what = "What rank {} did" if stalled else "Traceback of rank {}"
        parts += ["", f"{what.format(failure.rank)}:", failure.traceback.rstrip()]
    elif failure.last_output:
        parts += ["", f"Last output of rank {failure.rank}:", *failure.last_output[-_SHOWN_LINES:]]
    facts: dict[str, Any] = {
        "rank": failure.rank,
        "host": failure.host,
        "error_type": name,
        "worker_traceback": failure.traceback,
        "last_output": failure.last_output,
    }
    text = "\n".join(parts)
    try:
        return _class_for(failure.error_type, ("message", *facts))(text, **facts)
    except Exception:  # noqa: BLE001  a type that cannot be made from a text alone; what happened must still be told
        return WorkerError(text, **facts)


def _class_for(error_type: str, attributes: Sequence[str]) -> type[WorkerError]:
    own = _lookup(error_type)
    if own is None or not issubclass(own, Exception):
        return WorkerError
    if issubclass(own, WorkerError):
        return own
    try:
        # A read-only property of the same name (TensorFlow's errors have a message) would refuse the attribute.
        plain = dict.fromkeys(attributes)
        return type(own.__name__, (WorkerError, own), {"__module__": own.__module__, **plain})
    except TypeError:  # the two have incompatible layouts or metaclasses
        return WorkerError


def _lookup(error_type: str) -> type[Any] | None:
    module, _, name = error_type.rpartition(".")
    found = getattr(sys.modules.get(module, builtins), name, None)
    return found if isinstance(found, type) else None


class TrainingEndedError(RuntimeError):
    """Carries a Failure out of a Spark task, in a form that survives as text in Spark's own error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{_MARK}{failure.to_json()}")


_MARK = "tfdist-failure "
_BARRIER_TASK = re.compile(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully")
_CRASHED = "Python worker exited unexpectedly"
_LOST_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\)(?: Reason: (.*))?")


def spark_message(spark_error: str) -> str:
    """The text of a Spark error without the lines of the Java stack."""
    text = spark_error.partition("\nJVM stacktrace:")[0]  # what follows repeats it in errors of Spark Connect
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("\t"))


def lacks_slots(spark_error: str) -> bool:
    """Whether Spark refused a barrier job because fewer tasks can run at once than it has."""
    return "[SPARK-24819]" in spark_error


def lost_task(spark_error: str, hosts: Sequence[str]) -> Failure | None:
    """The Failure of a worker whose task ended together with Spark's own process, or None.

    Args:
        spark_error: the text of Spark's error.
        hosts: the host of each rank, as far as known.
    """
    task = _BARRIER_TASK.search(spark_error)
    executor = _LOST_EXECUTOR.search(spark_error)
    if task is None or int(task[1]) >= len(hosts) or not (executor or _CRASHED in spark_error):
        return None
    rank = int(task[1])
    if executor is None:
        cause = "the Spark Python worker of its task ended (killed, or out of memory)"
        return Failure(rank, hosts[rank], "SparkTaskLost", f"{cause}. {more_memory(on_spark=True)}")
    reason = (executor[2] or "no reason given").strip().rstrip(".")
    code = re.search(r"exited with code (\d+)|exit(?:ed with)? (?:code|status):? (\d+)", reason)
    end = ended_by(int(code[1] or code[2])) if code else None
    how = reason if end is None else f"{reason}, that is {end.name}"
    advice = f". {more_memory(on_spark=True)}" if end == signal.SIGKILL or "memory" in reason else ""
    return Failure(rank, hosts[rank], "SparkExecutorLost", f"Spark lost its executor {executor[1]}: {how}{advice}")


def find_report(spark_error: str) -> Failure | None:
    """The Failure in the text of a Spark error, or None."""
    for line in spark_error.splitlines():
        _, mark, rest = line.partition(_MARK)
        if mark:
            return Failure.from_json(rest)
    return None
