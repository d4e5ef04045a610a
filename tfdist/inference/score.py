"""A trained model over a DataFrame, computed on the executors."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyspark.sql.functions as F
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as T

from tfdist.data.expressions import inner_value, value_of
from tfdist.data.fields import Field, nearest, spark_fields
from tfdist.data.schema import Schema
from tfdist.errors import ConfigError, DataError
from tfdist.inference.predictor import ModelFile, Output, Scoring, output_of
from tfdist.launch.session import MOST_BYTES
from tfdist.train.driver import FitResult
from tfdist.train.publish import MODEL, SCHEMA, TRANSFORM

_SPARK_TYPES = {
    "bool": T.BooleanType(),
    "int8": T.ByteType(),
    "int16": T.ShortType(),
    "int32": T.IntegerType(),
    "int64": T.LongType(),
    "float32": T.FloatType(),
    "float64": T.DoubleType(),
}


def score(df: DataFrame, model: Any, *, output: str = "prediction", batch_rows: int = 4096) -> DataFrame:
    """Add a model's predictions to a DataFrame.

    Like any transformation it is computed when the result is used. Each Python worker of the executors loads the model
    once; its file travels with the task, so no file system need be shared. Columns become tensors exactly as in the
    training, with its null policies and its transform (code out of the model's folder); a row that the policy ``drop``
    left out of the training gets a null.

    Args:
        df: the rows; columns besides the model's are kept as they are.
        model: a :class:`~tfdist.FitResult`, the folder or the ``.keras`` file that :func:`tfdist.fit` published, or any
            Keras model, whose inputs are then named like the columns.
        output: name of the new column: a number where the model gives one value for a row, else an array of numbers.
        batch_rows: the most rows given to the model at once.

    Returns:
        ``df`` with the column ``output`` at the end.

    Raises:
        DataError: a column of the model is missing or has another type, or ``output`` is already there.
        ConfigError: the model or a setting cannot be used.
    """
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise ConfigError(f"batch_rows: expected a whole number of at least 1, got {batch_rows!r}")
    fields = spark_fields(df.schema)
    if output in df.columns:
        raise DataError(f"output: the rows already have a column {output!r}; drop it or give another name")
    trained = _trained(model, fields)
    size = len(trained.file.content) + len(trained.file.transform or b"")
    if size > MOST_BYTES and not hasattr(df, "_jdf"):
        raise ConfigError(
            f"model: expected at most {MOST_BYTES >> 20} MiB over Spark Connect, which sends it with the plan, got "
            f"{size >> 20} MiB; score it in a classic session"
        )
    positions = _positions(trained.schema, fields)

    # Names are of the user's making: with dots, in two cases, or twice. Inside, a column's place is its name.
    width = len(df.columns)
    safe = df.toDF(*(f"c{i}" for i in range(width)))
    made = [i for i in positions if fields[i].spark_type == "vector" or fields[i].path]
    prepared = safe.select("*", *(_made(fields[i], trained.schema).alias(f"v{i}") for i in made))
    places = tuple(width + made.index(i) if i in made else int(fields[i].file_name[1:]) for i in positions)
    scoring = Scoring(trained.file, trained.schema, places, width, trained.output, "p", batch_rows)
    value = _SPARK_TYPES[trained.output.dtype]
    column = T.StructField("p", value if trained.output.width is None else T.ArrayType(value, containsNull=False))
    scored = prepared.mapInArrow(scoring, T.StructType([*safe.schema.fields, column]))
    return scored.toDF(*df.columns, output)


def _made(field: Field, schema: Schema) -> Column:
    """The values of a field that are no column as they are."""
    value = inner_value(F.col(field.file_name.partition("_")[0]), field.path[1:])
    return value_of(value, schema.column(field.name))


@dataclass(frozen=True)
class _Trained:
    file: ModelFile
    schema: Schema
    output: Output


def _trained(model: Any, fields: list[Field]) -> _Trained:
    import keras

    path, schema = _published(model)
    if path is None:
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"model: expected a FitResult, a Keras model, or the path of one, got {type(model).__qualname__}"
            )
        with tempfile.TemporaryDirectory(prefix="tfdist-model-") as folder:
            path = Path(folder, MODEL)
            model.save(path)
            content = path.read_bytes()
    else:
        content = path.read_bytes()
        model = keras.saving.load_model(path, compile=False)
    beside = None if path is None or schema is None else path.parent / TRANSFORM
    transform = beside.read_bytes() if beside is not None and beside.is_file() else None
    digest = hashlib.sha256(content + (transform or b"")).hexdigest()
    file = ModelFile(content, digest, transform=transform)
    if schema is None:
        named = _named_inputs(model)
        file = replace(file, one_input=not isinstance(named, dict))
        schema = _schema_of_inputs(named if isinstance(named, dict) else {named.name: named}, fields)
    found = output_of(model, {t.name: (t.shape, t.dtype) for t in schema.model_inputs})
    if found is None or found.dtype not in _SPARK_TYPES:
        raise ConfigError(
            "model: expected one output with a number or a vector of numbers for each row, got another; "
            "score a model that has that output alone: keras.Model(model.inputs, model.outputs[0])"
        )
    return _Trained(file, schema, found)


def _published(model: Any) -> tuple[Path | None, Schema | None]:
    """The model file and the schema beside it, where ``model`` names them."""
    if isinstance(model, FitResult):
        model = model.model_path
    if not isinstance(model, str | Path):
        return None, None
    path = Path(model)
    if path.is_dir():
        path = path / MODEL
    if not path.is_file():
        raise ConfigError(f"model: expected a .keras file or a folder with {MODEL}, found no file {path}")
    schema = path.parent / SCHEMA
    return path, Schema.from_json(schema.read_text()) if schema.is_file() else None


def _named_inputs(model: Any) -> Any:
    """The input of a model that came without a schema: a dict of tensors by name, or the only tensor."""
    inputs = getattr(model, "input", None)  # a Sequential model has none
    if isinstance(inputs, dict):
        return inputs
    tensors = getattr(model, "inputs", None) or []
    if len(tensors) != 1:
        raise ConfigError(
            f"model: expected one input or a dict of inputs that names the columns, got {len(tensors)} inputs without; "
            "build it with a dict of keras.Input, or give the folder that tfdist.fit published"
        )
    return tensors[0]


def _schema_of_inputs(inputs: Mapping[str, Any], fields: list[Field]) -> Schema:
    """A schema for a model that came without one: its inputs name the columns and their dtypes."""
    vectors = {f.name for f in fields if f.spark_type == "vector" or f.spark_type.startswith("array<")}
    dtypes = {}
    for name, tensor in inputs.items():
        length = tensor.shape[1] if name in vectors and len(tensor.shape) == 2 else None
        sparse = "sparse " if getattr(tensor, "sparse", False) else ""
        dtypes[name] = f"{sparse}{tensor.dtype}" if length is None else f"{sparse}{tensor.dtype}[{length}]"
    return Schema.from_fields(fields, features=list(inputs), dtypes=dtypes)


def _positions(schema: Schema, fields: list[Field]) -> list[int]:
    """Where the features stand among the columns.

    Raises:
        DataError: naming every column that is missing, double or of another type.
    """
    counts = Counter(field.name for field in fields)
    place = {field.name: i for i, field in enumerate(fields)}
    problems = []
    for name in schema.features:
        wanted = schema.column(name).spark_type
        if not counts[name]:
            hint = nearest(name, [column for column in counts if column not in schema.features])
            problems.append(f"column {name!r}: the model reads it, and it is not among the rows' columns{hint}")
        elif counts[name] > 1:
            problems.append(f"column {name!r}: {counts[name]} columns have this name; rename all but one")
        elif fields[place[name]].spark_type != wanted:
            problems.append(
                f"column {name!r}: expected {wanted} as in the training, got {fields[place[name]].spark_type}; "
                f"cast it to {wanted}"
            )
    if problems:
        raise DataError("\n".join(problems))
    return [place[name] for name in schema.features]
