"""A trained model as files: complete or absent, with the schema that scoring needs beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfdist.cluster import worker_context
from tfdist.data.location import make_folder
from tfdist.errors import ConfigError
from tfdist.train.task import TrainingData

MODEL, SCHEMA, TRANSFORM = "model.keras", "schema.json", "transform.pkl"


def publish(model_file: Path, data: TrainingData, output_dir: Path) -> Path:
    """Put a saved model, the schema of its data and their transform in ``output_dir``, replacing an older one.

    Each file appears at once under its name; a reader never sees half of one.

    Returns:
        The path of the published model.
    """
    make_folder(output_dir, "fit.output_dir")
    partial = output_dir / f".{SCHEMA}.partial"
    partial.write_text(data.schema.to_json())
    partial.replace(output_dir / SCHEMA)
    if data.transform is None:
        (output_dir / TRANSFORM).unlink(missing_ok=True)
    else:
        from tfdist.data.transform import save_transform

        partial = output_dir / f".{TRANSFORM}.partial"
        save_transform(data.transform, partial)
        partial.replace(output_dir / TRANSFORM)
    partial = output_dir / f".{MODEL}.partial"
    shutil.copyfile(model_file, partial)
    partial.replace(output_dir / MODEL)
    return output_dir / MODEL


@contextmanager
def announced(output_dir: Path, run_id: str, setting: str) -> Iterator[None]:
    """On the driver: create ``output_dir`` and hold a mark in it, by which the chief knows that it sees the same."""
    make_folder(output_dir, setting)
    mark = _mark(output_dir, run_id)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: a model is there
            output_dir.rmdir()


def check_announced(output_dir: Path, run_id: str, setting: str = "fit.output_dir") -> None:
    """On a worker, before the training: is ``output_dir`` the folder that the driver sees?

    Raises:
        ConfigError: it is not.
    """
    if not _mark(output_dir, run_id).exists():
        raise ConfigError(
            f"{setting}: expected a folder that the driver and all workers see, got {output_dir}, where rank "
            f"{worker_context().rank} does not find what the driver wrote; use shared storage, for example beside "
            "cache_dir"
        )


def _mark(output_dir: Path, run_id: str) -> Path:
    return output_dir / f".{run_id}"
