"""Columns of a DataFrame as tensors: decided from the Spark schema alone, before any worker starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tfdist.data.choice import check_choice
from tfdist.data.choosing import (
    column_of,
    mask_problems,
    name_problems,
    pack_problems,
    sparse_problems,
    warn_of_decimals,
)
from tfdist.data.column import Column, Pack, Tensor
from tfdist.data.fields import Field, names_within, nearest, spark_fields
from tfdist.errors import ConfigError, DataError

_ROW_NUMBERS = re.compile(r"__index_level_\d+__")  # what pandas keeps of an index without a name in Parquet files

Nulls = Mapping[str, "str | tuple[str, Any]"]


@dataclass(frozen=True)
class Schema:
    """The columns of a data set and their tensors.

    Args:
        columns: the features in their order, then the label.
        label: name of the label, or None.
        packs: matrices of several features.
        outputs: what a transform makes of the features; None without one.
    """

    columns: tuple[Column, ...]
    label: str | None = None
    packs: tuple[Pack, ...] = ()
    outputs: tuple[Tensor, ...] | None = None

    @staticmethod
    def from_spark(
        schema: Any,
        *,
        features: Sequence[str] | None = None,
        label: str | None = None,
        nulls: Nulls | None = None,
        dtypes: Mapping[str, str] | None = None,
        pack: Mapping[str, Sequence[str]] | None = None,
    ) -> Schema:
        """Decide the tensors of a Spark schema.

        Args:
            schema: a ``pyspark.sql.types.StructType``.
            features: columns to read, in this order; by default all but the label and an index without a name that
                pandas left in files (``__index_level_0__``).
            label: the column to learn.
            nulls: column to ``"error"`` (the default), ``"drop"``, ``"mask"`` or ``("fill", value)``.
            dtypes: column to the dtype to cast to, for example ``"float32"``; ``"scaled int64"`` keeps all digits of a
                decimal, as the number of its last digit's units. For arrays ``"float32[64]"`` also declares the
                length, ``"float32[<=64]"`` pads shorter ones at the end (with the fill value, else 0 or the empty
                text), ``"float32[*]"`` is a ragged tensor. For vectors of Spark ML ``"sparse float32"`` is a sparse
                tensor of the values that are not 0. Of binary columns ``"uint8[784]"`` takes the bytes of a row as so
                many numbers of that type, the low byte of each first, as NumPy's ``tobytes`` writes them.
            pack: name to numeric features of one dtype that become one tensor ``[rows, features]`` of that name.

        Raises:
            DataError: a column is missing or has a type that becomes no tensor.
            ConfigError: a null policy or dtype makes no sense.
        """
        choice: Any = {"features": features, "label": label, "nulls": nulls, "dtypes": dtypes, "pack": pack}
        return Schema.from_fields(spark_fields(schema), **choice)

    @staticmethod
    def from_fields(
        fields: Sequence[Field],
        *,
        features: Sequence[str] | None = None,
        label: str | None = None,
        nulls: Nulls | None = None,
        dtypes: Mapping[str, str] | None = None,
        pack: Mapping[str, Sequence[str]] | None = None,
    ) -> Schema:
        """As :meth:`from_spark`, for fields of any source."""
        check_choice(features, label, nulls, dtypes, pack)
        nulls, dtypes = nulls or {}, dtypes or {}
        nested = set()
        if features is None:
            features = [f.name for f in fields if f.name != label and not _ROW_NUMBERS.fullmatch(f.name)]
            nested = {f.name for f in fields if f.path}
        else:
            whole = [names_within(name, fields) for name in features]
            nested = {inner for name, inners in zip(features, whole, strict=True) for inner in inners if inner != name}
            features = [inner for inners in whole for inner in inners]
        chosen = [*features, *([] if label is None else [label])]
        missing, wrong = name_problems([f.name for f in fields], chosen, label, features, {**nulls, **dtypes})
        by_name = {f.name: f for f in fields}
        columns = []
        for name in dict.fromkeys(chosen):
            if name not in by_name:
                continue
            try:
                column = column_of(by_name[name], nulls.get(name, "error"), dtypes.get(name))
                columns.append(replace(column, nested=name in nested and name != label))
            except DataError as error:
                missing.append(str(error))
            except ConfigError as error:
                wrong += error.problems
        if not features:
            wrong.append("features: expected at least one column, got none")
        wrong += [*mask_problems(columns, label), *sparse_problems(columns, label)]
        packs = tuple(Pack(name, tuple(members)) for name, members in (pack or {}).items())
        wrong += pack_problems(packs, [c for c in columns if c.name != label], missing)
        if missing:
            raise DataError("\n".join([*missing, *wrong]))
        if wrong:
            raise ConfigError(wrong)
        warn_of_decimals(columns, dtypes)
        return Schema(tuple(columns), label, packs)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns that are not the label."""
        return tuple(c.name for c in self.columns if c.name != self.label)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of a batch, the label's last."""
        return self.inputs if self.label is None else (*self.inputs, *self.column(self.label).tensors)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the features: all but the label's; packs come after those of single columns."""
        packed = {name for p in self.packs for name in p.members}
        single = (t for c in self.columns if c.name != self.label for t in c.tensors[c.name in packed :])
        matrices = (Tensor(p.name, self.column(p.members[0]).dtype, (len(p.members),)) for p in self.packs)
        return (*single, *matrices)

    @property
    def model_inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a model reads: those of the features, or what a transform makes of them."""
        return self.inputs if self.outputs is None else self.outputs

    def column(self, name: str) -> Column:
        """The column of that name.

        Raises:
            DataError: there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise DataError(f"column {name!r}: not in the data{nearest(name, [c.name for c in self.columns])}")

    def with_lengths(self, lengths: Mapping[str, int]) -> Schema:
        """The same schema with the lengths of arrays and vectors decided; those without one are ragged.

        Args:
            lengths: column name to values in a row.
        """
        columns = (
            replace(c, shape=(lengths[c.name],), proved=c.proved or None in c.shape)
            if c.name in lengths
            else replace(c, layout="ragged")
            if None in c.shape
            else c
            for c in self.columns
        )
        return replace(self, columns=tuple(columns))

    def keras_inputs(self) -> dict[str, Any]:
        """A ``keras.Input`` for each tensor that the model reads, by name; ``[batch]`` for single values."""
        import keras

        # Keras keeps '/' for paths of variables.
        inputs = {
            t.name: keras.Input(
                t.shape,
                dtype=t.dtype,
                name=t.name.replace("/", "|"),
                ragged=None in t.shape or None,
                sparse=t.sparse or None,
            )
            for t in self.model_inputs
        }
        return self.model_batch(inputs)

    def model_batch(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names of the tensors that the model reads, in dicts as it takes them."""
        return _nested(self.model_inputs, values)

    def as_batch(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names of the feature tensors, in dicts as a batch has them: fields of a struct lie in one."""
        return _nested(self.inputs, values)

    def describe(self) -> str:
        """The element spec as text: one ``name: dtype[shape]`` a line, the label marked."""
        lines = [f"{t.name}: {t.text}" for t in self.model_inputs]
        if self.label is not None:
            label = self.column(self.label).tensors[0]
            lines.append(f"label {label.name}: {label.text}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """As JSON text, for :meth:`from_json`."""
        return json.dumps({"version": 1, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> Schema:
        """The schema of a text that :meth:`to_json` made."""
        raw = json.loads(text)
        tuples = ("shape", "path", "member")
        columns = tuple(Column(**{**c, **{k: tuple(c[k]) for k in tuples if k in c}}) for c in raw["columns"])
        packs = tuple(Pack(p["name"], tuple(p["members"])) for p in raw.get("packs", ()))
        outputs = raw.get("outputs") or ()
        tensors = (Tensor(n, dtype, tuple(shape), tuple(path), *rest) for n, dtype, shape, path, *rest in outputs)
        return Schema(columns, raw["label"], packs, tuple(tensors) if raw.get("outputs") is not None else None)


def _nested(tensors: Sequence[Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for tensor in tensors:
        inner = batch
        for key in tensor.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[tensor.path[-1] if tensor.path else tensor.name] = values[tensor.name]
    return batch
