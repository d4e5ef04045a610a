"""Checkpoints as files: complete or absent, damage noticed, the last good one stays."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the dtypes that it has where TensorFlow is imported
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import ConfigError
from tfdist.train.checkpoint import Manifest, Position, RankState, complete, newest, partial_folder, seals, write_rank
from tfdist.train.plain import NotPlainError, as_stored, from_plain, storable, to_plain
from tfdist.train.regroup import regrouped
from tfdist.train.writer import CheckpointWriter

WORLD = 2


def manifest(total: int, training: str = "t1", run_id: str = "r1") -> Manifest:
    return Manifest(training, run_id, WORLD, Position(total, epoch=total // 10), {}, [["dense/kernel", [3], "float32"]])


def state(total: int, rank: int, size: int = 3) -> RankState:
    return RankState({"v0.0": np.full(size, total + rank / 10, np.float32)}, {"rank": rank, "best": float("nan")})


class Gang:
    """A writer for each rank of one launch, and what they told."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.writers = [CheckpointWriter(folder, keep, rank, self.tell) for rank in range(WORLD)]

    def tell(self, kind: str, **values: Any) -> None:
        self.told.append((kind, values))

    def save(self, total: int, size: int = 3, **of: str) -> None:
        for rank, writer in enumerate(self.writers):
            writer.save(manifest(total, **of), state(total, rank, size))
        for writer in reversed(self.writers):
            writer.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_rank_gets_back_what_it_wrote(tmp_path: Path) -> None:
    """Arrays and values of each rank are read back as they were, and only the newest checkpoints are kept."""
    gang = Gang(tmp_path)
    for total in (5, 10, 15):
        gang.save(total)
    assert names(tmp_path) == ["step-000000010", "step-000000015"]
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.position.total == 15
    for rank in range(WORLD):
        read = found.read(rank)
        np.testing.assert_array_equal(read.arrays["v0.0"], state(15, rank).arrays["v0.0"])
        assert read.values["rank"] == rank
        assert np.isnan(read.values["best"])
    assert [kind for kind, _ in gang.told] == ["checkpoint"] * 3


def test_a_half_written_checkpoint_is_absent_and_is_cleared_by_the_next_launch(tmp_path: Path) -> None:
    """Without the file of a rank there is no checkpoint; what a killed launch left goes when the next one writes."""
    Gang(tmp_path).save(5)
    write_rank(partial_folder(tmp_path, 10, "r1"), 0, state(10, 0))
    alone = CheckpointWriter(tmp_path, 2, 0, lambda kind, **values: None)
    alone.save(manifest(15), state(15, 0))
    alone.close()
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.position.total == 5
    Gang(tmp_path).save(20, run_id="r2")
    assert names(tmp_path) == ["step-000000005", "step-000000020"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "bytes instead of"),
        (lambda file: file.write_bytes(file.read_bytes()[:-7] + b"changed"), "another SHA-256"),
        (Path.unlink, "is missing"),
        (lambda file: (file.parent / "manifest.json").write_text('{"format": 1'), "its manifest"),
        (lambda file: (file.parent / "manifest.json").unlink(), "its manifest"),
    ],
    ids=["truncated", "changed", "missing", "half a manifest", "no manifest"],
)
def test_a_damaged_checkpoint_is_passed_over(spoil: Any, told: str, tmp_path: Path) -> None:
    """The newest whose files are as they were written is taken, and a warning says what is wrong with the other."""
    gang = Gang(tmp_path)
    gang.save(5)
    gang.save(10)
    spoil(tmp_path / "step-000000010" / "rank-00001.npz")
    with pytest.warns(UserWarning, match=told):
        found = newest(tmp_path)
    assert found is not None
    assert found.manifest.position.total == 5


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint of a later version, whose fields may be others, is no damage: it is said who can read it."""
    Gang(tmp_path).save(5)
    path = tmp_path / "step-000000005" / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({"format": 2, "training": raw["training"], "unheard": 1}))
    with pytest.raises(ConfigError, match=r"expected format 1 or older, got 2.*newer version of tfdist"):
        newest(tmp_path)


def test_a_new_training_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """Checkpoints are sorted by training first: the first of a new one is newer than the last of the one before."""
    gang = Gang(tmp_path)
    gang.save(5)
    gang.save(10)
    gang.save(5, training="t2")
    found, of_old = newest(tmp_path), newest(tmp_path, "t1")
    assert found is not None
    assert of_old is not None
    assert (found.manifest.training, of_old.manifest.position.total) == ("t2", 10)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["float32", "float64", "int32", "bfloat16"]),
    st.integers(0, 2**32),
)
def test_another_number_of_workers_takes_over_sums_means_and_equal_values(
    before: int, after: int, replicas: int, dtype: str, seed: int
) -> None:
    """What M workers have summed N workers have summed; a mean stays the mean, and what is equal stays equal."""
    rng = np.random.default_rng(seed)
    of = [{f"v{i}.{j}": rng.integers(0, 99, 3).astype(dtype) for i in (0, 1) for j in range(2)} for _ in range(before)]
    with tempfile.TemporaryDirectory() as folder:
        partial = partial_folder(Path(folder), 5, "r1")
        variables = [["total", [3], dtype], ["moving_mean", [3], dtype], ["kernel", [3], dtype]]
        on_read = {"0": "sum", "1": "mean"}
        kernel = {f"v2.{j}": rng.integers(0, 99, 3).astype(dtype) for j in range(2)}
        for rank, arrays in enumerate(of):
            write_rank(partial, rank, RankState({k: storable(v) for k, v in (arrays | kernel).items()}, {}))
        written = Manifest("t1", "r1", before, Position(5), {}, variables, replicas=2 * before, on_read=on_read)
        complete(partial, replace(written, files=seals(partial, before) or {}))
        found = newest(Path(folder))
        assert found is not None
        new = [regrouped(found, rank, [replicas] * 3, on_read) for rank in range(after)]

    def of_all(number: int) -> np.ndarray:
        """``[replicas, 3]``: the values of a variable on all new replicas."""
        return np.stack([as_stored(a[f"v{number}.{j}"], np.dtype(dtype), (3,)) for a in new for j in range(replicas)])

    old = [np.stack([a[f"v{i}.{j}"] for a in of for j in (0, 1)]).astype(float) for i in (0, 1)]
    assert {of_all(i).dtype for i in range(3)} == {np.dtype(dtype)}
    np.testing.assert_array_equal(of_all(0).astype(float).sum(axis=0), old[0].sum(axis=0).astype(dtype).astype(float))
    for number, wanted in ((1, old[1].mean(axis=0).astype(dtype)), (2, kernel["v2.0"])):
        np.testing.assert_array_equal(of_all(number), np.broadcast_to(wanted, (after * replicas, 3)))


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    """A write that fails is told and leaves nothing behind, neither does it end the training or the next writes."""
    gang = Gang(tmp_path)
    gang.save(5)
    with files_no_larger_than(20_000):
        gang.save(10, size=100_000)
    found = newest(tmp_path)
    assert found is not None
    assert found.manifest.position.total == 5
    assert {kind for kind, _ in gang.told[1:]} == {"checkpoint-failed"}
    assert "File too large" in gang.told[1][1]["error"]
    gang.save(15)
    assert names(tmp_path) == ["step-000000005", "step-000000015"]


def test_the_failure_of_one_rank_is_noticed_by_the_chief(tmp_path: Path) -> None:
    """A rank that cannot write says so, and the chief gives the checkpoint up rather than waiting for it."""
    gang = Gang(tmp_path)
    with files_no_larger_than(20_000):
        gang.writers[1].save(manifest(5), state(5, 1, size=100_000))
        gang.writers[1].wait()
    gang.writers[0].save(manifest(5), state(5, 0))
    gang.writers[0].wait()
    assert [(kind, values["step"]) for kind, values in gang.told] == [("checkpoint-failed", 5)]
    assert names(tmp_path) == []


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    """Somebody who deletes the folder of a running training loses what was in it, and no more."""
    gang = Gang(tmp_path / "checkpoints")
    gang.save(5)
    shutil.rmtree(tmp_path / "checkpoints")
    gang.save(10)
    assert names(tmp_path / "checkpoints") == ["step-000000010"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below) | st.tuples(below, below) | st.dictionaries(st.text() | st.integers(), below) | st.sets(SCALARS)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_return_as_they_were(value: Any) -> None:
    """Numbers, texts and containers of them go through JSON and back with their types."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(to_plain(value, arrays, "x"))
    back = from_plain(json.loads(text), arrays)
    assert (back, type(back)) == (value, type(value))


def test_arrays_and_numbers_keep_their_dtypes() -> None:
    """Arrays inside of containers, and NumPy's numbers, return with dtype and shape, as copies."""
    value = {"w": [np.ones((2, 0), np.float16), np.arange(3)], "best": np.float32(0.1)}
    arrays: dict[str, np.ndarray] = {}
    plain = json.loads(json.dumps(to_plain(value, arrays, "x")))
    value["w"][1][0] = 9  # type: ignore[index]
    back = from_plain(plain, arrays)
    assert back["best"] == np.float32(0.1)
    assert back["best"].dtype == np.float32
    assert (back["w"][0].shape, back["w"][0].dtype) == ((2, 0), np.float16)
    np.testing.assert_array_equal(back["w"][1], [0, 1, 2])


def test_what_is_no_plain_value_is_refused() -> None:
    """Objects, functions of the user's and arrays of objects are not kept: to read them back would run code."""
    for value in (object(), lambda: 1, [np.array([object()])], replace):
        with pytest.raises(NotPlainError):
            to_plain(value, {}, "x")
    assert from_plain(to_plain(np.linalg.norm, {}, "x"), {}) is np.linalg.norm
    assert from_plain({"function": "os:getcwd"}, {}) is None
