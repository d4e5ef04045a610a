"""The same job under spark-submit, against a standalone cluster started from the installed pyspark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import psutil
import pyspark
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPARK_BIN = Path(pyspark.__file__).parent / "bin"
START_TIMEOUT_S = 120.0


@contextmanager
def daemon(*arguments: str, ready: str, environ: dict[str, str]) -> Iterator[str]:
    """A Spark daemon from its start to its end; gives what ``ready`` matched in its log."""
    process = subprocess.Popen(
        [SPARK_BIN / "spark-class", *arguments],
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
        found.wait(START_TIMEOUT_S)
        match = re.search(ready, "".join(lines))
        assert match, "".join(lines)
        yield match[0]
    finally:
        process.terminate()
        process.wait()
        reader.join()


@pytest.fixture(scope="session")
def standalone_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Master and two Workers with one core each, on free ports of the loopback; gives the master's address."""
    folder = tmp_path_factory.mktemp("standalone")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    environ = {**inherited, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "512m"}
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as cluster:
        master = cluster.enter_context(
            daemon("org.apache.spark.deploy.master.Master", *local, ready=r"spark://127\.0\.0\.1:\d+", environ=environ)
        )
        for number in range(2):
            worker = ("--cores", "1", "--memory", "2g", "--work-dir", str(folder / f"worker{number}"), master)
            cluster.enter_context(
                daemon(
                    "org.apache.spark.deploy.worker.Worker",
                    *local,
                    *worker,
                    ready="Successfully registered with master",
                    environ=environ,
                )
            )
        yield master


def write_job(folder: Path) -> Path:
    """A small table and a job that trains on it with two workers."""
    rng = np.random.default_rng(5)
    x, kind = rng.normal(size=900), rng.choice(["red", "green"], size=900)
    table = pd.DataFrame({"x": x, "kind": kind, "part": np.arange(900) % 3, "y": 1.0 * (x + (kind == "red") > 0.5)})
    table.astype({"x": "float32", "y": "float32", "part": "int32"}).to_parquet(folder / "rows.parquet")
    job: dict[str, Any] = {
        "name": "small",
        "source": {"path": str(folder / "rows.parquet")},
        "prepare": {"split": {"column": "part", "train": [0], "validation": [1], "test": [2]}},
        "task": {"label": "y", "numeric": ["x"], "categorical": ["kind"], "learning_rate": 0.01},
        "nulls": {"kind": {"fill": ""}, "x": {"fill": 0.0}, "y": "drop"},
        "fit": {"epochs": 8, "global_batch": 32, "seed": 1},
        "compute": {"slots": 2},
        # Were this taken, the job would not run on the cluster that spark-submit names.
        "spark": {"master": "local[1]"},
        "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "experiment": "submitted"},
        "output_dir": str(folder / "output"),
        "cache_dir": str(folder / "cache"),
        "baselines": ["class_prior"],
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_spark_submit_runs_the_job_on_two_workers_of_a_cluster(standalone_cluster: str, tmp_path: Path) -> None:
    """spark-submit's master wins over the job's own; the job trains on both executors, is tracked, leaves nothing."""
    command: list[str | Path] = [
        SPARK_BIN / "spark-submit",
        *("--master", standalone_cluster, "--driver-memory", "1g", "--executor-memory", "1g"),
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
        *(ROOT / "jobs" / "run_job.py", write_job(tmp_path), "--set", "fit.epochs=6"),
    ]
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    before = {p.pid for p in psutil.Process().children(recursive=True)}  # of other tests: a session, a warm parent
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "output" / "model" / "model.keras").exists()

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("submitted")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["test_auc"] > 0.9
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == list(range(6))

    now = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    left = [p for p in now if _runs_python_for_spark(p)]
    assert not psutil.wait_procs(left, timeout=30)[1]


def _runs_python_for_spark(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    # The executors of the tests' own session are not this cluster's.
    return "tfdist.launch" in command and "SPARK_STANDALONE" not in command
