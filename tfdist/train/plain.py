"""Python values as JSON and arrays, without pickle: what a checkpoint keeps of callbacks and random states."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Functions are kept by name and looked up again; no other code is found by what a checkpoint says.
_FUNCTION_HOMES = ("keras", "numpy", "tensorflow")


class NotPlainError(TypeError):
    """A value that is no plain one: an object, a file, a function of the user's."""


def to_plain(value: Any, arrays: dict[str, np.ndarray], key: str) -> Any:
    """A value as JSON; its arrays are copied into ``arrays`` under names that begin with ``key``.

    Raises:
        NotPlainError: it holds something else than numbers, texts, arrays, the usual containers of them, and functions
            of Keras.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        name = f"{key}.{len(arrays)}"
        arrays[name] = storable(np.asarray(value))
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: name, "dtype": value.dtype.name, "shape": list(value.shape)}
    for kind, sequence in _SEQUENCES.items():
        if type(value) is sequence:
            return {kind: [to_plain(v, arrays, key) for v in value]}
    if type(value) is dict:
        pairs = [(to_plain(k, arrays, key), to_plain(v, arrays, key)) for k, v in value.items()]
        return {"dict": [list(pair) for pair in pairs]}
    if callable(value):
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if _function(name) is value:
            return {"function": name}
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def from_plain(plain: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of :func:`to_plain`."""
    if not isinstance(plain, dict):
        return plain
    kind, content = next(iter(plain.items()))
    if kind in ("array", "number"):
        value = as_stored(arrays[content], np.dtype(plain["dtype"]), tuple(plain["shape"]))
        return value.copy() if kind == "array" else value[()]
    if kind == "dict":
        return {from_plain(k, arrays): from_plain(v, arrays) for k, v in content}
    if kind == "function":
        return _function(content)
    return _SEQUENCES[kind](from_plain(v, arrays) for v in content)


def storable(array: np.ndarray) -> np.ndarray:
    """A copy as a dtype that NumPy's files know: bytes for bfloat16, float8 and the like."""
    if array.dtype.kind in "biufc":
        return array.copy()
    return np.frombuffer(array.tobytes(), np.uint8)


def as_stored(array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array of :func:`storable`."""
    return array if array.dtype == dtype else np.frombuffer(array.tobytes(), dtype).reshape(shape)


def _function(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.partition(".")[0] in _FUNCTION_HOMES else None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
