"""A trained model as files: complete or absent, with the schema that scoring needs beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tfdist.data import Schema

MODEL, SCHEMA = "model.keras", "schema.json"


def publish(model_file: Path, schema: Schema, output_dir: Path) -> Path:
    """Put a saved model and its schema in ``output_dir``, replacing an older one.

    Each file appears at once under its name; a reader never sees half of one.

    Returns:
        The path of the published model.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    partial = output_dir / f".{SCHEMA}.partial"
    partial.write_text(schema.to_json())
    partial.replace(output_dir / SCHEMA)
    partial = output_dir / f".{MODEL}.partial"
    shutil.copyfile(model_file, partial)
    partial.replace(output_dir / MODEL)
    return output_dir / MODEL
