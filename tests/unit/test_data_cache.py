"""The cache of data sets: what the command lists, shows, deletes, and what is over its time."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tfdist_jobs.cli import app
from typer.testing import CliRunner

from tfdist.data import cached_data, delete_data, delete_expired, from_parquet
from tfdist.data.manifest import MANIFEST
from tfdist.errors import DataError
from tfdist.testing import tiny_parquet

DAY_S = 86400.0


def make_data(cache: Path, name: str, *, used_days_ago: float = 0, ttl_days: float | None = None) -> Path:
    """A data set as from_dataframe leaves it."""
    folder = cache / name
    folder.mkdir(parents=True)
    manifest = tiny_parquet(folder, 40).manifest
    (folder / MANIFEST).write_text(replace(manifest, ttl_days=ttl_days).to_json())
    used = time.time() - used_days_ago * DAY_S
    os.utime(folder / MANIFEST, (used, used))
    return folder


def test_data_sets_are_listed_shown_and_deleted(tmp_path: Path) -> None:
    """The command lists names, rows and leftovers, shows columns, deletes by the beginning of a name; others stay."""
    make_data(tmp_path, "flights-1a", used_days_ago=2)
    make_data(tmp_path, "flights-2b", ttl_days=3)
    (tmp_path / ".flights-3c.77-abc.writing").mkdir()
    (tmp_path / "models").mkdir()

    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["data", *words, "--cache-dir", str(tmp_path)], env={"COLUMNS": "150"})
        assert done.exit_code == code, done.output
        return done.output

    listed = run("list")
    assert listed.index("flights-2b") < listed.index("flights-1a")
    assert "unfinished" in listed
    assert "models" not in listed
    shown = run("show", "flights-1")
    assert all(text in shown for text in (str(tmp_path / "flights-1a"), "40 rows"))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line[:1] == "│"]
    assert cells == [
        ["x0", "float", "float32[]", "0", "error"],
        ["x1", "float", "float32[]", "0", "error"],
        ["x2", "float", "float32[]", "0", "error"],
        ["kind", "string", "string[]", "0", "error"],
        ["label (label)", "float", "float32[]", "0", "error"],
    ]
    assert "2 data sets begin so: flights-2b, flights-1a" in run("delete", "flights", code=2)
    assert "expected a data set" in run("show", "nothing", code=2)
    assert "expected NAME or --expired" in run("delete", code=2)
    assert "deleted flights-1a" in run("delete", "flights-1a")
    assert "nothing is over its time" in run("delete", "--expired")
    assert [d.name for d in cached_data(tmp_path) if d.manifest] == ["flights-2b"]
    assert from_parquet(tmp_path / "flights-2b").rows == 40


def test_only_what_is_over_its_time_goes(tmp_path: Path) -> None:
    """A time to live counts from the last use; data without one stays, as do fresh leftovers and foreign folders."""
    over = make_data(tmp_path, "a-over", used_days_ago=3, ttl_days=2)
    kept = [
        make_data(tmp_path, "b-used", used_days_ago=1, ttl_days=2),
        make_data(tmp_path, "c-for-ever", used_days_ago=900),
    ]
    foreign, fresh, old = tmp_path / "mine", tmp_path / ".x.1-a.writing", tmp_path / ".y.1-a.writing"
    for folder in (foreign, fresh, old):
        folder.mkdir()
    for folder in (foreign, old):
        os.utime(folder, (0, 0))
    assert {d.path for d in delete_expired(tmp_path)} == {over, old}
    assert set(tmp_path.iterdir()) == {*kept, foreign, fresh}
    assert delete_data("b", tmp_path).path == kept[0]
    with pytest.raises(DataError, match=r"which holds c-for-ever, \.x"):
        delete_data("b", tmp_path)
