"""Loads a published model for MLflow. A module of its own with a full name: MLflow copies it beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


class ColumnModel:
    """Predicts from raw columns, which become tensors exactly as in training.

    Args:
        folder: holds ``model.keras``, ``schema.json`` and, where there is one, ``transform.pkl``.
    """

    def __init__(self, folder: Path) -> None:
        import keras

        from tfdist.data import Schema
        from tfdist.data.transform import load_transform

        self.schema = Schema.from_json((folder / "schema.json").read_text(encoding="utf-8"))
        transform = folder / "transform.pkl"
        self.transform = load_transform(transform.read_bytes()) if transform.is_file() else None
        self.model = keras.saving.load_model(folder / "model.keras", compile=False)

    def predict(self, data: pd.DataFrame, params: dict[str, Any] | None = None) -> np.ndarray:
        """Predictions ``[rows]``, or ``[rows, width]`` of several numbers; NaN where a null policy leaves a row out.

        Args:
            data: the raw feature columns.
            params: none are known.
        """
        del params
        import pyarrow as pa

        from tfdist.data import batch_from_arrow
        from tfdist.data.pipeline import as_tensors
        from tfdist.data.tables import rows_kept

        table = pa.Table.from_pandas(data, preserve_index=False)
        kept = rows_kept(table, self.schema)
        tensors = as_tensors(self.schema.as_batch(batch_from_arrow(table, self.schema)))
        tensors = tensors if self.transform is None else self.transform(tensors)
        predicted = np.asarray(self.model.predict(tensors, verbose=0))
        predicted = predicted[:, 0] if predicted.ndim == 2 and predicted.shape[1] == 1 else predicted
        if kept is None:
            return predicted
        filled = np.full((len(data), *predicted.shape[1:]), np.nan, predicted.dtype)
        filled[kept] = predicted
        return filled


def _load_pyfunc(data_path: str) -> ColumnModel:
    """MLflow's entry."""
    return ColumnModel(Path(data_path))
