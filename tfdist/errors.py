"""The error tree. Each error derives from :class:`TfdistError` and from the builtin that a caller would expect."""

from __future__ import annotations

from collections.abc import Sequence


class TfdistError(Exception):
    """Base of every error that tfdist raises on purpose."""


class ConfigError(TfdistError, ValueError):
    """A setting is wrong. ``problems`` holds every problem found, each ``where: expected, got; what to do``."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(TfdistError, ValueError):
    """The data does not fit the plan: a column is missing, has nulls without a policy, or has an unusable type."""


class UnsupportedVersionError(TfdistError, RuntimeError):
    """A library has a version for which the training was never shown to be right."""


class PreflightError(ConfigError):
    """The cluster cannot run the training as asked; found before any worker started."""


class LaunchError(TfdistError, RuntimeError):
    """The workers could not be brought together (handshake, versions, ports)."""


class WorkerError(TfdistError, RuntimeError):
    """The training failed on a worker.

    An instance raised by the driver derives from the worker's own exception type too where the driver can import it,
    so ``except ValueError`` around a training catches a ``ValueError`` of the train function.

    Attributes:
        rank: the worker that failed first, or None when Spark lost the task before the worker could say so.
        host: that worker's host.
        error_type: qualified name of the exception raised on the worker, or the name of the signal that ended it.
        worker_traceback: the traceback as text, as printed on the worker; empty for a process that was killed.
        last_output: the last lines that the worker printed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str = "",
        error_type: str = "",
        worker_traceback: str = "",
        last_output: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.host = host
        self.error_type = error_type
        self.worker_traceback = worker_traceback
        self.last_output = tuple(last_output)
        self.message = message
        super().__init__(message)

    def __str__(self) -> str:
        return self.message


class StallError(WorkerError):
    """No worker went on for ``stall_timeout_s``; ``rank`` is (the first of) those that the others waited for.

    ``worker_traceback`` holds the Python frames of its main thread at that moment, the innermost first.
    """


class PortTakenError(LaunchError):
    """Another process took a worker's port before TensorFlow did; launchers start the workers anew with other ports."""


class ResultError(TfdistError, RuntimeError):
    """The training ended well but its return value could not be brought to the driver."""


class DivergenceError(TfdistError, RuntimeError):
    """The workers ended with different weights although the strategy keeps them equal; the model is not published."""
