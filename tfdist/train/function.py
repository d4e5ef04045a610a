"""Runs a user's own train function in a training process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from tfdist.cluster import worker_context
from tfdist.errors import ResultError
from tfdist.launch.pulse import At, mark


def run_train_fn(
    train_fn: Callable[..., Any], arguments: dict[str, Any], threads: int | None, custom_strategy: bool
) -> bytes:
    """Call a user's train function on this worker, inside the strategy's scope unless it makes its own.

    Returns:
        Its pickled return value.
    """
    if custom_strategy:
        return _pickled(_call(train_fn, arguments))
    from tfdist.data.failures import own_errors
    from tfdist.strategies.builders import strategy_scope

    mark(At.MEETING)
    with own_errors(), strategy_scope(worker_context().strategy, threads=threads):
        mark(At.UNMARKED)
        return _pickled(_call(train_fn, arguments))


def _call(train_fn: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return train_fn(**arguments)
    except SystemExit as end:
        if end.code in (None, 0):  # a script's way of ending well
            return None
        raise


def _pickled(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ResultError(
            f"train function: expected a return value that can be pickled, got {kind} ({error}); "
            "return numbers, arrays or a path instead"
        ) from error
