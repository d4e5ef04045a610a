"""What a user says of columns, applied to the fields of a source, or refused with the way out."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tfdist.data.column import Column, Layout, NullPolicy, Pack
from tfdist.data.fields import Field, nearest
from tfdist.data.fills import fill_of
from tfdist.data.types import (
    DTYPES,
    EXACT_DECIMAL_DIGITS,
    cast_problem,
    decimal_digits,
    tensor_type,
    way_out,
)
from tfdist.errors import ConfigError, DataError

_POLICIES = "'error', 'drop', 'mask' or ('fill', value)"
_WANTED = (*DTYPES, "scaled int64", "sparse float32", "sparse float64")
_DTYPE = re.compile(r"(scaled |sparse )?([a-z0-9]*)(?:\[(<=)?(\d+|\*)\])?")


def column_of(field: Field, policy: str | tuple[str, Any], wanted: str | None) -> Column:
    """The column that a field becomes under a null policy and a dtype.

    Raises:
        DataError: its type becomes no tensor.
        ConfigError: the policy or the dtype makes no sense.
    """
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
            raise ConfigError(f"{where}: expected one of {', '.join(DTYPES)}, got {wanted!r}{nearest(wanted, _WANTED)}")
        numbers = field.spark_type == "binary" and parsed[2] not in ("", "string")
        if parsed[4] and tensor.depth != 1 and not numbers:
            raise ConfigError(f"{where}: expected no length for the type {field.spark_type}, got {wanted!r}")
        if parsed[4] and parsed[4] != "*" and int(parsed[4]) < 1:
            raise ConfigError(f"{where}: expected a length of at least 1, got {wanted!r}")
        if parsed[4] == "*" and (parsed[3] or field.spark_type == "vector"):
            raise ConfigError(f"{where}: expected a number as the length, got {wanted!r}")
        if parsed[4]:
            length = None if parsed[4] == "*" else int(parsed[4])
            layout = "ragged" if length is None else "padded" if parsed[3] else "fixed"
        if parsed[1] == "sparse ":
            if field.spark_type != "vector":
                raise ConfigError(
                    f"{where}: expected a vector of Spark ML to become sparse, got {field.spark_type}; make one with "
                    "pyspark.ml.functions.array_to_vector"
                )
            if parsed[3]:
                raise ConfigError(f"{where}: expected one length of a sparse tensor, got {wanted!r}")
            layout = "sparse"
        scaled = parsed[1] == "scaled "
        if numbers and not scaled:
            if layout != "fixed" or length is None or parsed[2] == "bool":
                raise ConfigError(
                    f"{where}: expected for bytes that are numbers their type and how many a row has, for example "
                    f"'uint8[784]', got {wanted!r}"
                )
            problem = None
        else:
            problem = cast_problem(field.spark_type, dtype, parsed[2] or dtype, scaled)
        if problem:
            raise ConfigError(f"{where}: {field.spark_type} cannot be cast to {wanted}; {problem}")
        dtype = parsed[2] or dtype
    nulls, fill = _policy(field.name, policy, (field.spark_type, dtype, scaled))
    if layout == "sparse" and fill:
        raise ConfigError(
            f"nulls[{field.name!r}]: expected ('fill', 0), 'mask' or 'drop' for a sparse column, got {policy!r}, which "
            "would fill whole rows; leave out 'sparse' in its dtype"
        )
    shape = (length,) if tensor.depth == 1 or length is not None else (None,) * tensor.depth
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


def _policy(name: str, policy: Any, tensor: tuple[str, str, bool]) -> tuple[NullPolicy, Any]:
    if policy in ("error", "drop", "mask"):
        return cast(NullPolicy, policy), None
    if not (isinstance(policy, list | tuple) and len(policy) == 2 and policy[0] == "fill"):
        raise ConfigError(f"nulls[{name!r}]: expected {_POLICIES}, got {policy!r}")
    return "fill", fill_of(name, policy[1], *tensor)


def name_problems(
    names: Sequence[str], chosen: Sequence[str], label: str | None, features: Sequence[str], settings: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Columns that are missing or double, and other settings that name columns wrongly."""
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


def mask_problems(columns: Sequence[Column], label: str | None) -> list[str]:
    """What is wrong with masks of nulls."""
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


def sparse_problems(columns: Sequence[Column], label: str | None) -> list[str]:
    """What is wrong with sparse columns."""
    return [
        f"dtypes[{c.name!r}]: a label is dense, as Keras' losses need it; leave out 'sparse'"
        for c in columns
        if c.name == label and c.layout == "sparse"
    ]


def pack_problems(packs: Sequence[Pack], features: Sequence[Column], missing: Sequence[str]) -> list[str]:
    """What is wrong with matrices of several features."""
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


def warn_of_decimals(columns: Sequence[Column], dtypes: Mapping[str, str]) -> None:
    """Warn of decimals that lose digits as float64."""
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
