"""Numbers in another dtype: which of them it holds, and the refusal of the others."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from tfdist.data.column import Column
from tfdist.data.types import element_type, is_fractional
from tfdist.errors import DataError


def cast(numbers: np.ndarray, column: Column) -> np.ndarray:
    """Numbers in the dtype of a column, as they are where they have it.

    Raises:
        DataError: the dtype does not hold all of them.
    """
    wanted = np.dtype(column.dtype)
    if numbers.dtype == wanted:
        return numbers
    if wanted.kind in "iu" and (outside := _lost_to_whole(numbers, wanted)) is not None:
        raise refusal(column, numbers.compress(outside))
    with np.errstate(over="ignore"):
        out = numbers.astype(wanted)
    if wanted.kind == "f" and np.isinf(out).any() and len(found := lost(numbers, column.dtype)):
        raise refusal(column, found)
    return out


def lost(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that a dtype does not hold: not as finite as they are, or not as whole; NaN is no whole number."""
    wanted = np.dtype(dtype)
    if wanted.kind == "f":
        with np.errstate(over="ignore"):
            infinite: np.ndarray = np.isinf(numbers.astype(wanted)) & np.isfinite(numbers)
        return numbers.compress(infinite)
    outside = _lost_to_whole(numbers, wanted)
    return numbers[:0] if outside is None else numbers.compress(outside)


def lost_decimals(decimals: pa.Array, dtype: str) -> list[Decimal]:
    """The decimals that are no whole numbers of a dtype, exactly: as floats some would round to one."""
    try:
        decimals.cast(pa.from_numpy_dtype(dtype))
    except pa.ArrowException:
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
        return [v for v in decimals.drop_null().to_pylist() if v % 1 or not low <= v <= high]
    return []


def refusal(column: Column, values: Sequence[Any] | np.ndarray) -> DataError:
    """The refusal of values that the dtype of a column does not hold.

    Args:
        column: of the values.
        values: at least one of them.
    """
    expected, remedy = unfit(column)
    return DataError(f"{expected}, got {len(values)} that do not, for example {values[0]}; {remedy}")


def unfit(column: Column) -> tuple[str, str]:
    """What was expected of values that the dtype of a column does not hold, and what to do."""
    expected = f"column {column.name!r}: expected values that fit {column.dtype}"
    if np.dtype(column.dtype).kind not in "iu" or not is_fractional(column.spark_type):
        return expected, "choose a wider dtype"
    whole = f"column {column.name!r}: expected whole numbers that fit {column.dtype}"
    if element_type(column.spark_type) in ("float", "double"):
        return whole, "round them in Spark, or keep floats"
    return whole, "choose 'scaled int64', 'float64' or 'string'"


def _lost_to_whole(numbers: np.ndarray, wanted: np.dtype[Any]) -> np.ndarray | None:
    """``[...] bool``: what is no whole number of a dtype; None where all are."""
    if not numbers.size:
        return None
    limits = np.iinfo(wanted)
    low, high = int(limits.min), int(limits.max)
    if numbers.dtype.kind == "f":
        # Limits that are powers of two, which floats hold exactly; NaN is in no range.
        fits = (numbers >= float(low)) & (numbers < float(high + 1)) & (np.floor(numbers) == numbers)
        return None if fits.all() else ~fits
    if low <= numbers.min().item() and numbers.max().item() <= high:  # Python compares them exactly
        return None
    return np.asarray((numbers < low) | (numbers > high))
