"""A look at the executors before a training: a barrier job of about a second, without TensorFlow.

What runs on the executors, :func:`look`, uses the standard library and pyspark only and is sent by value: so it says
which Python runs there also where that one lacks tfdist.
"""

from __future__ import annotations

import getpass
import importlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pyspark.cloudpickle
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

from tfdist.launch.hosts import INTERPRETER_REMEDY, HostFacts
from tfdist.launch.session import session_of

_MARK = ".tfdist-check-"


def probe(
    spark: SparkSession, tasks: int, folders: Mapping[str, Path], timeout_s: float = 120.0
) -> tuple[HostFacts, list[HostFacts]]:
    """Start ``tasks`` barrier tasks that say what they find; there must be slots for them.

    Args:
        spark: the session.
        tasks: one for each worker.
        folders: setting to a folder that the driver and the workers are to share; one that does not exist stands for
            the folder in which it would be made. Nothing is left in them.
        timeout_s: how long to wait for slots where a session does not tell how many it has.

    Returns:
        What the driver and each task found, by rank.

    Raises:
        PreflightError: there are fewer slots.
        Exception: Spark's own, when its Python workers do not start; see :func:`why_not_started`.
    """
    token = secrets.token_hex(8)
    # A number in each name, since two settings may stand for one folder.
    names = {setting: f"{_MARK}{token}-{number}" for number, setting in enumerate(folders)}
    marks = {setting: str(_existing(folder) / names[setting]) for setting, folder in folders.items()}
    session = session_of(spark)
    with _written(marks, token) as refused:
        here = {setting: (not why, why, None) for setting, why in refused.items()}
        driver = HostFacts.from_json({"rank": -1, "folders": here, **_describe()})
        module = sys.modules[__name__]
        pyspark.cloudpickle.register_pickle_by_value(module)
        try:
            found = session.texts(partial(look, marks, token), tasks, timeout_s)
        finally:
            pyspark.cloudpickle.unregister_pickle_by_value(module)
    return driver, sorted((HostFacts.from_json(json.loads(text)) for text in found), key=lambda host: host.rank)


def why_not_started(error: Exception, spark: SparkSession) -> str | None:
    """The problem when ``error`` of a Spark job says that the executors' Python does not start or does not fit."""
    text = str(error)
    worker = re.search(r"Cannot run program \"?([^\"\n]+?)\"?[:\s].*", text)
    other = re.search(r"PYTHON_VERSION_MISMATCH.*|Python in worker has different version.*", text)
    missing = re.search(r"ModuleNotFoundError: .*", text)
    first = worker or other or missing
    if first is None:
        return None
    theirs = session_of(spark).python
    return (
        f"PYSPARK_PYTHON: expected a Python on the executors like the driver's {sys.executable} "
        f"({sys.version.split()[0]}), got {theirs}: {first[0].strip()}; {INTERPRETER_REMEDY}"
    )


@contextmanager
def _written(marks: Mapping[str, str], token: str) -> Iterator[dict[str, str]]:
    """On the driver: marks for the length of the block; yields for each why it could not be written, or nothing."""
    refused = {}
    try:
        for setting, mark in marks.items():
            refused[setting] = _write(mark, token)
        yield refused
    finally:
        for own in map(Path, marks.values()):
            with suppress(OSError):
                for path in own.parent.glob(f"{own.name}*"):  # also those of a task that was killed
                    path.unlink(missing_ok=True)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def look(marks: Mapping[str, str], token: str, _rows: Any) -> Iterator[str]:
    """On an executor: what this task finds, as JSON."""
    task = BarrierTaskContext.get()
    rank = task.partitionId()
    written: list[str] = []
    looks: dict[str, list[Any]] = {}
    try:
        for setting, mark in marks.items():
            seen, why = _finds(mark, token), _write(f"{mark}-{rank}", token)
            written += [] if why else [f"{mark}-{rank}"]
            looks[setting] = [seen, why, None]
        first = json.loads(task.allGather(json.dumps(looks))[0])
        for setting, mark in marks.items():
            if not first[setting][1]:
                looks[setting][2] = _finds(f"{mark}-0", token)
        task.barrier()  # nobody takes its file away while others look for it
    finally:
        for path in written:
            with suppress(OSError):
                os.unlink(path)
    devices = {key: list(resource.addresses) for key, resource in task.resources().items()}
    address = re.sub(r":\d+$", "", task.getTaskInfos()[rank].address)
    yield json.dumps({"rank": rank, "folders": looks, **_describe(), "devices": devices, "address": address})


def _describe() -> dict[str, Any]:
    """What a process says of itself; the standard library only."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    local = os.environ.get("TFDIST_LOCAL_DIR") or tempfile.gettempdir()
    names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user of a container without an entry in /etc/passwd
        user = f"user {os.getuid()}"
    return {
        "host": socket.gethostname(),
        "address": socket.gethostname(),
        "user": user,
        "interpreter": sys.executable,
        "python": sys.version.split()[0],
        "versions": _versions(),
        "devices": {},
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": cores,
        "free_memory": _free_memory(),
        "local_dir": local,
        "free_disk": shutil.disk_usage(local).free if os.path.isdir(local) else 0,
        "proxies": [key for key in (*names, *map(str.upper, names)) if os.environ.get(key)],
    }


def _versions() -> dict[str, str | None]:
    """Versions without an import of TensorFlow; its builds (cpu, gpu, nightly) count as TensorFlow."""
    builds = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-intel", "tf-nightly", "tf-nightly-cpu")
    found: dict[str, str | None] = {}
    for package, names in {
        "tfdist": (),
        "tensorflow": builds,
        **{name: (name,) for name in ("keras", "numpy", "pyarrow")},
    }.items():
        found[package] = None
        for name in names:
            with suppress(metadata.PackageNotFoundError):
                found[package] = found[package] or metadata.version(name)
    with suppress(ImportError):  # it may come as a zip file, without metadata; it imports neither TensorFlow nor Spark
        found["tfdist"] = importlib.import_module("tfdist").__version__
    return found


def _free_memory() -> int:
    """Bytes that new processes may take, 0 where the system does not say."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _write(path: str, text: str) -> str:
    """Write a new file; the reason when that fails."""
    try:
        with open(path, "x") as file:
            file.write(text)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _finds(path: str, text: str) -> bool:
    """Whether the file is there with that text; a network file system may take a moment to show it."""
    for wait_s in (0.0, 0.1, 0.4, 1.5):
        time.sleep(wait_s)
        try:
            with open(path) as file:
                if file.read() == text:
                    return True
        except OSError:
            continue
    return False
