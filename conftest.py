"""What all tests share: quiet small processes, one Spark session, and proof that no training process is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import psutil
import pytest
from pyspark.sql import SparkSession

from tfdist.environ import adopt

# Set before anything imports TensorFlow; every process that a test starts inherits them.
_ENVIRONMENT = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
adopt({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})

# A loaded machine is slow now and then; how long an example takes says nothing about whether it holds.
hypothesis.settings.register_profile("tfdist", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tfdist")

_END_TIMEOUT_S = 30.0


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A cluster of two executors with one core each, in processes of their own; stopped at the end of all tests."""
    folder = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.master": "local-cluster[2,1,2048]",
        "spark.app.name": "tfdist tests",
        "spark.pyspark.python": sys.executable,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.default.parallelism": "4",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        executors = [p for p in psutil.Process().children(recursive=True) if _runs(p, "pyspark.daemon")]
        session.stop()
        left = psutil.wait_procs(executors, timeout=_END_TIMEOUT_S)[1]
        assert not left, f"the Spark session is stopped and these processes go on: {left}"


@pytest.fixture(autouse=True)
def no_training_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which a training process goes on."""
    yield
    if request.path.parent.name != "unit":
        left = psutil.wait_procs(_training_processes(), timeout=_END_TIMEOUT_S)[1]
        assert not left, f"training processes go on after the test: {left}"


def _training_processes() -> list[psutil.Process]:
    """Training processes under this one: new interpreters, and forks of a warm parent (which itself may stay)."""
    below = psutil.Process().children(recursive=True)
    warm = {p.pid for p in below if _runs(p, "tfdist.launch.warm")}
    forked = [p for p in below if p.pid in warm and _parent(p) in warm]
    return forked + [p for p in below if _runs(p, "tfdist.launch.child")]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None
