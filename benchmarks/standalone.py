"""Spark's standalone daemons (Master, Worker) of the installed pyspark, as processes that end with a block."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pyspark

SPARK_BIN = Path(pyspark.__file__).parent / "bin"
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_START_TIMEOUT_S, _END_TIMEOUT_S = 120.0, 30.0
_MASTER_URL = r"spark://\S+:\d+"


@contextmanager
def daemon(*arguments: str | Path, ready: str, environ: Mapping[str, str], inside: Sequence[str] = ()) -> Iterator[str]:
    """A Spark daemon from its start to its end.

    Args:
        arguments: its class, and what that takes.
        ready: a pattern of the line in its log that says that it is there.
        environ: its whole environment.
        inside: a command that runs it, such as ``ip netns exec NAME``; it must become the daemon, not start it.

    Yields:
        What ``ready`` matched.
    """
    process = subprocess.Popen(
        [*inside, SPARK_BIN / "spark-class", *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    found = threading.Event()

    def follow() -> None:
        assert process.stdout is not None
        with process.stdout as log:
            for line in log:
                lines.append(line)
                if re.search(ready, line):
                    found.set()
        found.set()  # it has ended; its log says why

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        found.wait(_START_TIMEOUT_S)
        match = re.search(ready, "".join(lines))
        assert match, "".join(lines)
        yield match[0]
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        reader.join()
        left = psutil.wait_procs(below, timeout=_END_TIMEOUT_S)[1]
        assert not left, f"a daemon of Spark has ended and these processes go on: {left}"


def daemon_environ(**changes: str) -> dict[str, str]:
    """This process' environment for a daemon: without Spark settings of its own, with ``changes``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return {**inherited, "SPARK_DAEMON_MEMORY": "512m", **changes}


@contextmanager
def standalone_cluster(folder: Path, workers: int = 2, cores: int = 1, **changes: str) -> Iterator[str]:
    """A Master and Workers on free ports of the loopback.

    Args:
        folder: receives the Workers' files.
        workers: how many.
        cores: of each.
        changes: variables of the daemons.

    Yields:
        The master's address.
    """
    environ = daemon_environ(SPARK_LOCAL_IP="127.0.0.1", **changes)
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as cluster:
        master = cluster.enter_context(daemon(MASTER, *local, ready=_MASTER_URL, environ=environ))
        for number in range(workers):
            given = ("--cores", str(cores), "--memory", "2g", "--work-dir", folder / f"worker{number}", master)
            cluster.enter_context(
                daemon(WORKER, *local, *given, ready="Successfully registered with master", environ=environ)
            )
        yield master
