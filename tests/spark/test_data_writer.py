"""Writing a frame: full disks, what a terminal shows, interruption, tables."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tfdist.data import from_dataframe
from tfdist.errors import ConfigError, DataError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_left_as_it_was(spark: SparkSession, small_disk: Path, tmp_path: Path) -> None:
    """Rows that surely do not fit are refused before Spark writes; a disk that fills is told with what to do."""
    df = spark.range(0, 400_000, 1, 2).select(F.rand(1).alias("x"))
    source, cache = str(tmp_path / "source"), small_disk / "cache"
    df.write.parquet(source)
    rows = spark.read.parquet(source)
    with pytest.raises(DataError, match=r"expected room for files of about 3\.\d MB in .*disk.* got 262\.1 kB free"):
        from_dataframe(rows, cache_dir=cache)
    few = rows.filter("x < 0.005")  # of which no estimate is of use
    kept = from_dataframe(few, cache_dir=cache)
    assert 1000 < kept.rows < 3000
    # Last: Spark's executors hold what they could not write, and the room for it, beyond the end of the job.
    with pytest.raises(DataError, match=r"a disk was full while data was written .* were free before; make room"):
        from_dataframe(df, cache_dir=cache)
    assert list(cache.iterdir()) == [kept.root]


class Terminal:
    """A terminal in place of standard output and standard error, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._master, slave = pty.openpty()
        self._text = b""
        self._file = os.fdopen(slave, "w")
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, self._file)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def text(self) -> str:
        """All that was shown, the controls left out; ends the terminal."""
        self._file.close()
        self._thread.join()
        os.close(self._master)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._text.decode())

    def _read(self) -> None:
        while True:
            try:
                self._text += os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return


def slow(spark: SparkSession, seconds: float, tasks: int = 4) -> DataFrame:
    """A frame of 10 rows a task, each task of which takes a while."""

    def wait(value):
        if value % 10 == 0:
            time.sleep(seconds)
        return value

    return spark.range(0, 10 * tasks, 1, tasks).select(F.udf(wait, "bigint")("id").alias("id"))


def test_a_terminal_shows_how_far_spark_is(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar counts the tasks of this writer alone, and a line says what was written; a job group stays as it is."""
    other = threading.Thread(target=lambda: slow(spark, 4, tasks=1).count())
    other.start()
    with monkeypatch.context() as patch:
        terminal = Terminal(patch)
        spark.sparkContext.setJobGroup("mine", "of the user")
        from_dataframe(slow(spark, 0.8, tasks=6), cache_dir=tmp_path, name="ids")
        text = terminal.text()
    other.join()
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") == "mine"
    assert list(spark.sparkContext.getJobTags()) == []
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert "writing ids" in text
    assert re.search("[1-5]/6 tasks", text), text
    assert re.findall(r"/(\d+) tasks", text)[0] == "6"
    assert re.search(r"ids: 60 rows, \d[\d.]* (bytes|kB) in \d+\.\d s", text)


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_shown_where_nobody_looks(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], progress: bool | None
) -> None:
    """Without a terminal, or with progress=False, not a byte is written and no warning; other values are refused."""
    df = slow(spark, 2.5, tasks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_dataframe(df, cache_dir=tmp_path, progress=progress)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="progress: expected True, False or None"):
        from_dataframe(spark.range(3), cache_dir=tmp_path, progress="yes")


@pytest.mark.parametrize("after_s", [0.3, 4])
def test_an_interrupted_writer_ends_its_jobs_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Ctrl-C before Spark has begun or while it writes: no task goes on, no file comes back, the session is active."""
    with monkeypatch.context() as patch:
        terminal = Terminal(patch)
        df = slow(spark, 15)
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            from_dataframe(df, cache_dir=tmp_path)
        text = terminal.text()
    timer.join()
    assert "rows" not in text
    assert SparkSession.getActiveSession() is not None
    assert list(spark.sparkContext.statusTracker().getActiveJobsIds()) == []
    assert not [t for t in threading.enumerate() if t.name in ("tfdist-write", "tfdist-progress")]
    assert from_dataframe(spark.range(3), cache_dir=tmp_path).rows == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_a_managed_table_is_reused_until_its_rows_change(spark: SparkSession, tmp_path: Path) -> None:
    """A table of the warehouse is written once while unchanged, anew after an insert and after an overwrite."""
    spark.range(0, 20, 1, 2).write.saveAsTable("rows_of_a_table")
    try:
        roots = []
        for change in (None, None, "append", "overwrite"):
            if change == "append":
                spark.range(20, 25).write.insertInto("rows_of_a_table")
            elif change:
                spark.range(0, 7, 1, 1).write.insertInto("rows_of_a_table", overwrite=True)
            handle = from_dataframe(spark.table("rows_of_a_table"), cache_dir=tmp_path)
            roots.append((handle.root, handle.rows))
    finally:
        spark.sql("drop table rows_of_a_table")
    assert roots[0] == roots[1]
    assert [rows for _, rows in roots] == [20, 20, 25, 7]
    assert len({root for root, _ in roots}) == 3
