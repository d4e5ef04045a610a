"""The look at the executors, ``tfdist check``, and what fit, runner and jobs refuse before they launch."""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml
from click.testing import Result
from pyspark.sql import SparkSession
from tfdist_jobs.cli import app
from tfdist_jobs.cluster import look_at_cluster
from tfdist_jobs.runner import run_job
from tfdist_jobs.spec import JobSpec
from typer.testing import CliRunner

import tfdist
from tfdist.errors import ConfigError, PreflightError
from tfdist.launch import hosts
from tfdist.launch.probe import probe
from tfdist.testing import tiny_parquet


def write_job(folder: Path, spark: SparkSession, **changes: Any) -> Path:
    """A job over the view ``checked`` of 90 rows, one of which has no ``kind``."""
    rows = spark.range(90).selectExpr(
        "float(id) AS x", "IF(id = 7, NULL, string(id % 2)) AS kind", "id % 3 AS part", "float(id % 2) AS late"
    )
    rows.createOrReplaceTempView("checked")
    job = {
        "name": "small",
        "source": {"table": "checked"},
        "prepare": {"split": {"column": "part", "train": [0], "validation": [1], "test": [2]}},
        "task": {"label": "late", "numeric": ["x"], "categorical": ["kind"]},
        "nulls": {"kind": {"fill": ""}},
        "fit": {"global_batch": 20},
        "compute": {"slots": 2},
        "output_dir": str(folder / "output"),
        "cache_dir": str(folder / "cache"),
        **changes,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def check(job: Path) -> Result:
    return CliRunner().invoke(app, ["check", str(job)])


def test_a_probe_looks_at_every_slot_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Each slot tells its Python, packages, address and what it sees; folders need not exist and stay as they were."""
    folders = {"output_dir": tmp_path / "later" / "model", "cache_dir": tmp_path}
    driver, workers = probe(spark, 2, folders)
    assert [worker.rank for worker in workers] == [0, 1]
    for worker in workers:
        assert Path(worker.interpreter).parent == Path(driver.interpreter).parent == Path(sys.executable).parent
        assert worker.versions == driver.versions
        assert worker.versions["tfdist"] == tfdist.__version__
        assert all(worker.versions[name] for name in ("tensorflow", "keras", "numpy", "pyarrow"))
        assert worker.address == "127.0.0.1"
        assert worker.cores >= 1
        assert min(worker.free_memory, worker.free_disk) > 0
        assert worker.folders == dict.fromkeys(folders, hosts.Look(True, "", True))
    assert hosts.problems(driver, workers, dict.fromkeys(folders, "")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_each_hosts_own_is_found(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that leads each process elsewhere is not shared, one where nobody can write is refused; none is left."""
    monkeypatch.chdir(tmp_path)
    own, closed = "/proc/self/cwd", "/proc"
    driver, workers = probe(spark, 2, {"cache_dir": Path(own), "output_dir": Path(closed)})
    unshared, refused = hosts.problems(driver, workers, {"cache_dir": own, "output_dir": closed})
    assert unshared.startswith(f"cache_dir: expected a folder that the driver and all executors share, got {own}")
    assert refused.startswith(f"output_dir: expected a folder that all can write to, got {closed}, refused to ")
    assert [worker.folders["cache_dir"].shared for worker in workers] == [True, False]
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_without_the_packages_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors with another Python, or none that starts, are one problem with both interpreters and the setting."""
    spec = JobSpec.from_yaml(write_job(tmp_path, spark))
    venv.create(tmp_path / "bare", with_pip=False)
    bare, nowhere = str(tmp_path / "bare" / "bin" / "python"), str(tmp_path / "nowhere")
    start = tmp_path / "start"  # as on a cluster, Spark's own Python comes from the folder of Spark alone
    spark_python = ":".join(map(str, Path(pyspark.__file__).parent.glob("python/lib/*.zip")))
    start.write_text(f'#!/bin/sh\nPYTHONPATH={spark_python} exec {bare} "$@"\n')
    start.chmod(0o755)
    for command, interpreter, what in (
        (str(start), bare, "no tfdist; no tensorflow; no keras"),
        (nowhere, nowhere, "No such file"),
    ):
        monkeypatch.setattr(spark.sparkContext, "pythonExec", command)
        (problem,) = look_at_cluster(spec, spark).problems
        assert problem.startswith("PYSPARK_PYTHON: ")
        for text in (sys.executable, interpreter, what, "spark.pyspark.python"):
            assert text in problem


def test_a_check_of_a_good_job_shows_its_hosts(spark: SparkSession, tmp_path: Path) -> None:
    """The driver and each slot have a line with their packages, the element spec follows, and the exit code is 0."""
    result = check(write_job(tmp_path, spark))
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in re.sub("[┃│]", "|", result.stdout).splitlines()]
    for name in ("driver", "slot 0", "slot 1"):
        (line,) = (line for line in lines if line.startswith(f"| {name} |"))
        assert f"| {tfdist.__version__} |" in line
        assert str(Path(sys.executable).parent) in line
    assert "| kind | string | string[] | 1 | fill '' |" in lines
    assert "small: no problem found" in lines


def test_a_check_finds_the_problems_of_all_stages(spark: SparkSession, tmp_path: Path) -> None:
    """Settings, cluster, expressions, names and types come in one go, each by its full path, and exit with 1.

    The filter reads a column that is told already, and is no problem of its own.
    """
    job = write_job(
        tmp_path,
        spark,
        prepare={
            "columns": {"broken": "x +"},
            "filter": "broken > 0 OR x >= 0",
            "split": {"column": "part", "train": [0], "validation": [1], "test": [2]},
        },
        task={"label": "late", "numeric": ["xx", "kind", "broken"], "categorical": []},
        nulls={},
        fit={"global_batch": 2},
        compute={"slots": 3},
        cache_dir="/proc",
    )
    result = check(job)
    assert result.exit_code == 1
    problems = [line.removeprefix("tfdist: ") for line in result.stderr.splitlines() if line.startswith("tfdist: ")]
    assert [problem.partition(":")[0] for problem in problems] == [
        "fit.global_batch",
        "compute.slots",
        "cache_dir",
        "prepare.columns.broken",
        "task.numeric",
        "task.numeric",
    ]
    assert "did you mean 'x'?" in problems[4]
    assert "'kind' of type string" in problems[5]
    assert "small: 6 problems" in result.stdout


def test_a_check_of_a_misspelled_file_says_so_once(spark: SparkSession, tmp_path: Path) -> None:
    """One misspelled key is one line, although what it should have set is missing; the exit code is 1."""
    result = check(write_job(tmp_path, spark, task={"label": "late", "numeric": ["x"], "categorial": ["kind"]}))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("tfdist: task.categorial: ")
    assert "did you mean 'categorical'?" in line


@contextmanager
def configured(spark: SparkSession, key: str, value: str) -> Iterator[None]:
    """The session with a setting that it was not started with."""
    conf = spark.sparkContext._conf
    conf.set(key, value)
    try:
        yield
    finally:
        conf._jconf.remove(key)


def nothing() -> None:
    return None


def test_every_way_to_train_refuses_what_the_rules_refuse(spark: SparkSession, tmp_path: Path) -> None:
    """With TLS in Spark neither a runner, nor fit, nor a job starts a worker; accepted explicitly, it trains."""
    job = write_job(tmp_path, spark, tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"})
    handle = tiny_parquet(tmp_path / "rows.parquet")
    runner = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False, on_event=lambda event: None)
    ways: tuple[Callable[[], Any], ...] = (
        lambda: runner.run(nothing),
        lambda: tfdist.fit(lambda schema: None, handle),
        lambda: run_job(JobSpec.from_yaml(job)),
    )
    with configured(spark, "spark.ssl.enabled", "true"):
        for way in ways:
            with pytest.raises(
                PreflightError, match=r"spark\.ssl\.enabled: .*tensorflow\.spark\.distributor\.ignoreSsl"
            ):
                way()
        with configured(spark, "tensorflow.spark.distributor.ignoreSsl", "true"):
            assert runner.run(nothing) is None


def test_objects_of_spark_are_named_before_a_launch(spark: SparkSession) -> None:
    """A session, a context or a frame in a train function is named by its variable and type."""
    session, context, frame = spark, spark.sparkContext, spark.range(3)
    runner = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False)
    for train_fn, named in (
        (lambda: session.range(1), r"'session', a pyspark\..*SparkSession"),
        (lambda: context.version, r"'context', a pyspark\..*SparkContext"),
        (lambda: frame.count(), r"'frame', a pyspark\..*DataFrame"),
    ):
        with pytest.raises(ConfigError, match=named):
            runner.run(train_fn)


def test_a_compiled_model_is_named_before_a_launch(spark: SparkSession) -> None:
    """A compiled model belongs to the process that made it and is named; one that is not compiled travels."""
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    runner = tfdist.MirroredStrategyRunner(num_slots=1, use_gpu=False)
    with pytest.raises(ConfigError, match=r"'model', a keras\..*Sequential: a compiled model"):
        runner.run(lambda: model.count_params())
