"""Data written by Spark to a URL and read through fsspec, here and on workers.

fsspec opens ``local:`` URLs as files of this machine, and so does Spark with the setting of the fixture. For tfdist
they are a file system like any other behind a URL: nothing is renamed, nothing is read by its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tfdist
from tfdist import ComputeConfig, FitConfig
from tfdist.data import cached_data, from_dataframe, from_parquet
from tfdist.data.handle import Handle
from tfdist.errors import ConfigError, DataError

HADOOP = {
    "fs.local.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
    "fs.viewfs.overload.scheme.target.local.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.viewfs.mounttable.default.linkFallback": "file:///",
}


@pytest.fixture
def remote(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty folder."""
    for key, value in HADOOP.items():
        spark.conf.set(key, value)
    yield f"local://{tmp_path}/cache"
    for key in HADOOP:
        spark.conf.unset(key)


def test_a_frame_is_written_to_a_url_and_reused_there(spark: SparkSession, remote: str, tmp_path: Path) -> None:
    """The same plan is written once; a lost file or manifest makes it be written anew; models stay on the disk."""

    def make(ttl_days: float | None = None) -> Handle:
        return from_dataframe(spark.range(0, 60, 1, 2), cache_dir=remote, name="ids", ttl_days=ttl_days)

    first = make()
    assert str(first.root).startswith(f"{remote}/ids-")
    assert make().root == make(ttl_days=3).root == first.root
    batches = [batch["id"].numpy().tolist() for batch in first.to_tf(global_batch=20, shuffle=False)]
    assert batches == [list(range(i, i + 20)) for i in (0, 20, 40)]
    assert from_parquet(first.root).manifest.fingerprint == first.manifest.fingerprint
    assert first.model_root.is_absolute()
    assert "cache/ids" not in str(first.model_root)
    (held,) = cached_data(remote)
    assert held.manifest is not None
    assert held.manifest.ttl_days == 3
    (tmp_path / "cache" / first.manifest.storage.name / "manifest.json").unlink()
    assert [d.manifest for d in cached_data(remote)] == [None]
    second = make()
    assert second.root != first.root
    assert second.rows == 60


def test_a_refused_frame_leaves_nothing_at_its_url(spark: SparkSession, remote: str, tmp_path: Path) -> None:
    """Nulls without a policy, and a file system that Spark does not have: no file stays."""
    with pytest.raises(DataError, match="'n': expected no nulls, got 2"):
        from_dataframe(spark.range(10).selectExpr("if(id % 5 = 0, null, id) n"), cache_dir=remote)
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []
    with pytest.raises(ConfigError, match="cache_dir: Spark does not know memory, which it needs for memory://x"):
        from_dataframe(spark.range(3), cache_dir="memory://x")
    assert cached_data("memory://x") == []


def build_model(schema: tfdist.data.Schema) -> object:
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.expand_dims(inputs["x"], -1)))
    model.compile("sgd", "mse")
    return model


def test_workers_read_through_fsspec(spark: SparkSession, remote: str, tmp_path: Path) -> None:
    """Two training processes open the files of a URL themselves and end with the model that the local files give."""
    df = spark.range(0, 64, 1, 2).selectExpr("float(id / 64) x", "float(id / 32) y")
    losses = []
    for cache in (remote, tmp_path / "here"):
        train = from_dataframe(df, cache_dir=cache, label="y")
        compute = ComputeConfig(slots=2, launcher="local")
        fit = FitConfig(epochs=1, global_batch=8, seed=1, output_dir=str(tmp_path / "model"))
        losses.append(tfdist.fit(build_model, train, compute=compute, fit=fit, on_event=print).history["loss"])
    assert losses[0] == losses[1]
