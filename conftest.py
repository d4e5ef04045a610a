"""What all tests share: quiet small processes, one Spark session, and proof that no training process is left.

``TFDIST_TEST_CLUSTER`` names another cluster for the session: ``standalone``, ``connect``, or a local master.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from pyspark.sql import SparkSession

from benchmarks import standalone
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
def standalone_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Master and two Workers with one core each, on free ports of the loopback; gives the master's address."""
    with standalone.standalone_cluster(tmp_path_factory.mktemp("standalone")) as master:
        yield master


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Spark Connect server over a cluster of two executors with one core each; gives its address."""
    conf = {
        **_conf(tmp_path_factory.mktemp("connect")),
        "spark.master": "local-cluster[2,1,1024]",
        "spark.log.level": "INFO",  # it says where it listens
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
    }
    arguments = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    submit = ("org.apache.spark.deploy.SparkSubmit", "--class", server, *arguments, "spark-internal")
    environ = standalone.daemon_environ(SPARK_LOCAL_IP="127.0.0.1")
    with standalone.daemon(*submit, ready=r"server started at: 127\.0\.0\.1:\d+", environ=environ) as ready:
        yield "sc://" + ready.rpartition(" ")[2]


def _conf(folder: Path) -> dict[str, str]:
    return {
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


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A cluster of two executors with one core each, in processes of their own; stopped at the end of all tests."""
    cluster = os.environ.get("TFDIST_TEST_CLUSTER", "local-cluster[2,1,2048]")
    if cluster == "connect":
        with SparkSession.builder.remote(request.getfixturevalue("connect_server")).getOrCreate() as session:
            yield session
        return
    conf = {**_conf(tmp_path_factory.mktemp("spark")), "spark.master": cluster}
    if cluster == "standalone":
        conf |= {"spark.master": request.getfixturevalue("standalone_cluster"), "spark.executor.memory": "1g"}
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
