"""Strategies by name: what places the variables of a training."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.cluster import worker_context
from tfdist.errors import ConfigError, PortTakenError
from tfdist.strategies.corrections.randomness import seed_everything
from tfdist.strategies.keras_compat import keras_corrections


@dataclass(frozen=True)
class StrategySpec:
    """A way to place variables.

    Args:
        name: as in ``ComputeConfig.strategy``.
        build: makes the strategy in this process.
        cannot: what it does not do, for a person to read.
    """

    name: str
    build: Callable[[], Any]
    cannot: str


def _build_single() -> Any:
    return tf.distribute.get_strategy()


def _build_mirrored() -> Any:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy([device.name for device in devices])


def _build_multi_worker_mirrored() -> Any:
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}")
    if not cluster.get("cluster", {}).get("worker"):
        raise ConfigError(
            "TF_CONFIG: expected the addresses of the workers, got none; strategy 'multi_worker_mirrored' runs where a "
            "launcher of tfdist starts it, with several slots"
        )
    try:
        # No CommunicationOptions(timeout_seconds=): for each collective TensorFlow would start a thread that sleeps as
        # long as the timeout, until the system has no threads left. The driver sees to it that nobody waits for ever.
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.UnknownError as error:
        if "start gRPC server" not in str(error):
            raise
        mine = cluster["cluster"]["worker"][cluster["task"]["index"]]
        raise PortTakenError(f"expected to listen on {mine}, and another process took the port first") from error
    except RuntimeError as error:
        raise ConfigError(
            "strategy 'multi_worker_mirrored': expected a process in which TensorFlow has run nothing, got one with "
            f"devices in use ({error}); move TensorFlow operations (tensors, list_logical_devices, models) from the "
            "top of modules into the train function, after the strategy is made"
        ) from error


STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec("single", _build_single, "use more than one device of one process"),
        StrategySpec("mirrored", _build_mirrored, "use devices of another process"),
        StrategySpec("multi_worker_mirrored", _build_multi_worker_mirrored, "compile steps by XLA across workers"),
    )
}


def build(name: str, *, threads: int | None = None) -> Any:
    """Make a strategy.

    Args:
        name: one of :data:`STRATEGIES`.
        threads: TensorFlow's intra-op threads in this process; None leaves its own choice.

    Returns:
        The ``tf.distribute.Strategy``.

    Raises:
        ConfigError: the name is unknown, or this process is not one in which the strategy can be made.
        PortTakenError: another process listens on this worker's port.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    if threads is not None:
        _set_threads(threads)
    return STRATEGIES[name].build()


def _set_threads(threads: int) -> None:
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError as error:
        raise ConfigError(
            f"threads_per_worker: expected a process in which TensorFlow has run nothing, to give it {threads}, got "
            f"one in which it has started ({error}); move TensorFlow operations from the top of modules into the train "
            "function"
        ) from error


@contextmanager
def strategy_scope(name: str, *, threads: int | None = None, seed: int | None = None) -> Iterator[Any]:
    """Build a strategy, correct Keras for it and enter its scope.

    Args:
        name: one of :data:`STRATEGIES`.
        threads: TensorFlow's intra-op threads in this process; None leaves its own choice.
        seed: makes the training reproducible, see :func:`seed_everything`; None seeds nothing.

    Yields:
        The ``tf.distribute.Strategy``.
    """
    strategy = build(name, threads=threads)
    logger = logging.getLogger("tensorflow")
    logger.addFilter(_tells_something)
    try:
        with keras_corrections(strategy), strategy.scope():
            if seed is not None:
                seed_everything(seed, worker_context().rank)
            yield strategy
    finally:
        logger.removeFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    # Metrics are summed over workers outside of a compiled step once an epoch, and TensorFlow warns of its cost.
    return "eagerly has significant overhead" not in record.getMessage()
