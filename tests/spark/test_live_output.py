"""What a real training tells the driver while it runs, and what it tells nobody."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import WorkerError
from tfdist.testing import tiny_parquet

SECRETS = {
    name: f"unheard-{i}"
    for i, name in enumerate(("API_TOKEN", "Secret_1", "DB_PASSWORD", "STORE_KEY_ID", "MY_CREDENTIALS"))
}
LOCAL = tfdist.ComputeConfig(slots=2, launcher="local", threads_per_worker=1, env=SECRETS)
STEPS = 40


def build(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    total = keras.layers.Concatenate()([keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(total))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    return model


def slow_and_talking() -> list[Any]:
    import time

    import keras

    from tfdist.launch.protocol import emit
    from tfdist.launch.warm import runtime_dir

    class Talk(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            worker = tfdist.worker_context()
            assert worker.scratch_dir is not None
            address = Path(psutil.Process(os.getppid()).cmdline()[-2])  # of the warm parent
            assert address.is_socket()
            paths = (worker.scratch_dir, runtime_dir(), address)
            emit("modes", modes=[oct(path.stat().st_mode & 0o777) for path in paths])
            emit("secrets", lengths=[len(os.environ[name]) for name in SECRETS])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.06)
            if batch == 0:
                print(f"words of rank {tfdist.worker_context().rank}")

    return [Talk()]


def hidden(text: str) -> bool:
    return not any(value in text for value in SECRETS.values())


def test_steps_of_the_chief_and_lines_of_one_rank_reach_the_driver(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step events come in order, each before the end of its epoch; lines come of the asked rank only; files are ours.

    The values of secret variables reach the workers and no event.
    """
    events: list[dict[str, Any]] = []
    result = tfdist.fit(
        build,
        tiny_parquet(tmp_path / "train", 8 * STEPS),
        validation=tiny_parquet(tmp_path / "validation", 16),
        compute=replace(LOCAL, show_output=1),
        fit=tfdist.FitConfig(epochs=2, global_batch=8, output_dir=tmp_path / "model"),
        callbacks=slow_and_talking,
        on_event=events.append,
    )
    told = [e for e in events if e["kind"] in ("step", "epoch")]
    steps = [e for e in told if e["kind"] == "step"]
    assert {e["rank"] for e in steps} == {0}
    assert {(e["epochs"], e["steps"]) for e in steps} == {(2, STEPS)}
    assert 2 <= len(steps) < 2 * STEPS
    places = [(e["epoch"], e.get("step", STEPS + 1)) for e in told]
    assert places == sorted(places)
    assert {e["epoch"] for e in steps} == {0, 1}
    assert all(e["logs"].keys() == {"loss", "accuracy"} for e in steps)
    assert any(e["rows_per_s"] > 0 for e in steps if e["rows_per_s"] is not None)
    assert [w["rank"] for w in result.workers] == [0, 1]

    assert {e["rank"] for e in events if e["kind"] == "line"} == {1}
    assert "words of rank 1" in [e["text"] for e in events if e["kind"] == "line"]
    assert [e["modes"] for e in events if e["kind"] == "modes"] == 2 * [["0o700", "0o700", "0o600"]]
    lengths = [len(value) for value in SECRETS.values()]
    assert [e["lengths"] for e in events if e["kind"] == "secrets"] == [lengths, lengths]
    assert hidden(str(events))
    assert hidden("".join(capfd.readouterr()))


def fail_on_rank_1() -> list[Any]:
    import keras

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and tfdist.worker_context().rank == 1:
                assert [os.environ[name] for name in SECRETS] == list(SECRETS.values())
                raise OverflowError("of rank 1")

    return [Fail()]


def test_secrets_are_in_no_error_no_setting_and_no_job_description(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On Spark the values of secret variables reach the workers, and neither the driver's output nor Spark's pages."""
    compute = tfdist.ComputeConfig(slots=2, env=SECRETS)
    events: list[dict[str, Any]] = []
    with pytest.raises(OverflowError, match="of rank 1") as caught:
        tfdist.fit(
            build,
            tiny_parquet(tmp_path / "train", 80),
            compute=compute,
            fit=tfdist.FitConfig(global_batch=8, output_dir=tmp_path / "model"),
            callbacks=fail_on_rank_1,
            spark=spark,
            on_event=events.append,
        )
    error = caught.value
    assert isinstance(error, WorkerError)
    assert error.rank == 1
    assert hidden(f"{error} {error!r} {vars(error)}")
    assert hidden(str(events))
    assert hidden("".join(capfd.readouterr()))
    assert hidden(repr(compute))
    assert hidden(str(spark.sparkContext.getConf().getAll()))
    store = spark.sparkContext._jsc.sc().statusStore()
    jobs, stages = store.jobsList(None), spark.sparkContext.statusTracker()
    seen = [jobs.apply(i) for i in range(jobs.size())]
    texts = [f"{job.name()} {job.description()} {job.jobGroup()}" for job in seen]
    assert any("tfdist training" in text for text in texts)
    assert hidden(" ".join(texts))
    assert hidden(str([stages.getJobInfo(job.jobId()) for job in seen]))


SCRIPT = """
import sys
from pathlib import Path

from test_live_output import LOCAL, build, slow_and_talking

import tfdist
from tfdist.testing import tiny_parquet

folder = Path(sys.argv[1])
train, validation = tiny_parquet(folder / "train", 320), tiny_parquet(folder / "validation", 16)
fit = tfdist.FitConfig(epochs=2, global_batch=8, output_dir=folder / "model", verbose=1)
result = tfdist.fit(build, train, validation=validation, compute=LOCAL, fit=fit, callbacks=slow_and_talking)
print("the script goes on after", result.rows, "rows")
"""
WIDTH = 100
TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b])")


def run_on_terminal(arguments: list[str], cwd: Path) -> str:
    """What a program writes to a terminal of ``WIDTH`` columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, WIDTH, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "TERM")}
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    environ = {**kept, "TERM": "xterm-256color", "PYTHONPATH": path}
    process = subprocess.Popen(arguments, cwd=cwd, env=environ, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written = bytearray()
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # nobody holds the terminal any more
            break
        if not part:
            break
        written += part
    os.close(master)
    assert process.wait(timeout=60) == 0, written.decode()
    return written.decode()


def on_screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    rows: list[list[str]] = [[]]
    y = x = 0
    for argument, command, sign in TOKEN.findall(written):
        if command == "A":
            y -= int(argument or 1)
        elif command == "K":
            assert argument == "2"
            rows[y] = []
        elif command:
            assert command in "mhl", f"a command that the display does not need: {command}"
        elif sign == "\r":
            x = 0
        else:
            if sign == "\n" or x == WIDTH:
                x, y = (x if sign == "\n" else 0), y + 1
                rows += [[]] * (y == len(rows))
            if sign != "\n":
                rows[y] = [*rows[y], *" " * (x + 1 - len(rows[y]))]
                rows[y][x] = sign
                x += 1
    return ["".join(row).rstrip() for row in rows]


def test_a_terminal_shows_one_display_and_in_the_end_whole_lines(tmp_path: Path) -> None:
    """While a script trains its terminal shows steps; in the end only the lines are left, and Keras' bar never came."""
    (tmp_path / "script.py").write_text(SCRIPT)
    written = run_on_terminal([sys.executable, "script.py", str(tmp_path)], tmp_path)
    assert re.search(r"epoch 2/2.*step \d+/40.*rows/s.*elapsed, 0:\d\d left", written)
    assert "ms/step" not in written
    lines = on_screen(written)
    expected = [
        r"\[0\] words of rank 0",
        r"epoch 1/2  accuracy [\d.]+  loss [\d.]+  val_accuracy [\d.]+  val_loss [\d.]+  \d+ rows/s  \d+\.\d s",
        r"\[0\] words of rank 0",
        r"epoch 2/2  accuracy [\d.]+  loss [\d.]+  val_accuracy [\d.]+  val_loss [\d.]+  \d+ rows/s  \d+\.\d s",
        r"trained  2 epochs on 2 workers in \d+\.\d s",
        r"speed    \d+ rows/s",
        r"metrics  accuracy [\d.]+  loss [\d.]+  val_accuracy [\d.]+  val_loss [\d.]+",
        rf"model    {re.escape(str(tmp_path))}/model/model\.keras",
        r"the script goes on after 320 rows",
        "",
    ]
    assert re.fullmatch("\n".join(expected), "\n".join(lines)), "\n".join(lines)
