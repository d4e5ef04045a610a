"""The Spark session of a job: the active one, or one of the job's own that ends with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tfdist.environ import scoped_environ

from .spec import Spark

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


@contextmanager
def job_session(wanted: Spark, name: str) -> Iterator[SparkSession]:
    """The active session as it is, or a new one that is stopped at the end.

    Executors of a new session run the driver's interpreter, so that they find the same packages. Under spark-submit
    its master and settings win over ``wanted``. A master ``sc://host:port``, or Spark's variable ``SPARK_REMOTE``, is a
    Spark Connect server.

    Args:
        wanted: the section ``spark`` of the job.
        name: application name of a new session.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    remote = os.environ.get("SPARK_REMOTE") or (wanted.master if wanted.master.startswith("sc://") else "")
    if remote:
        yield from _connected(remote, wanted)
        return
    submitted = _submitted_conf() if "PYSPARK_GATEWAY_PORT" in os.environ else {}
    conf = {
        "spark.master": wanted.master,
        "spark.app.name": name,
        **_DEFAULTS,
        **{key: _text(value) for key, value in wanted.conf.items()},
        **submitted,
    }
    environ = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", conf.get("spark.pyspark.python", sys.executable))}
    if conf["spark.master"].startswith("local"):
        # Everything is on this host: a host name that does not resolve, or a firewall, must not matter.
        environ["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
        conf.setdefault("spark.driver.host", environ["SPARK_LOCAL_IP"])
    with scoped_environ(environ):
        builder = SparkSession.builder
        for key, value in conf.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


def _connected(remote: str, wanted: Spark) -> Iterator[SparkSession]:
    """A session of a Spark Connect server, whose executors have the server's interpreter."""
    builder = SparkSession.builder.remote(remote)
    for key, value in wanted.conf.items():
        builder = builder.config(key, _text(value))
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _submitted_conf() -> dict[str, str]:
    """The settings that spark-submit gave to the JVM that it has started."""
    SparkContext._ensure_initialized()  # without the connection to that JVM, a SparkConf is empty
    return dict(SparkConf().getAll())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
