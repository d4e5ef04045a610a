"""The corrections that make Keras 3 right under a strategy with several replicas.

They act only inside :func:`keras_corrections`. A training of several replicas then equals one process that sees the
same global batches; ``tests/parity`` shows it feature by feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from tfdist.strategies.corrections.losses import correct_losses
from tfdist.strategies.corrections.patch import Patch, patch_into
from tfdist.strategies.corrections.randomness import correct_randomness
from tfdist.strategies.corrections.statistics import correct_statistics
from tfdist.strategies.corrections.training import correct_build, correct_compilation, correct_logs, correct_steps
from tfdist.strategies.corrections.updates import correct_updates
from tfdist.strategies.versions import NEWEST, OLDEST, Version, check_keras_version


@dataclass(frozen=True)
class Correction:
    """One change to Keras; the reason is the docstring of ``install``.

    Args:
        install: replaces functions of Keras through the patch that it is given.
        first: the oldest version of Keras that needs it.
        last: the newest one tested with it.
    """

    install: Callable[[Patch], None]
    first: Version = OLDEST
    last: Version = NEWEST


CORRECTIONS: tuple[Correction, ...] = (
    Correction(correct_build),
    Correction(correct_steps),
    Correction(correct_logs),
    Correction(correct_losses),
    Correction(correct_updates),
    Correction(correct_statistics),
    Correction(correct_randomness),
    Correction(correct_compilation),
)


_active = False


@contextmanager
def keras_corrections(strategy: Any) -> Iterator[None]:
    """Correct Keras while the context lasts; everything is restored at its end.

    Models that were compiled inside keep the steps that they traced. Entering again inside does nothing, and neither
    does a strategy with one replica.

    Args:
        strategy: the ``tf.distribute.Strategy`` in force.

    Raises:
        UnsupportedVersionError: the installed Keras is out of the tested range.
    """
    global _active
    if strategy.num_replicas_in_sync == 1 or _active:
        yield
        return
    version = check_keras_version(keras.__version__)
    with ExitStack() as stack:
        patch = patch_into(stack)
        for correction in CORRECTIONS:
            if correction.first <= version <= correction.last:
                correction.install(patch)
        _active = True
        try:
            yield
        finally:
            _active = False
