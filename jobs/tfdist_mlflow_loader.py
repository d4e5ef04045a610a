"""Loads a published model for MLflow. A module of its own with a full name: MLflow copies it beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


class ColumnModel:
    """Predicts from raw columns, which become tensors exactly as in training.

    Args:
        folder: holds ``model.keras`` and ``schema.json``.
    """

    def __init__(self, folder: Path) -> None:
        import keras

        from tfdist.data import Schema

        self.schema = Schema.from_json((folder / "schema.json").read_text(encoding="utf-8"))
        self.model = keras.saving.load_model(folder / "model.keras", compile=False)

    def predict(self, data: pd.DataFrame, params: dict[str, Any] | None = None) -> np.ndarray:
        """Predictions ``[rows] float32``.

        Args:
            data: the raw feature columns.
            params: none are known.
        """
        del params
        import pyarrow as pa
        import tensorflow as tf

        from tfdist.data.schema import batch_from_arrow

        columns = batch_from_arrow(pa.Table.from_pandas(data, preserve_index=False), self.schema)
        tensors = {name: tf.constant(values) for name, values in columns.items()}
        return np.asarray(self.model.predict(tensors, verbose=0))


def _load_pyfunc(data_path: str) -> ColumnModel:
    """MLflow's entry."""
    return ColumnModel(Path(data_path))
