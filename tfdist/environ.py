"""The only place that writes ``os.environ``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ROWS_FD = "TFDIST_ROWS_FD"
"""Set in a training process to whose task rows are handed: the socket on which they arrive, as an Arrow IPC stream."""

_SECRET = re.compile(r"(?i)token|secret|password|key|credential")


def names_secret(name: str) -> bool:
    """Whether the value of a variable with this name must not be shown."""
    return _SECRET.search(name) is not None


@contextmanager
def scoped_environ(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set the given variables (None removes one) and put the old values back at the end, also after an error."""
    before = {name: os.environ.get(name) for name in changes}
    _assign(changes)
    try:
        yield
    finally:
        _assign(before)


def adopt(changes: Mapping[str, str | None]) -> None:
    """Set variables for the rest of this process; for processes that live for one training only."""
    _assign(changes)


def _assign(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
