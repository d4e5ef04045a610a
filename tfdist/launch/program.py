"""Turns a callable of the driver into bytes that a training process can run."""

from __future__ import annotations

import io
import marshal
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from tfdist.errors import ConfigError


def _reduce_code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    # cloudpickle 3.1.3 replaces the file name of code by "<dynamic-code>", and tracebacks and AutoGraph lose the
    # source lines. marshal keeps it, and needs equal Python versions, which Spark demands anyway.
    return marshal.loads, (marshal.dumps(code),)


class _ProgramPickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


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
    buffer = io.BytesIO()
    try:
        with _local_modules_by_value():
            _ProgramPickler(buffer).dump(program)
    except Exception as error:
        raise ConfigError(
            f"{name}: expected code and arguments that can be sent to another process, got {error}; "
            "create such objects (sessions, files, locks, models) inside the function"
        ) from error
    return buffer.getvalue()


@contextmanager
def _local_modules_by_value() -> Iterator[None]:
    registered = []
    installed = {*sys.stdlib_module_names, *metadata.packages_distributions(), "__main__"}
    already = cloudpickle.list_registry_pickle_by_value()
    for name, module in list(sys.modules.items()):
        local = isinstance(module, ModuleType) and getattr(module, "__file__", None)
        if local and name.partition(".")[0] not in installed and name not in already:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
