"""Checkpoints as files: a folder for each, with a file of every rank; complete or absent.

All ranks write into ``step-000000123.<run>.partial``. When the files of all are there, the chief writes the manifest
and renames the folder to ``step-000000123``. Pure: needs neither TensorFlow nor Spark.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.location import make_folder
from tfdist.errors import ConfigError

FORMAT = 1
_MANIFEST, _VALUES = "manifest.json", "values.json"
_PREFIX, _PARTIAL = "step-", ".partial"


@dataclass(frozen=True)
class Position:
    """How far a training is.

    Args:
        total: steps since its beginning.
        epoch: number of the epoch that is running or comes next.
        executions: calls of Keras' train function in that epoch; of ``steps_per_execution`` steps each.
        data_epoch: the epoch that the next batch belongs to, as the data counts.
        data_step: the step of that epoch.
        stopped: a callback has stopped the training.
    """

    total: int = 0
    epoch: int = 0
    executions: int = 0
    data_epoch: int = 0
    data_step: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class RankState:
    """What a rank keeps: ``arrays`` by name, numeric and without objects, and ``values``, which are JSON."""

    arrays: Mapping[str, np.ndarray]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of.

    Args:
        training: identifies the training over all its launches, sorted by time.
        run_id: the launch that wrote it.
        world_size: number of ranks.
        position: how far the training is.
        settings: what must be equal for a training to go on from it.
        variables: path, shape and dtype of each variable.
        files: SHA-256 and size in bytes of the file of each rank.
        format: version of the layout.
        replicas: number of replicas over all ranks; 0 where it is not known.
        on_read: number of a variable to ``sum`` or ``mean``, for those of which each replica has a value of its own,
            and which are the sum or mean of these when they are read.
    """

    training: str
    run_id: str
    world_size: int
    position: Position
    settings: Mapping[str, Any]
    variables: Sequence[Sequence[Any]]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    format: int = FORMAT
    replicas: int = 0
    on_read: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[str, int, int]:
        """Sorts checkpoints by age."""
        return self.training, self.position.total, self.position.epoch


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint in its folder."""

    folder: Path
    manifest: Manifest

    def archive(self, rank: int) -> Any:
        """The arrays of a rank by name, each read when it is asked for; to be closed."""
        return np.load(self.folder / _rank_file(rank), allow_pickle=False)

    def read(self, rank: int) -> RankState:
        """The state of a rank."""
        with self.archive(rank) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return RankState(arrays, json.loads(arrays.pop(_VALUES).tobytes()))


def partial_folder(folder: Path, total: int, run_id: str) -> Path:
    """Where a launch writes the checkpoint of so many steps."""
    return folder / f"{_PREFIX}{total:09d}.{run_id}{_PARTIAL}"


def write_rank(partial: Path, rank: int, state: RankState) -> None:
    """Write the file of a rank; its checksum, which comes last, says that it is whole."""
    make_folder(partial, "fit.checkpoint_dir")
    path = partial / _rank_file(rank)
    text = np.frombuffer(json.dumps(state.values).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **{**state.arrays, _VALUES: text})  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    seal = {"sha256": _sha256(path), "bytes": path.stat().st_size}
    _write_text(path.with_suffix(".json"), json.dumps(seal))


def seals(partial: Path, world_size: int) -> dict[str, dict[str, Any]] | None:
    """The checksums of all ranks' files, or None while one is missing."""
    paths = [partial / _rank_file(rank) for rank in range(world_size)]
    if not all(path.with_suffix(".json").exists() for path in paths):
        return None
    return {path.name: json.loads(path.with_suffix(".json").read_text()) for path in paths}


def complete(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest of a checkpoint whose files are there, and give the folder its name."""
    text = json.dumps(asdict(manifest), indent=1)
    _write_text(partial / _MANIFEST, text)
    final = partial.parent / f"{_PREFIX}{manifest.position.total:09d}"
    if final.exists():  # of an earlier training, or of the same step before a restart
        shutil.rmtree(final)
    partial.rename(final)
    return final


def newest(folder: Path, training: str | None = None) -> Checkpoint | None:
    """The newest checkpoint whose files are as they were written; damaged ones are skipped with a warning.

    Args:
        folder: holds checkpoints, or does not exist.
        training: only checkpoints of that training.

    Raises:
        ConfigError: the newest one was written by a newer version of this library.
    """
    for checkpoint in checkpoints(folder):
        if training is not None and checkpoint.manifest.training != training:
            continue
        if checkpoint.manifest.format > FORMAT:
            raise ConfigError(
                f"checkpoint {checkpoint.folder}: expected format {FORMAT} or older, got {checkpoint.manifest.format}; "
                "it was written by a newer version of tfdist: install that one, or choose another fit.checkpoint_dir"
            )
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        warnings.warn(f"checkpoint {checkpoint.folder} is damaged and is passed over: {problem}", stacklevel=2)
    return None


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Those with a readable manifest, the newest first."""
    found = []
    for path in folder.glob(f"{_PREFIX}*") if folder.is_dir() else ():
        if path.suffix == _PARTIAL:
            continue
        try:
            found.append(Checkpoint(path, _manifest_from(json.loads((path / _MANIFEST).read_text()))))
        except (OSError, ValueError, TypeError, KeyError) as error:
            warnings.warn(f"checkpoint {path} is damaged and is passed over: its manifest: {error}", stacklevel=3)
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.order, reverse=True)


def damage(checkpoint: Checkpoint) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    for name, seal in checkpoint.manifest.files.items():
        path = checkpoint.folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != seal["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {seal['bytes']}"
        if _sha256(path) != seal["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints; called when the newest has just been written."""
    for checkpoint in checkpoints(folder)[keep:]:
        shutil.rmtree(checkpoint.folder, ignore_errors=True)


def clear_partials(folder: Path, but: Path) -> None:
    """Delete what was left unfinished, by this launch or an earlier one, except for one that is being written."""
    for path in folder.glob(f"{_PREFIX}*{_PARTIAL}"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _manifest_from(raw: dict[str, Any]) -> Manifest:
    if raw["format"] > FORMAT:  # its other fields may be unknown here
        known = {name: raw.get(name) for name in ("training", "run_id", "world_size", "settings", "variables")}
        total = raw.get("position", {}).get("total", 0)
        return Manifest(**known, position=Position(total), format=raw["format"])  # type: ignore[arg-type]
    return Manifest(**{**raw, "position": Position(**raw["position"])})


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.npz"


def _write_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".writing")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
