"""The same job under spark-submit, against a standalone cluster started from the installed pyspark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import psutil
import yaml

from benchmarks.standalone import SPARK_BIN

ROOT = Path(__file__).parents[2]


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
