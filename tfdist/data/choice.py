"""What a caller may say of columns: refused in words where it has another form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import ConfigError


def check_choice(features: Any, label: Any, nulls: Any, dtypes: Any, pack: Any) -> None:
    """Check the form of the arguments that choose columns; whether they fit the data is not known here.

    Raises:
        ConfigError: an argument has another form; ``problems`` holds all of them.
    """
    problems = [] if features is None else _names("features", features)
    if label is not None and not isinstance(label, str):
        problems.append(f"label: expected the name of a column, got {_told(label)}")
    problems += _mapping("nulls", nulls, "{'column': 'drop'}")
    problems += _mapping("dtypes", dtypes, "{'column': 'float32'}")
    problems += _mapping("pack", pack, "{'x': ['column', 'column']}")
    if isinstance(dtypes, Mapping):
        problems += [
            f"dtypes[{name!r}]: expected a text such as 'float32', got {_told(dtype)}"
            for name, dtype in dtypes.items()
            if not isinstance(dtype, str)
        ]
    if isinstance(pack, Mapping):
        problems += [problem for name, members in pack.items() for problem in _names(f"pack[{name!r}]", members)]
    if problems:
        raise ConfigError(problems)


def check_frame(df: Any) -> None:
    """Check that something is a DataFrame of Spark's.

    Raises:
        ConfigError: it is something else.
    """
    if hasattr(df, "sparkSession") and hasattr(df, "schema"):
        return
    if isinstance(df, str | Path):
        remedy = "say from_dataframe(spark.read.parquet(path)) or, to read the files as they lie, from_parquet(path)"
    elif type(df).__module__.partition(".")[0] in ("pandas", "pyarrow", "polars", "numpy"):
        remedy = "make one with spark.createDataFrame(...)"
    else:
        remedy = "select the rows with a Spark session, for example spark.table(name)"
    raise ConfigError(f"df: expected a Spark DataFrame, got {_told(df)}; {remedy}")


def _names(where: str, names: Any) -> list[str]:
    if isinstance(names, str):
        return [f"{where}: expected a list of column names, got {names!r}; say [{names!r}]"]
    if isinstance(names, Mapping) or not hasattr(names, "__iter__") or not hasattr(names, "__len__"):
        return [f"{where}: expected a list of column names, got {_told(names)}"]
    return [f"{where}: expected column names, got {_told(name)}" for name in names if not isinstance(name, str)]


def _mapping(where: str, given: Any, example: str) -> list[str]:
    if given is None or isinstance(given, Mapping):
        return []
    return [f"{where}: expected a dict such as {example}, got {_told(given)}"]


def _told(value: Any) -> str:
    """A value as an error shows it: in full where it is short."""
    text = repr(value) if isinstance(value, str | int | float | list | tuple | Path) else ""
    return text if text and len(text) <= 60 else f"{type(value).__module__}.{type(value).__qualname__}"
