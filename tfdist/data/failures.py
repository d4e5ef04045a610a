"""Errors of ours that happen inside a pipeline come out of TensorFlow as themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError

_noted: deque[TfdistError] = deque(maxlen=16)


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for ``tf.numpy_function``: TensorFlow keeps no more of an error than its text."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except TfdistError as error:
            _noted.append(error)
            raise

    return call


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises an error of ours in place of TensorFlow's error that it became."""
    try:
        yield
    except tf.errors.OpError as error:
        for own in reversed(_noted):
            if str(own) in str(error):
                raise own from None
        raise
