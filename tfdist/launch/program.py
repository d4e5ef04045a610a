"""Turns a callable of the driver into bytes that a training process can run."""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from tfdist.errors import ConfigError
from tfdist.launch.captured import culprit, refusal


def _reduce_code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    # cloudpickle 3.1.3 replaces the file name of code by "<dynamic-code>", and tracebacks and AutoGraph lose the
    # source lines. marshal keeps it, and needs equal Python versions, which Spark demands anyway.
    return marshal.loads, (marshal.dumps(code),)


class _ProgramPickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        why = refusal(value)
        if why:
            raise pickle.PicklingError(why)
        return super().reducer_override(value)


def dump_program(program: Callable[[], Any], name: str) -> bytes:
    """Pickle ``program``.

    Code of modules that no installed distribution owns (the user's script and the files beside it) is sent by value,
    since executors could not import it; everything else by reference.

    Args:
        program: called without arguments on every worker.
        name: what the error calls it.

    Raises:
        ConfigError: it holds something that cannot be sent to another process.
    """
    with _local_modules_by_value() as installed:
        try:
            return _dumped(program)
        except Exception as error:
            raise ConfigError(_cannot_be_sent(program, name, error, installed)) from error


def _dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ProgramPickler(buffer).dump(value)
    return buffer.getvalue()


def _can_be_sent(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:  # noqa: BLE001  whatever an object's own pickling raises
        return False
    return True


def _cannot_be_sent(program: Any, name: str, error: Exception, installed: Collection[str]) -> str:
    found = culprit(program, _can_be_sent, installed)
    why = next(iter(str(error).splitlines()), type(error).__name__)
    if found:
        kind = type(found[1])
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        why = f"{found[0]!r}, a {module}{kind.__qualname__}: {why}"
    return (
        f"{name}: expected code and arguments that can be sent to another process, got {why}; create such objects "
        "(sessions, files, locks, models) inside the function"
    )


@contextmanager
def _local_modules_by_value() -> Iterator[Collection[str]]:
    registered = []
    installed = {*sys.stdlib_module_names, *metadata.packages_distributions(), "__main__"}
    already = cloudpickle.list_registry_pickle_by_value()
    for name, module in list(sys.modules.items()):
        local = isinstance(module, ModuleType) and getattr(module, "__file__", None)
        if local and name.partition(".")[0] not in installed and name not in already:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield installed
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
