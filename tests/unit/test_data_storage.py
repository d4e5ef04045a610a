"""Data behind URLs: what fsspec opens, what is refused, and that no secret is shown."""

from __future__ import annotations

import importlib.util
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tfdist_jobs.cli import app
from typer.testing import CliRunner

from tfdist.data import cached_data, delete_data, delete_expired, from_parquet, location
from tfdist.data.cache import delete_over, note_ttl
from tfdist.data.folder import Place
from tfdist.data.location import hadoop_url, open_storage
from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.data.storage import Storage
from tfdist.errors import ConfigError, DataError
from tfdist.testing import tiny_parquet, tiny_table


@pytest.fixture
def memory() -> Any:
    """An empty file system in memory."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def put(fs: Any, path: str, table: pa.Table, row_group: int = 32) -> None:
    with fs.open(path, "wb") as file:
        pq.write_table(table, file, row_group_size=row_group)


def test_files_of_any_file_system_are_read(memory: Any) -> None:
    """A folder and a file in memory give the rows that they hold, twice at once too, and travel by pickle."""
    table = tiny_table(100)
    put(memory, "/data/b.parquet", table.slice(60))
    put(memory, "/data/a.parquet", table.slice(0, 60))
    put(memory, "/data/_ignored/c.parquet", table)
    handle = pickle.loads(pickle.dumps(from_parquet("memory://data", features=["row"])))
    assert handle.root == "memory://data"
    assert [f.path for f in handle.manifest.fragments] == ["a.parquet", "b.parquet"]
    rows = handle.to_tf(global_batch=10, shuffle=False)
    pairs = [(a["row"].numpy().tolist(), b["row"].numpy().tolist()) for a, b in zip(rows, rows, strict=True)]
    assert [i for a, _ in pairs for i in a] == [i for _, b in pairs for i in b] == list(range(100))
    assert from_parquet("memory://data/b.parquet", features=["row"]).rows == 40
    again = from_parquet("memory://data/", features=["row"])
    assert again.manifest == handle.manifest
    time.sleep(0.01)
    put(memory, "/data/b.parquet", table.slice(60))
    assert from_parquet("memory://data", features=["row"]).manifest.fingerprint != handle.manifest.fingerprint
    memory.rm("/data/a.parquet")
    with pytest.raises(Exception, match=r"memory://data/a\.parquet: not found"):
        list(handle.to_tf(global_batch=100))


def test_nothing_behind_a_url_is_told_with_the_url(memory: Any) -> None:
    """A missing folder, one without Parquet files, a Delta table and a damaged file are named by their URLs."""
    with pytest.raises(DataError, match="memory://no: expected a Parquet file or a folder of them, found nothing"):
        from_parquet("memory://no")
    memory.pipe_file("/data/x.parquet", b"PAR1")
    with pytest.raises(DataError, match=r"memory://data/x\.parquet: expected a Parquet file"):
        from_parquet("memory://data")
    memory.pipe_file("/data/_delta_log/0.json", b"{}")
    with pytest.raises(DataError, match="memory://data: a Delta table; read it through Spark"):
        from_parquet("memory://data")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nofs://x/y", r"path: expected a path, or a URL of a file system that fsspec knows, got nofs"),
        ("sftp://me:hunter2@host/x", "sftp URL without a password"),
        ("https://host/x.parquet?sig=hunter2", "https URL without a password or a query"),
        (7, "path: expected a path or a URL, got int"),
    ],
)
def test_places_that_cannot_be_opened_are_refused(place: Any, words: str) -> None:
    """An unknown scheme, a secret in a URL or no place at all: the sentence has the way out and not the secret."""
    with pytest.raises(ConfigError, match=words) as caught:
        from_parquet(place)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfss", "adlfs")])
def test_a_missing_package_is_named(scheme: str, package: str) -> None:
    """Where fsspec knows the scheme and its package is not installed, the error says what to install."""
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=f"{scheme} URLs need a package .*; pip install {package}"):
        from_parquet(f"{scheme}://bucket/folder")


class Locked(fsspec.AbstractFileSystem):
    """A file system that shows its key when it refuses."""

    protocol = "locked"

    def __init__(self, key: str, **options: Any) -> None:
        super().__init__(**options)
        self.key = key

    def info(self, path: str, **options: Any) -> Any:
        raise PermissionError(f"the key {self.key} does not open {path}")


def test_secrets_travel_in_memory_only(memory: Any) -> None:
    """storage_options reach the workers in the pickled handle and appear in no text, error or manifest file."""
    put(memory, "/data/a.parquet", tiny_table(10))
    handle = from_parquet("memory://data", storage_options={"key": "hunter2"})
    assert pickle.loads(pickle.dumps(handle)).manifest.storage_options == {"key": "hunter2"}
    for text in (repr(handle), str(handle.manifest.storage), handle.manifest.to_json()):
        assert "hunter2" not in text
    assert "storage_options" not in handle.manifest.to_json()
    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(
        DataError, match=r"locked://box: looking for a file failed.*the key \*\*\* does not open"
    ) as caught:
        from_parquet("locked://box", storage_options={"key": "hunter2"})
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigError, match="storage_options: expected a dict, got str"):
        from_parquet("memory://data", storage_options="key=hunter2")


def test_urls_of_this_machine_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """file: and, where Databricks mounts it, dbfs: are local paths with the local way of reading."""
    handle = tiny_parquet(tmp_path / "data")
    assert from_parquet(f"file://{tmp_path}/data", label="label").root == handle.root
    monkeypatch.setattr(location, "DBFS_MOUNT", tmp_path)
    assert open_storage("dbfs:/data") == open_storage("dbfs:///data/") == Storage(str(handle.root))
    monkeypatch.setattr(location, "DBFS_MOUNT", tmp_path / "no")
    assert not Storage("dbfs:///data").is_local
    monkeypatch.chdir(tmp_path)
    assert from_parquet("data/part.parquet", label="label").root == handle.root


@pytest.mark.parametrize(
    ("url", "options", "spark"),
    [
        ("/a b/c", {}, "file:///a%20b/c"),
        ("s3://bucket/x", {}, "s3a://bucket/x"),
        ("s3a://bucket/x", {}, "s3a://bucket/x"),
        ("gcs://bucket/x", {}, "gs://bucket/x"),
        ("abfss://c@a.dfs.core.windows.net/x", {}, "abfss://c@a.dfs.core.windows.net/x"),
        ("az://c/x", {"account_name": "a"}, "abfss://c@a.dfs.core.windows.net/x"),
        ("hdfs://name:8020/x", {}, "hdfs://name:8020/x"),
    ],
)
def test_spark_has_its_own_names(url: str, options: dict[str, str], spark: str) -> None:
    """Hadoop's schemes stand in place of fsspec's; Azure's short form needs the account."""
    assert hadoop_url(Storage(url, options)) == spark
    with pytest.raises(ConfigError, match="abfss://CONTAINER@ACCOUNT"):
        hadoop_url(Storage("az://c/x"))


def make_data(cache: Storage, fs: Any, name: str, ttl_days: float | None = None) -> Manifest:
    """A data set as from_dataframe leaves it in an object store."""
    place = Place(cache, f"{name}-{'0' * 20}", "f" * 32)
    with place.writing() as folder:
        put(fs, f"/cache/{folder.name}/part.parquet", tiny_table(40))
        written = from_parquet(folder.url, features=["x0"]).manifest
        published = place.publish(replace(written, fingerprint="f" * 32, ttl_days=ttl_days))
    note_ttl(published)
    return published


def test_a_remote_folder_exists_once_its_manifest_does(memory: Any) -> None:
    """A cut-off writer leaves nothing to find; lost files make a data set invisible; two writers do no harm."""
    cache = open_storage("memory://cache")
    place = Place(cache, f"a-{'0' * 20}", "f" * 32)

    def interrupted() -> None:
        with place.writing() as folder:
            put(memory, f"/cache/{folder.name}/part.parquet", tiny_table(40))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cache.files() == []
    first, second = make_data(cache, memory, "a"), make_data(cache, memory, "a")
    assert first.root != second.root
    assert place.held() in (first, second)
    for lost in (first, second):
        memory.pipe_file(f"{lost.storage.url.partition('memory:/')[2]}/part.parquet", b"cut")
        with pytest.raises(
            DataError, match=r"expected the 1 files of its manifest, part\.parquet is missing or damaged"
        ):
            from_parquet(lost.root)
    assert place.held() is None


def test_remote_data_sets_are_listed_shown_and_deleted(memory: Any) -> None:
    """The command and the functions look after a cache behind a URL as after one on a disk."""
    cache = open_storage("memory://cache")
    kept, over = make_data(cache, memory, "kept"), make_data(cache, memory, "over", ttl_days=1)
    put(memory, f"/cache/lost-{'0' * 20}-00000000/part.parquet", tiny_table(40))
    memory.pipe_file("/cache/foreign/file", b"")

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["data", *words, "--cache-dir", "memory://cache"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.output

    listed = run("list")
    assert kept.storage.name in listed
    assert "unfinished" in listed
    assert "foreign" not in listed
    assert kept.root in run("show", "kept")
    assert "nothing is over its time" in run("delete", "--expired")
    memory.store[f"/cache/{over.storage.name}/{MANIFEST}"].modified -= np.timedelta64(2, "D").item()
    memory.store[f"/cache/{over.storage.name}/{MANIFEST}"].created -= np.timedelta64(2, "D").item()
    delete_over(cache)
    assert sorted(d.name.partition("-")[0] for d in cached_data("memory://cache")) == ["kept", "lost"]
    assert delete_expired("memory://cache") == []
    assert delete_data("kept", "memory://cache").manifest == kept
    run("delete", "lost")
    assert [file.path for file in cache.files()] == ["foreign/file"]


def test_a_writer_deletes_what_is_over_by_names_and_times(tmp_path: Path) -> None:
    """Before it writes, a writer opens only the manifests of which a name says that their time is over."""
    cache = open_storage(tmp_path)
    for name in ("unnoted", "noted"):
        manifest = replace(tiny_parquet(tmp_path / name).manifest, ttl_days=2.5)
        (tmp_path / name / MANIFEST).write_text(manifest.to_json())
    os.utime(tmp_path / "unnoted" / MANIFEST, (0, 0))
    note_ttl(manifest)
    delete_over(cache)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".noted.2.5d.ttl", "noted", "unnoted"]
    os.utime(tmp_path / "noted" / MANIFEST, (0, 0))
    delete_over(cache)
    assert [p.name for p in tmp_path.iterdir()] == ["unnoted"]
    assert [d.name for d in delete_expired(tmp_path)] == ["unnoted"]
