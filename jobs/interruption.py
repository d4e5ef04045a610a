"""A job that is ended from outside, by Ctrl-C or by a scheduler's SIGTERM."""

from __future__ import annotations

import signal


def interrupt_on_sigterm() -> None:
    """Make SIGTERM in this process what Ctrl-C is: the workers are ended and the run is closed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def was_interrupted(error: BaseException) -> bool:
    """Whether ``error`` is an interruption or came of one.

    In a call to Spark's JVM an interruption arrives as an error of the connection that was open.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, KeyboardInterrupt):
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False
