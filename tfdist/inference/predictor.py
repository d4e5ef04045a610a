"""A saved model at work in a Spark Python worker: loaded once, rows in, predictions out. Knows nothing of Spark."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tfdist.data.schema import Schema
from tfdist.data.tables import Plain, batch_from_arrow, rows_kept
from tfdist.environ import scoped_environ

Predict = Callable[[Mapping[str, Plain]], np.ndarray]
"""Tensors by name, each ``[rows, *shape]``, to predictions ``[rows]`` or ``[rows, width]``."""

_GREETING = (b"WARNING: All log messages before absl::InitializeLog()", b"oneDNN custom operations are on")

_loaded: dict[str, Predict] = {}
"""Content hash of a model file to the model, for as long as this process lives."""


@dataclass(frozen=True)
class Output:
    """What a model gives for a row.

    Args:
        dtype: name of the column's dtype.
        width: length of the array, None for a single value.
    """

    dtype: str
    width: int | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        value = pa.from_numpy_dtype(np.dtype(self.dtype))
        return value if self.width is None else pa.list_(value)

    def column(self, predictions: np.ndarray) -> pa.Array:
        """Predictions ``[rows, ...]`` as an Arrow array of ``arrow_type``."""
        values = pa.array(np.ascontiguousarray(predictions, self.dtype).reshape(-1))
        if self.width is None:
            return values
        return pa.ListArray.from_arrays(np.arange(len(predictions) + 1, dtype=np.int32) * self.width, values)


@dataclass(frozen=True)
class ModelFile:
    """A model in Keras' own format, as bytes, so that workers need no file system in common with the driver.

    Args:
        content: of the ``.keras`` file.
        digest: SHA-256 of the content and the transform.
        one_input: the model takes a tensor instead of a dict of them.
        transform: what the features go through before, as :func:`tfdist.data.transform.save_transform` wrote it.
    """

    content: bytes
    digest: str
    one_input: bool = False
    transform: bytes | None = None


@dataclass(frozen=True)
class Scoring:
    """What a Python worker does with each partition.

    Args:
        model: the model.
        schema: of the rows that the model was trained on.
        places: for each feature the place of its column in the rows that arrive.
        passed_on: so many columns, from the first, are returned.
        output: what the model gives.
        name: of the prediction column that is returned.
        batch_rows: the most rows given to the model at once.
    """

    model: ModelFile
    schema: Schema
    places: tuple[int, ...]
    passed_on: int
    output: Output
    name: str
    batch_rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Each batch with the predictions as a further column; null where a ``drop`` policy leaves a row out."""
        for batch in batches:
            slices = [batch.slice(lo, self.batch_rows) for lo in range(0, batch.num_rows, self.batch_rows)]
            chunks = [self._predict(rows) for rows in slices] or [pa.array([], self.output.arrow_type)]
            columns = [*batch.columns[: self.passed_on], pa.concat_arrays(chunks)]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names[: self.passed_on], self.name])

    def _predict(self, rows: pa.RecordBatch) -> pa.Array:
        table = pa.Table.from_arrays([rows.column(i) for i in self.places], list(self.schema.features))
        kept = rows_kept(table, self.schema)
        if kept is None:
            return self.output.column(load(self.model)(self.schema.as_batch(batch_from_arrow(table, self.schema))))
        if not kept.any():
            return pa.nulls(len(kept), self.output.arrow_type)
        predicted = self.output.column(load(self.model)(self.schema.as_batch(batch_from_arrow(table, self.schema))))
        return predicted.take(pa.array(np.cumsum(kept) - 1, mask=~kept))


def load(model: ModelFile) -> Predict:
    """The model of a file, loaded when this process first needs it."""
    if model.digest not in _loaded:
        _loaded[model.digest] = _load(model)
    return _loaded[model.digest]


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Leaves out of the standard error what TensorFlow always says when it is imported, whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            with open(2, "wb", closefd=False) as stderr:
                stderr.writelines(line for line in held if not any(known in line for known in _GREETING))


def _load(file: ModelFile) -> Predict:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}  # read at import
    with scoped_environ(quiet), _without_greeting():
        import keras
        import tensorflow as tf

        from tfdist.data.pipeline import as_tensors
        from tfdist.data.transform import load_transform

    with suppress(RuntimeError):  # TensorFlow already runs in this process, as somebody else set it up
        # Spark runs one Python worker per core, and schedules no GPU for it.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.set_visible_devices([], "GPU")
    with tempfile.TemporaryDirectory(prefix="tfdist-model-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(file.content)
        model = keras.saving.load_model(path, compile=False)
    transform = None if file.transform is None else load_transform(file.transform)
    model.jit_compile = False  # compiling for each number of rows costs more than it saves

    def predict(tensors: Mapping[str, Any]) -> np.ndarray:
        given: Any = as_tensors(tensors)
        if transform is not None:
            given = transform(given)
        if file.one_input:
            (given,) = given.values()
        return np.asarray(model.predict_on_batch(given))

    return predict


def output_of(model: Any, inputs: Mapping[str, tuple[Sequence[int | None], str]]) -> Output | None:
    """What a loaded Keras model gives for a row, or None when that is not one value or one vector.

    Args:
        model: the model.
        inputs: tensor name to its shape without rows and its dtype.
    """
    import keras

    if getattr(model, "outputs", None):
        outputs = list(model.outputs)
    else:
        given = {name: keras.KerasTensor((None, *shape), dtype) for name, (shape, dtype) in inputs.items()}
        outputs = keras.tree.flatten(model.compute_output_spec(given))
    if len(outputs) != 1 or len(outputs[0].shape) not in (1, 2):
        return None
    dtype = "float32" if outputs[0].dtype in ("float16", "bfloat16") else outputs[0].dtype
    width = outputs[0].shape[1] if len(outputs[0].shape) == 2 else 1
    return Output(dtype, None if width == 1 else width)
