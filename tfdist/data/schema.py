"""Columns of a DataFrame as tensors: decided from the Spark schema alone, before any worker starts."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from tfdist.data.choice import check_choice
from tfdist.data.types import (
    DTYPES,
    EXACT_DECIMAL_DIGITS,
    cast_problem,
    decimal_digits,
    simple_type,
    tensor_type,
    way_out,
)
from tfdist.errors import ConfigError, DataError

NullPolicy = Literal["error", "drop", "mask", "fill"]
Nulls = Mapping[str, "str | tuple[str, Any]"]
_POLICIES = "'error', 'drop', 'mask' or ('fill', value)"
Layout = Literal["fixed", "padded", "ragged"]
_DTYPE = re.compile(r"(scaled )?([a-z0-9]*)(?:\[(<=)?(\d+|\*)\])?")


class Tensor(NamedTuple):
    """One tensor of a batch: ``[rows, *shape]``, ragged where a length is None."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    path: tuple[str, ...] = ()
    """Keys under which it lies in a batch, one inside the other; none for its name alone."""

    @property
    def text(self) -> str:
        """For a person to read, for example ``float32[10]``, and ``*`` for a length that varies."""
        return f"{self.dtype}[{', '.join('*' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Field:
    """A column as a source has it.

    Args:
        name: as the user has it.
        spark_type: Spark's ``simpleString``, or ``vector``.
        file_name: its name in the Parquet files.
        nullable: whether a value may be missing.
        length: values in a row of an array or vector, None while unknown.
        path: of a field inside a struct, the names from that of the column on; its own name joins them by dots.
        member: the part of the path to follow inside the column ``file_name`` of the files.
    """

    name: str
    spark_type: str
    file_name: str
    nullable: bool = True
    length: int | None = None
    path: tuple[str, ...] = ()
    member: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column and the tensor it becomes.

    Args:
        name: as the user has it, dots and spaces included.
        file_name: its name in the Parquet files.
        spark_type: Spark's ``simpleString``, or ``vector``.
        dtype: name of the tensor's dtype, ``string`` for text and bytes.
        shape: of one row; None for a length that varies, or is not known yet.
        nullable: whether the source may hold nulls.
        nulls: what happens to them.
        fill: the value in their place, for ``fill``.
        layout: of arrays: ``fixed`` length, shorter ones ``padded`` to a length, or ``ragged``.
        scaled: whether a decimal becomes the whole number of its last digit's units.
        path: of a field inside a struct, the names from that of the column on.
        member: the part of the path to follow inside the column ``file_name`` of the files.
        nested: whether the tensor lies in dicts along the path, as the struct was chosen as a whole.
    """

    name: str
    file_name: str
    spark_type: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    nullable: bool = True
    nulls: NullPolicy = "error"
    fill: bool | int | float | str | None = None
    layout: Layout = "fixed"
    scaled: bool = False
    path: tuple[str, ...] = ()
    member: tuple[str, ...] = ()
    nested: bool = False

    @property
    def narrows(self) -> bool:
        """Whether its values are cast to a dtype that may not hold all of them."""
        natural = tensor_type(self.spark_type)
        if natural is None or self.scaled or natural.dtype in (self.dtype, "string", "bool"):
            return False
        if self.dtype == "float16":
            return natural.dtype not in ("int8", "int16")
        return self.dtype.lstrip("u").startswith("int") or (self.dtype, natural.dtype) == ("float32", "float64")

    @property
    def declared(self) -> str:
        """What ``dtypes`` would say to get this tensor."""
        length = self.shape[0] if len(self.shape) == 1 else None
        wanted = "*" if length is None else f"<={length}" if self.layout == "padded" else str(length)
        known = len(self.shape) == 1 and (length is not None or self.layout == "ragged")
        return f"{'scaled ' if self.scaled else ''}{self.dtype}{f'[{wanted}]' if known else ''}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensor, and with the policy ``mask`` the one that says where it was null."""
        path = self.path if self.nested else ()
        own = Tensor(self.name, self.dtype, self.shape, path)
        if self.nulls != "mask":
            return (own,)
        return own, Tensor(f"{self.name}_is_null", "bool", (), (*path[:-1], f"{path[-1]}_is_null") if path else ())


@dataclass(frozen=True)
class Pack:
    """Columns side by side in one tensor.

    Args:
        name: of the tensor.
        members: names of the columns, in their order.
    """

    name: str
    members: tuple[str, ...]


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
            features: columns to read, in this order; by default all but the label.
            label: the column to learn.
            nulls: column to ``"error"`` (the default), ``"drop"``, ``"mask"`` or ``("fill", value)``.
            dtypes: column to the dtype to cast to, for example ``"float32"``; ``"scaled int64"`` keeps all digits of a
                decimal, as the number of its last digit's units. For arrays ``"float32[64]"`` also declares the
                length, ``"float32[<=64]"`` pads shorter ones at the end (with the fill value, else 0 or the empty
                text), ``"float32[*]"`` is a ragged tensor.
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
            features = [f.name for f in fields if f.name != label]
            nested = {f.name for f in fields if f.path}
        else:
            whole = [names_within(name, fields) for name in features]
            nested = {inner for name, inners in zip(features, whole, strict=True) for inner in inners if inner != name}
            features = [inner for inners in whole for inner in inners]
        chosen = [*features, *([] if label is None else [label])]
        missing, wrong = _name_problems([f.name for f in fields], chosen, label, features, {**nulls, **dtypes})
        by_name = {f.name: f for f in fields}
        columns = []
        for name in dict.fromkeys(chosen):
            if name not in by_name:
                continue
            try:
                column = _column(by_name[name], nulls.get(name, "error"), dtypes.get(name))
                columns.append(replace(column, nested=name in nested and name != label))
            except DataError as error:
                missing.append(str(error))
            except ConfigError as error:
                wrong += error.problems
        if not features:
            wrong.append("features: expected at least one column, got none")
        wrong += _mask_problems(columns, label)
        packs = tuple(Pack(name, tuple(members)) for name, members in (pack or {}).items())
        wrong += _pack_problems(packs, [c for c in columns if c.name != label], missing)
        if missing:
            raise DataError("\n".join([*missing, *wrong]))
        if wrong:
            raise ConfigError(wrong)
        _warn_of_decimals(columns, dtypes)
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
            replace(c, shape=(lengths[c.name],))
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
            t.name: keras.Input(t.shape, dtype=t.dtype, name=t.name.replace("/", "|"), ragged=None in t.shape or None)
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
        tensors = (Tensor(n, dtype, tuple(shape), tuple(path)) for n, dtype, shape, path in raw.get("outputs") or ())
        return Schema(columns, raw["label"], packs, tuple(tensors) if raw.get("outputs") is not None else None)


def _nested(tensors: Sequence[Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for tensor in tensors:
        inner = batch
        for key in tensor.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[tensor.path[-1] if tensor.path else tensor.name] = values[tensor.name]
    return batch


def spark_fields(schema: Any) -> list[Field]:
    """The fields of a ``pyspark.sql.types.StructType``, with names ``c0``, ``c1`` ... in the files.

    Parquet refuses some names and reads a dot as a path; the place of a column names it safely. Fields inside structs
    come by themselves, as ``c1_0``, ``c1_1`` ...
    """
    return [leaf for i, field in enumerate(schema.jsonValue()["fields"]) for leaf in _leaves(field, f"c{i}", (), False)]


def _leaves(field: Mapping[str, Any], file_name: str, outer: tuple[str, ...], nullable: bool) -> list[Field]:
    path, kind, nullable = (*outer, field["name"]), field["type"], nullable or bool(field.get("nullable", True))
    if isinstance(kind, Mapping) and kind["type"] == "struct" and kind["fields"]:
        inner = enumerate(kind["fields"])
        return [leaf for i, one in inner for leaf in _leaves(one, f"{file_name}_{i}", path, nullable)]
    return [
        Field(
            name=".".join(path),
            spark_type=simple_type(kind),
            file_name=file_name,
            nullable=nullable,
            length=field.get("metadata", {}).get("ml_attr", {}).get("num_attrs"),
            path=path if outer else (),
        )
    ]


def names_within(name: str, fields: Sequence[Field]) -> list[str]:
    """The names that a chosen name stands for: a struct's are those of its fields."""
    if any(f.name == name for f in fields):
        return [name]
    inner = [f.name for f in fields if f.path and f.name.startswith(f"{name}.")]
    return inner or [name]


def _column(field: Field, policy: str | tuple[str, Any], wanted: str | None) -> Column:
    tensor = tensor_type(field.spark_type)
    if tensor is None:
        raise DataError(
            f"column {field.name!r}: the type {field.spark_type} becomes no tensor; {way_out(field.spark_type)}"
        )
    dtype, length, scaled = tensor.dtype, field.length, False
    layout: Layout = "ragged" if tensor.depth > 1 else "fixed"
    if wanted is not None:
        parsed = _DTYPE.fullmatch(wanted)
        where = f"dtypes[{field.name!r}]"
        if parsed is None or (parsed[2] and parsed[2] not in DTYPES) or not wanted:
            raise ConfigError(f"{where}: expected one of {', '.join(DTYPES)}, got {wanted!r}{nearest(wanted, DTYPES)}")
        if parsed[4] and tensor.depth != 1:
            raise ConfigError(f"{where}: expected no length for the type {field.spark_type}, got {wanted!r}")
        if parsed[4] and parsed[4] != "*" and int(parsed[4]) < 1:
            raise ConfigError(f"{where}: expected a length of at least 1, got {wanted!r}")
        if parsed[4] == "*" and (parsed[3] or field.spark_type == "vector"):
            raise ConfigError(f"{where}: expected a number as the length, got {wanted!r}")
        if parsed[4]:
            length = None if parsed[4] == "*" else int(parsed[4])
            layout = "ragged" if length is None else "padded" if parsed[3] else "fixed"
        scaled = bool(parsed[1])
        problem = cast_problem(field.spark_type, dtype, parsed[2] or dtype, scaled)
        if problem:
            raise ConfigError(f"{where}: {field.spark_type} cannot be cast to {wanted}; {problem}")
        dtype = parsed[2] or dtype
    nulls, fill = _policy(field.name, policy, dtype)
    shape = (length,) if tensor.depth == 1 else (None,) * tensor.depth
    return Column(
        name=field.name,
        file_name=field.file_name,
        spark_type=field.spark_type,
        dtype=dtype,
        shape=shape,
        nullable=field.nullable,
        nulls=nulls,
        fill=fill,
        layout=layout,
        scaled=scaled,
        path=field.path,
        member=field.member,
    )


def _policy(name: str, policy: Any, dtype: str) -> tuple[NullPolicy, Any]:
    if policy in ("error", "drop", "mask"):
        return cast(NullPolicy, policy), None
    if not (isinstance(policy, list | tuple) and len(policy) == 2 and policy[0] == "fill"):
        raise ConfigError(f"nulls[{name!r}]: expected {_POLICIES}, got {policy!r}")
    value = policy[1]
    fits: bool
    if dtype == "string":
        fits = isinstance(value, str)
    elif dtype == "bool":
        fits = isinstance(value, bool)
    elif dtype.startswith("float"):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and _is_held(value, dtype)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool) and _in_range(value, dtype)
    if not fits:
        raise ConfigError(f"nulls[{name!r}]: expected a fill value of type {dtype}, got {value!r}")
    return "fill", value


def _is_held(value: float, dtype: str) -> bool:
    largest = {"float16": 65504.0, "float32": 3.4028234663852886e38}.get(dtype, sys.float_info.max)
    return abs(value) <= largest or (isinstance(value, float) and not math.isfinite(value))


def _in_range(value: int, dtype: str) -> bool:
    bits = int(dtype.lstrip("uint"))
    if dtype.startswith("u"):
        return 0 <= value < 1 << bits
    return -(1 << bits - 1) <= value < 1 << bits - 1


def _name_problems(
    names: Sequence[str], chosen: Sequence[str], label: str | None, features: Sequence[str], settings: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    counts = Counter(names)
    missing = [
        f"column {name!r}: not in the data, which has {len(names)} columns{nearest(name, names)}"
        for name in dict.fromkeys(chosen)
        if name not in counts
    ]
    missing += [
        f"column {name!r}: {counts[name]} columns have this name; rename all but one"
        for name in dict.fromkeys(chosen)
        if counts[name] > 1
    ]
    wrong = [f"features: {name!r} is named {n} times" for name, n in Counter(features).items() if n > 1]
    if label is not None and label in features:
        wrong.append(f"features: {label!r} is the label; a model must not read it")
    wrong += [
        f"nulls or dtypes: expected one of the chosen columns, got {name!r}{nearest(name, chosen)}"
        for name in settings
        if name not in chosen
    ]
    return missing, wrong


def _mask_problems(columns: Sequence[Column], label: str | None) -> list[str]:
    names = Counter(t.name for c in columns for t in c.tensors)
    taken = [
        f"nulls[{c.name!r}]: the mask would be named {c.tensors[1].name!r}, which a column has; rename that column"
        for c in columns
        if c.nulls == "mask" and names[c.tensors[1].name] > 1
    ]
    return taken + [
        f"nulls[{c.name!r}]: a label has no mask; use 'error', 'drop' or ('fill', value)"
        for c in columns
        if c.name == label and c.nulls == "mask"
    ]


def _pack_problems(packs: Sequence[Pack], features: Sequence[Column], missing: Sequence[str]) -> list[str]:
    problems = []
    by_name = {c.name: c for c in features}
    uses = Counter(name for p in packs for name in p.members)
    names = Counter([*(t.name for c in features for t in c.tensors[c.name in uses :]), *(p.name for p in packs)])
    for pack in packs:
        where = f"pack[{pack.name!r}]"
        unknown = [name for name in pack.members if name not in by_name]
        problems += [
            f"{where}: expected features, got {name!r}{nearest(name, list(by_name))}" for name in unknown if not missing
        ]
        members = [by_name[name] for name in pack.members if name in by_name]
        if not pack.members:
            problems.append(f"{where}: expected at least one column, got none")
        problems += [
            f"{where}: expected single numbers, got column {c.name!r} of type {c.spark_type}"
            for c in members
            if c.shape or c.dtype == "string"
        ]
        dtypes = Counter(c.dtype for c in members)
        if len(dtypes) > 1:
            got = ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.items())
            problems.append(f"{where}: expected columns of one dtype, got {got}; cast them with dtypes")
        if names[pack.name] > 1:
            problems.append(f"{where}: another tensor has this name; choose one that no column has")
    return problems + [f"pack: column {name!r} is packed {n} times" for name, n in uses.items() if n > 1]


def _warn_of_decimals(columns: Sequence[Column], dtypes: Mapping[str, str]) -> None:
    for column in columns:
        digits = decimal_digits(column.spark_type)
        if digits is not None and digits > EXACT_DECIMAL_DIGITS and column.name not in dtypes:
            warnings.warn(
                f"column {column.name!r}: {column.spark_type} becomes float64, which keeps {EXACT_DECIMAL_DIGITS} "
                f"digits; say dtypes={{{column.name!r}: 'float64'}} to accept it, or 'string' to keep all digits",
                stacklevel=_users_level(),
            )


def _users_level() -> int:
    """The stacklevel of a warning, given where this is called, that points to the first line outside tfdist."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tfdist":
        level, frame = level + 1, frame.f_back
    return level


def nearest(name: str, known: Sequence[str]) -> str:
    """A question that ends the sentence about an unknown name; empty where no known one is near."""
    found = [other for other in known if other.casefold() == name.casefold()]
    found = found or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
