"""Finds in a program the variable that keeps it from being sent to another process."""

from __future__ import annotations

import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_FILES = (io.TextIOWrapper, io.BufferedIOBase, io.FileIO)
_CONNECTED = ("SparkSession", "DataFrame")
_DEEPEST = 12


def refusal(value: Any) -> str | None:
    """Why a value that could be pickled must not be: its copy would not be what the user means."""
    if isinstance(value, _FILES) and not isinstance(value, io.BytesIO) and value not in (sys.stdout, sys.stderr):
        return "an open file stays where it was opened"
    if type(value).__module__.startswith("pyspark.sql.connect.") and type(value).__name__ in _CONNECTED:
        return "Spark Connect's client stays in the process that made it"
    keras = sys.modules.get("keras")
    model = getattr(keras, "Model", None)
    if model is not None and isinstance(value, model) and getattr(value, "compiled", False):
        return "a compiled model holds variables that no strategy of the workers has made"
    return None


def culprit(program: Any, can_be_sent: Callable[[Any], bool], installed: Collection[str]) -> tuple[str, Any] | None:
    """The innermost value inside ``program`` that cannot be sent, with what the user calls it.

    Args:
        program: cannot be sent.
        can_be_sent: decides for a value.
        installed: top-level packages whose code is sent by reference; the attributes of their objects are their own
            affair.

    Returns:
        For example ``("config['session']", session)``; None when it is ``program`` itself, or in a place without a
        name.
    """
    path, value, known = "", program, {id(program)}
    for _ in range(_DEEPEST):
        for label, inside in _parts(value, installed):
            if id(inside) not in known and not can_be_sent(inside):
                path, value = _joined(path, label), inside
                known.add(id(inside))
                break
        else:
            break
    return (path, value) if path else None


def _parts(value: Any, installed: Collection[str]) -> Iterator[tuple[str, Any]]:
    """What is pickled with a value: a label and the part. A label of nothing is a part that the user did not name."""
    if isinstance(value, functools.partial):
        yield "", value.func
        for argument in value.args:
            if isinstance(argument, Mapping):
                yield from ((str(key), inside) for key, inside in argument.items())
            else:
                yield "", argument
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield "", value.__func__
    elif isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] not in installed or value.__module__ == "__main__":
            yield from _of_function(value)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inside) for key, inside in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", inside) for number, inside in enumerate(value))
    elif isinstance(value, type):
        yield from ((f".{name}", inside) for name, inside in vars(value).items() if not name.startswith("__"))
    elif _is_the_users(value, installed):
        yield from ((f".{name}", inside) for name, inside in vars(value).items())
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith("tfdist."):
        yield from (("", getattr(value, field.name)) for field in dataclasses.fields(value))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in dict.fromkeys(_global_names(function.__code__)):
        if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_the_users(value: Any, installed: Collection[str]) -> bool:
    module = type(value).__module__
    return hasattr(value, "__dict__") and (module == "__main__" or module.partition(".")[0] not in installed)


def _joined(path: str, label: str) -> str:
    """``a`` and ``.b`` or ``['b']`` become one name; the variable of an inner function stands for itself."""
    if not label:
        return path
    return path + label if label[0] in ".[" else label
