"""What a process that ended without a word died of, and which setting of Spark gives it more memory."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Sequence

_OUT_OF_MEMORY = re.compile(r"std::bad_alloc|MemoryError|[Cc]annot allocate memory|failed to allocate|out of memory")
_BY_SHELL = 128  # a shell tells the end by signal n as status 128 + n


def ended_by(status: int) -> signal.Signals | None:
    """The signal that an exit status tells of, if it does."""
    number = -status if status < 0 else status - _BY_SHELL
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def describe_end(status: int, last_output: Sequence[str], *, on_spark: bool, rss_mib: float | None) -> tuple[str, str]:
    """Why a training process ended before its program returned.

    Args:
        status: its exit status, negative for a signal.
        last_output: the last lines that it printed.
        on_spark: whether it belongs to a Spark executor, which has memory settings.
        rss_mib: its memory when it was last looked at.

    Returns:
        The name of the signal, or ``SystemExit``; and a sentence with what to do.
    """
    end = ended_by(status)
    if end is None:
        return "SystemExit", f"the process ended with exit status {status} before the train function returned"
    text = f"the process was ended by {end.name}"
    if status > 0:
        text += f" (exit status {status})"
    if end == signal.SIGKILL:
        used = "" if rss_mib is None else f"; it held {rss_mib:,.0f} MiB when last looked at"
        text += f"; the kernel does this when memory runs out{used}. {more_memory(on_spark=on_spark)}"
    elif end == signal.SIGABRT and any(_OUT_OF_MEMORY.search(line) for line in last_output):
        text += f"; its last output tells that memory ran out. {more_memory(on_spark=on_spark)}"
    elif end in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        text += ", a crash of native code; its last output shows where Python was"
    return end.name, text


def more_memory(*, on_spark: bool) -> str:
    """What gives a training process more memory. It is none of the JVM's, so spark.executor.memory does not count."""
    if not on_spark:
        return "Use fewer workers on this host, or smaller batches"
    # Spark sets this limit in its Python workers, and what they start inherits it.
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "Raise spark.executor.pyspark.memory, which limits this process, or use smaller batches"
    return "Raise spark.executor.memoryOverhead, out of which training processes live, or use smaller batches"
