"""What stands in place of nulls, as plain numbers and texts."""

from __future__ import annotations

import math
import sys
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from tfdist.data.types import decimal_scale, element_type
from tfdist.errors import ConfigError

Fill = bool | int | float | str

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def fill_of(name: str, value: Any, spark_type: str, dtype: str, scaled: bool = False) -> Fill:
    """The value of a tensor in place of a null.

    Args:
        name: of the column.
        value: as the user has it: of the tensor's dtype; bytes for texts; a ``date``, ``datetime`` or ``Decimal`` for
            columns that hold them.
        spark_type: of the column.
        dtype: of the tensor.
        scaled: whether the tensor holds units of a decimal's last digit.

    Raises:
        ConfigError: the tensor cannot hold the value.
    """
    plain: Fill = _plain(value, element_type(spark_type), spark_type, scaled)
    fits: bool
    if dtype == "string":
        fits = isinstance(plain, str)
    elif dtype == "bool":
        fits = isinstance(plain, bool)
    elif dtype.startswith("float"):
        fits = isinstance(plain, int | float) and not isinstance(plain, bool) and _is_held(plain, dtype)
    else:
        fits = isinstance(plain, int) and not isinstance(plain, bool) and _in_range(plain, dtype)
    if not fits:
        raise ConfigError(f"nulls[{name!r}]: expected a fill value of type {_wanted(spark_type, dtype)}, got {value!r}")
    return plain


def fill_bytes(fill: Fill | None) -> bytes:
    """The text in place of a null; empty where none was chosen."""
    return fill.encode(errors="surrogateescape") if isinstance(fill, str) else b""


def _plain(value: Any, element: str, spark_type: str, scaled: bool) -> Any:
    """The value as the tensor has it; as it is where it is of no special type, or of none that the column holds."""
    match value:
        case bytes():
            return value.decode(errors="surrogateescape")  # JSON keeps no bytes; fill_bytes makes them again
        case datetime() if element == "timestamp_ntz" and value.tzinfo is None:
            return (value.replace(tzinfo=timezone.utc) - _EPOCH) // timedelta(microseconds=1)
        case datetime() if element == "timestamp" and value.tzinfo is not None:
            return (value - _EPOCH) // timedelta(microseconds=1)
        case date() if element == "date" and not isinstance(value, datetime):
            return (value - _EPOCH.date()).days
        case Decimal() if (scale := decimal_scale(spark_type)) is not None and value.is_finite():
            if not scaled:
                return float(value)
            units = value.scaleb(scale)
            return int(units) if units == units.to_integral_value() else value
    return value


def _wanted(spark_type: str, dtype: str) -> str:
    match element_type(spark_type):
        case "date":
            return f"{dtype} (days since 1970-01-01), or a date"
        case "timestamp":
            return f"{dtype} (microseconds since 1970-01-01 UTC), or a datetime with a time zone"
        case "timestamp_ntz":
            return f"{dtype} (microseconds since 1970-01-01), or a datetime without a time zone"
        case "binary":
            return "bytes or string"
        case _:
            return dtype


def _is_held(value: float, dtype: str) -> bool:
    largest = {"float16": 65504.0, "float32": 3.4028234663852886e38}.get(dtype, sys.float_info.max)
    return abs(value) <= largest or (isinstance(value, float) and not math.isfinite(value))


def _in_range(value: int, dtype: str) -> bool:
    bits = int(dtype.lstrip("uint"))
    if dtype.startswith("u"):
        return 0 <= value < 1 << bits
    return -(1 << bits - 1) <= value < 1 << bits - 1
