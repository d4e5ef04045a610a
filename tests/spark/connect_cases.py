"""What works over Spark Connect besides the contract of the launchers; tests/contract/test_clusters.py runs this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import ConfigError, LaunchError, PreflightError, WorkerError
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id
from tfdist.launch.session import session_of
from tfdist.launch.spark import SparkLauncher

TWO = tfdist.ComputeConfig(slots=2)


def rows(spark: SparkSession) -> Any:
    return spark.range(0, 400, 1, 3).selectExpr("float(id % 7) AS x", "float(id % 7 * 2) AS y", "int(id % 3) AS part")


def build_model(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.stack([inputs["x"]], axis=-1)))
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def test_a_frame_is_trained_on_and_scored_and_written_anew_each_time(spark: SparkSession, tmp_path: Path) -> None:
    """from_dataframe, fit and score work, to the weights of one process; without the plan nothing is reused."""

    def handle() -> tfdist.data.Handle:
        return tfdist.data.from_dataframe(rows(spark), label="y", features=["x"], cache_dir=tmp_path)

    train = handle()
    assert train.manifest.root != handle().manifest.root
    fit = tfdist.FitConfig(epochs=3, global_batch=40, seed=1)
    result = tfdist.fit(build_model, train, validation=train, compute=TWO, fit=fit)
    assert [worker["rank"] for worker in result.workers] == [0, 1]
    local = tfdist.ComputeConfig(slots=1, launcher="local")
    alone = tfdist.fit(build_model, train, compute=local, fit=fit)
    for ours, theirs in zip(result.model().get_weights(), alone.model().get_weights(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)

    scored = tfdist.score(rows(spark), result)
    assert scored.columns == ["x", "y", "part", "prediction"]
    found = scored.selectExpr("count(prediction) AS n", "max(abs(prediction - y)) AS off").head()
    assert found is not None
    assert found.n == 400
    assert found.off < 1.0


def test_a_stream_is_spread_anew(spark: SparkSession) -> None:
    """Spark hands the rows to the workers, in partitions made for them, whatever those of the frame are."""
    data = tfdist.data.stream(rows(spark).repartition(2), label="y", features=["x"])
    assert data.rows == 400
    assert not data.whole
    fitted = tfdist.fit(build_model, data, compute=TWO, fit=tfdist.FitConfig(epochs=2, global_batch=40))
    assert fitted.rows == 400
    assert fitted.history["loss"][1] < fitted.history["loss"][0]


def write_job(folder: Path, spark: SparkSession, slots: int) -> Path:
    rows(spark).write.parquet(str(folder / "rows"))
    job = {
        "name": "small",
        "source": {"path": str(folder / "rows")},
        "prepare": {"split": {"column": "part", "train": [0], "validation": [1], "test": [2]}, "columns": {}},
        "task": {"label": "y", "numeric": ["x"]},
        "compute": {"slots": slots},
        "fit": {"global_batch": 20},
        "output_dir": str(folder / "output"),
        "cache_dir": str(folder / "cache"),
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_check_looks_at_the_slots_of_the_server(spark: SparkSession, tmp_path: Path, connect_server: str) -> None:
    """``tfdist check`` takes a Connect server as its master, shows its slots and says what it cannot know."""
    job = write_job(tmp_path, spark, slots=2)
    command = [sys.executable, "-m", "tfdist_jobs.cli", "check", str(job), "--set", f"spark.master={connect_server}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slot 1" in done.stdout
    assert "is not known over Spark Connect" in done.stdout
    assert "no problem found" in done.stdout


def test_too_few_slots_are_told(spark: SparkSession) -> None:
    """The configuration tells how many tasks ever run at once, else the server's own refusal does, with the remedy."""
    with pytest.raises(PreflightError, match="runs 2 at most"):
        tfdist.MirroredStrategyRunner(num_slots=3, use_gpu=False).run(lambda: None)
    with pytest.raises(PreflightError, match=r"3 tasks must run at the same time .* offers fewer"):
        session_of(spark).texts(lambda _rows: iter(["x"]), 3, 60.0)


def test_a_busy_cluster_is_waited_for_no_longer_than_told(spark: SparkSession, tmp_path: Path) -> None:
    """While another operation holds the slots no worker comes: the run ends with what to do, and leaves that one."""

    def hold(batches: Any) -> Any:
        (tmp_path / "held").touch()
        while not (tmp_path / "over").exists():
            time.sleep(0.1)
        yield from batches

    other = threading.Thread(target=lambda: spark.range(0, 2, 1, 2).mapInArrow(hold, "id long").collect())
    other.start()
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.1)
        plan = LaunchPlan(new_run_id(), 2, 2, "multi_worker_mirrored")
        with pytest.raises(LaunchError, match=r"0 of 2 workers came in 3 s \(compute\.startup_timeout_s\); Spark"):
            SparkLauncher(spark, startup_timeout_s=3.0).launch(dump_program(lambda: b"", "f"), plan, lambda _: None)
        assert other.is_alive()
    finally:
        (tmp_path / "over").touch()
        other.join()


class OwnError(Exception):
    """Not one of Python's."""


def test_an_error_of_a_worker_has_its_type(spark: SparkSession) -> None:
    """The train function's own exception is raised in the client, with rank and text."""

    def fail() -> None:
        if tfdist.worker_context().rank == 1:
            raise OwnError("no such column")
        time.sleep(600)

    with pytest.raises(OwnError, match=r"rank 1 on 127\.0\.0\.1: .*no such column") as caught:
        tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(fail)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == 1


def interrupted(work: Callable[[Callable[[], None]], Any]) -> None:
    """Ctrl-C while ``work`` runs, a moment after it has called what it is given."""
    begun = threading.Event()

    def press() -> None:
        if begun.wait(120):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        work(begun.set)
    thread.join()


def test_an_interrupted_client_ends_the_training(spark: SparkSession) -> None:
    """Ctrl-C in the client ends the training processes on the executors, and the next run works at once."""
    pids: list[int] = []

    def work(begun: Callable[[], None]) -> None:
        def note(event: dict[str, Any]) -> None:
            if event["kind"] == "joined":
                pids.append(event["pid"])
            if event["kind"] == "progress":
                begun()

        def sleep() -> None:
            from tfdist.launch.protocol import emit

            emit("progress")
            time.sleep(600)

        tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, on_event=note).run(sleep)

    interrupted(work)
    assert len(pids) == 2
    for pid in pids:  # those of the supervisors; their children are looked for after each test
        below = psutil.Process(pid).children() if psutil.pid_exists(pid) else []
        assert not psutil.wait_procs(below, timeout=30)[1]
    assert tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False, results="all").run(lambda: 7) == [7, 7]


def test_an_interrupted_writer_ends_its_operation_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Ctrl-C while the executors write a data set ends the operation on the server, and no folder is left."""
    started = tmp_path / "started"

    def slow(batches: Any) -> Any:
        started.touch()
        for batch in batches:
            time.sleep(600)
            yield batch

    frame = rows(spark).mapInArrow(slow, "x float, y float, part int")
    cache = tmp_path / "cache"

    def work(begun: Callable[[], None]) -> None:
        def wait() -> None:
            while not started.exists():
                time.sleep(0.1)
            begun()

        threading.Thread(target=wait, daemon=True).start()
        tfdist.data.from_dataframe(frame, label="y", cache_dir=cache)

    interrupted(work)
    assert [path.name for path in cache.iterdir()] == []
    assert spark.range(4).mapInArrow(lambda batches: batches, "id long").count() == 4  # the executors are free


def test_an_address_of_another_machine_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """TFDIST_DRIVER_HOST names this machine; what it cannot listen on is refused before anything starts."""
    monkeypatch.setenv("TFDIST_DRIVER_HOST", "192.0.2.7")
    with pytest.raises(ConfigError, match=r"TFDIST_DRIVER_HOST: expected an address of this machine .* 192\.0\.2\.7"):
        tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(lambda: None)
    monkeypatch.setenv("TFDIST_DRIVER_HOST", "localhost")
    assert session_of(spark).addresses() == ("localhost", "127.0.0.1")


def test_a_captured_session_is_named(spark: SparkSession) -> None:
    """A train function that holds the session or a frame of it is refused with the variable's name."""
    frame = spark.range(3)
    for function, name in ((lambda: spark.range(3).count(), "spark"), (lambda: frame.count(), "frame")):
        with pytest.raises(ConfigError, match=rf"'{name}', a pyspark\.sql\.connect\..*stays in the process"):
            tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(function)


def test_what_is_too_large_for_a_message_is_told_early(spark: SparkSession) -> None:
    """A train function with 121 MiB of values, and a model of that size, are refused before anything is sent."""
    import keras

    values = bytes(121 << 20)
    with pytest.raises(ConfigError, match="at most 120 MiB of code and captured values over Spark Connect, got 121"):
        tfdist.MirroredStrategyRunner(num_slots=2, use_gpu=False).run(lambda: len(values))
    inputs = keras.Input((), name="part", dtype="int32")
    table = keras.layers.Embedding(121 << 18, 1, embeddings_initializer="zeros")
    model = keras.Model(inputs, keras.layers.Reshape((1,))(table(inputs)))
    with pytest.raises(ConfigError, match="model: expected at most 120 MiB over Spark Connect"):
        tfdist.score(rows(spark), model)
