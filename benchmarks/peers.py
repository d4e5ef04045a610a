"""The two places that benchmarks compare: workers on a local Spark cluster, and plain processes with TF_CONFIG."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tfdist.environ import adopt
from tfdist.launch.ports import reserve_port

_RESULT = "RESULT "
_PROGRAM = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
print("RESULT " + json.dumps(function(**json.loads(sys.argv[4]))), flush=True)
"""


@contextmanager
def spark_session(master: str, changes: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A quiet session on a cluster of this host, with ``changes`` of its configuration."""
    conf = {
        "spark.master": master,
        "spark.pyspark.python": sys.executable,
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **(changes or {}),
    }
    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def spark_cluster(workers: int = 2) -> Iterator[SparkSession]:
    """A session with ``workers`` executors of one core each on this host."""
    adopt({"SPARK_LOCAL_IP": "127.0.0.1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    with spark_session(f"local-cluster[{workers},1,2048]") as session:
        session.range(0, workers, 1, workers).count()  # its executors are there
        yield session


def run_bare(function: str, arguments: dict[str, Any], workers: int = 2) -> list[Any]:
    """Call ``module.function`` of this folder in new processes that form one TF_CONFIG cluster.

    Args:
        function: as ``module.name``.
        arguments: JSON values.
        workers: number of processes.

    Returns:
        What each returned, by rank; JSON values.
    """
    module, _, name = function.rpartition(".")
    with ExitStack() as cleanup:
        hosts = [f"127.0.0.1:{cleanup.enter_context(reserve_port())}" for _ in range(workers)]
        processes = []
        for rank in range(workers):
            cluster = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent), module, name, json.dumps(arguments)],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(cluster),
                    "CUDA_VISIBLE_DEVICES": "",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            cleanup.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate()[0] for process in processes]
    results = [next((ln for ln in text.splitlines() if ln.startswith(_RESULT)), None) for text in outputs]
    assert all(results), "\n".join(outputs)
    return [json.loads(line.removeprefix(_RESULT)) for line in results if line]


def print_table(rows: Sequence[tuple[str, Sequence[float]]], unit: str, baseline: str) -> None:
    """Median, smallest and largest of each row's values, and the median ratio to ``baseline``, round by round.

    Args:
        rows: name and one value for each round.
        unit: of the values.
        baseline: name of the row that the others are divided by.
    """
    base = dict(rows)[baseline]
    print(f"{'':32}{'median':>10}{'min':>10}{'max':>10}{'ratio':>8}   ({unit}, {len(base)} rounds)")
    for name, values in rows:
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        figures = (statistics.median(values), min(values), max(values))
        print(f"{name:32}" + "".join(f"{figure:10.2f}" for figure in figures) + f"{ratio:8.3f}")
