"""Arrow columns as numpy arrays, by the same rules in training and in scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdist.data.casts import cast, lost_decimals, refusal
from tfdist.data.column import Column
from tfdist.data.fills import fill_bytes
from tfdist.data.sparse import dense_of_entries, entries_of, entries_of_dense
from tfdist.data.texts import Raw, Text
from tfdist.data.types import decimal_digits, element_type, tensor_type
from tfdist.data.values import Ragged, Values
from tfdist.errors import DataError

_EXACT_DIGITS, _EXACT_POWER = 15, 22  # whole numbers of so many digits, and powers of ten, are float64 numbers

_STORAGE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.large_binary(),
    "binary": pa.large_binary(),
    "date": pa.int32(),
    "timestamp": pa.int64(),
    "timestamp_ntz": pa.int64(),
}


def values_of(values: pa.ChunkedArray | pa.Array, column: Column) -> tuple[Values, ...]:
    """The tensors of a column: its values, and its null mask ``[rows] bool`` where the policy is ``mask``.

    Arrays without nulls are views of Arrow's memory where the type allows it.

    Raises:
        DataError: nulls that the policy refuses, or values of another type or length.
    """
    array = _one_chunk(values)
    nulls = array.null_count
    if nulls and column.nulls in ("error", "drop"):
        raise null_error(column, nulls)
    own: Values
    if column.layout == "sparse" or pa.types.is_struct(array.type):
        own = _vectors(array, column)
    elif column.layout == "ragged":
        own = _ragged(array, column, len(column.shape))
    elif column.dtype == "string" and not column.shape:
        own = _texts(_stored(array, column), column)
    elif column.item_bytes:
        own = _numbers_in_bytes(array, column, column.item_bytes)
    else:
        own = (_lists if column.shape else _scalars)(array, column)
    if column.nulls != "mask":
        return (own,)
    return own, np.asarray(array.is_null()) if nulls else np.zeros(len(array), bool)


def null_error(column: Column, count: int, can_drop: bool = True) -> DataError:
    """The refusal of nulls that no policy covers; rows of files that are read as they lie cannot be dropped."""
    name, mask = column.name, f"'mask'{'' if can_drop else '}'} (adds {column.name + '_is_null'!r})"
    first = f"'drop'}} (leave the rows out), {mask}" if can_drop else mask
    return DataError(
        f"column {name!r}: expected no nulls, got {count}; say nulls={{{name!r}: {first} or ('fill', value), or filter "
        "them in Spark"
    )


def member_of(values: pa.ChunkedArray, member: Sequence[str]) -> pa.ChunkedArray:
    """A field inside a struct column; null where a struct around it is."""
    return pc.struct_field(values, list(member)) if member else values


def _one_chunk(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    if not isinstance(values, pa.ChunkedArray):
        return values
    if values.num_chunks == 1:
        return values.chunk(0)
    if values.num_chunks == 0:
        return pa.array([], values.type)
    if pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        values = values.cast(pa.large_binary())  # 32-bit offsets end at 2 GiB
    if pa.types.is_dictionary(values.type):
        values = values.unify_dictionaries()
    combined = values.combine_chunks()
    return combined if isinstance(combined, pa.Array) else combined.chunk(0)


def _scalars(array: pa.Array, column: Column) -> np.ndarray | Text:
    array = _stored(array, column)
    if column.dtype == "string":
        array = _without_nulls(array, column)
        return _text(array if pa.types.is_dictionary(array.type) else _binary(array).dictionary_encode())
    nulls = np.asarray(array.is_null()) if array.null_count else None
    if nulls is not None:
        array = array.fill_null(pa.scalar(False if pa.types.is_boolean(array.type) else 0, array.type))
    if column.scaled:
        numbers = _units(array)
    elif pa.types.is_boolean(array.type):
        # Arrow packs booleans to bits.
        numbers = array.cast(pa.uint8()).to_numpy(zero_copy_only=True).view(np.bool_)
    else:
        numbers = array.to_numpy(zero_copy_only=True)
    numbers = cast(numbers, column)
    if nulls is not None and column.fill:
        numbers = np.where(nulls, np.array(column.fill, numbers.dtype), numbers)
    return numbers


def _ragged(array: pa.Array, column: Column, depth: int) -> Values:
    """Lists of varying length, ``depth`` of them inside each other; a missing list is an empty one."""
    if not depth:
        return _scalars(array, column)
    if not _is_list(array):
        raise _type_error(array, column)
    inner = array.flatten()
    _check_inner_nulls(inner, column)
    splits = np.zeros(len(array) + 1, np.int64)
    np.cumsum(_lengths(array), out=splits[1:])
    return Ragged(_ragged(inner, column, depth - 1), splits)


def _vectors(array: pa.Array, column: Column) -> Values:
    """Vectors of Spark ML, each with its size and entries, or as arrays of all values."""
    (length,) = column.shape or (None,)
    if length is None or column.spark_type != "vector":
        raise _type_error(array, column)
    if not pa.types.is_struct(array.type):
        dense = _lists(array, replace(column, layout="fixed"))
        assert isinstance(dense, np.ndarray)
        return entries_of_dense(dense)
    sizes = pc.struct_field(array, "size")
    wrong = pc.index(pc.not_equal(sizes, length), True).as_py()
    if wrong >= 0:
        raise DataError(
            f"column {column.name!r}: expected vectors of size {length}, got one of {sizes[wrong].as_py()} in row "
            f"{wrong}; the vectors of a column have one size"
        )
    lists = pc.struct_field(array, "entries")
    splits = np.zeros(len(array) + 1, np.int64)
    np.cumsum(_lengths(lists), out=splits[1:])
    entries = lists.flatten()
    values = _scalars(pc.struct_field(entries, "value"), column)
    assert isinstance(values, np.ndarray)
    rows = entries_of(pc.struct_field(entries, "place").to_numpy(), values, splits)
    if column.layout == "sparse":
        return rows
    matrix = dense_of_entries(rows, length)
    if column.fill:
        matrix[np.asarray(array.is_null())] = column.fill
    return matrix


def _lists(array: pa.Array, column: Column) -> Values:
    """Vectors of one length."""
    if not _is_list(array):
        raise _type_error(array, column)
    (length,) = column.shape
    if length is None:
        raise DataError(f"column {column.name!r}: the length of its arrays is not known; declare it with dtypes")
    padded = column.layout == "padded"
    counts = pc.list_value_length(array)
    wrong = pc.index((pc.greater if padded else pc.not_equal)(counts, length), True).as_py()
    if wrong >= 0:
        expected = f"at most {length} values in its arrays" if padded else f"arrays of length {length}"
        got = counts[wrong].as_py()
        raise DataError(
            f"column {column.name!r}: expected {expected}, got {got} in row {wrong}; say dtypes={{{column.name!r}: "
            f"'{column.dtype}[*]'}} for ragged tensors, or '[<={max(got, length)}]' or more to pad them"
        )
    flat = array.flatten()
    _check_inner_nulls(flat, column)
    inner = _scalars(flat, column)
    if len(flat) == len(array) * length:
        return _shaped(inner, lambda values: values.reshape(len(array), length))
    taken = np.arange(length) < _lengths(array)[:, None]
    if isinstance(inner, Text):
        codes = np.full(taken.shape, len(inner.values), np.int32)
        codes[taken] = inner.codes
        blank = np.empty(1, object)
        blank[0] = _blank(column)
        return Text(codes, np.concatenate([inner.values, blank]))
    out = np.full(taken.shape, column.fill or 0, inner.dtype)
    out[taken] = inner
    return out


def _numbers_in_bytes(array: pa.Array, column: Column, item_bytes: int) -> np.ndarray:
    """Numbers that lie in a row of bytes one after another, the low byte of each first."""
    (length,) = column.shape
    if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        raise _type_error(array, column)
    assert length is not None
    sizes = pc.binary_length(array)
    wrong = pc.index(pc.not_equal(sizes, length * item_bytes), True).as_py()
    if wrong >= 0:
        raise DataError(
            f"column {column.name!r}: expected {length * item_bytes} bytes for {column.declared}, got "
            f"{sizes[wrong].as_py()} in row {wrong}"
        )
    there = array.drop_null()
    width = np.int64 if pa.types.is_large_binary(there.type) else np.int32
    _, offsets, content = there.buffers()
    start = int(np.frombuffer(offsets, width)[there.offset]) if len(there) else 0
    dtype = np.dtype(column.dtype).newbyteorder("<")
    values = np.frombuffer(content or b"", dtype, len(there) * length, start).reshape(len(there), length)
    if not array.null_count:
        return values if values.flags.aligned else values.copy()
    out = np.full((len(array), length), column.fill or 0, dtype)
    out[np.asarray(array.is_valid())] = values
    return out


def _lengths(array: pa.Array) -> np.ndarray:
    """``[rows] int64``, 0 for a missing list."""
    return np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)


def _check_inner_nulls(inner: pa.Array, column: Column) -> None:
    if inner.null_count and column.nulls != "fill":
        raise DataError(
            f"column {column.name!r}: expected no nulls inside its arrays, got {inner.null_count}; "
            "say ('fill', value) or fill them in Spark with transform"
        )


def _is_list(array: pa.Array) -> bool:
    kind = array.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _shaped(values: np.ndarray | Text, shape: Callable[[np.ndarray], np.ndarray]) -> Values:
    return Text(shape(values.codes), values.values) if isinstance(values, Text) else shape(values)


def _stored(array: pa.Array, column: Column) -> pa.Array:
    """The array in the type that its values have in memory, whatever Arrow type they came in."""
    spark_type = element_type(column.spark_type)
    if pa.types.is_dictionary(array.type):
        if column.dtype == "string" and not array.null_count:
            return array
        array = array.dictionary_decode()
    if column.scaled:
        wanted = pa.decimal128(*map(int, spark_type[len("decimal(") : -1].split(",")))
    elif decimal_digits(spark_type) is not None:
        if column.dtype.startswith("float") and pa.types.is_decimal(array.type):
            return _nearest_doubles(array)
        # Whole numbers at once: on the way through float64 they would lose digits from 2**53 on.
        whole = column.dtype.lstrip("u").startswith("int")
        exact = pa.from_numpy_dtype(column.dtype) if whole else pa.float64()
        wanted = pa.large_string() if column.dtype == "string" else exact
    elif spark_type.startswith("interval"):
        wanted = pa.int32() if tensor_type(spark_type) == tensor_type("int") else pa.int64()
    else:
        wanted = _STORAGE[spark_type]
    if array.type == wanted:
        return array
    try:
        if pa.types.is_timestamp(array.type):
            array = _microseconds(array, column)
        elif pa.types.is_duration(array.type):
            array = array.cast(pa.duration("us"))
        if pa.types.is_boolean(wanted) or pa.types.is_nested(array.type):
            raise _type_error(array, column)
        if pa.types.is_string(array.type) and not pa.types.is_large_binary(wanted):
            raise _type_error(array, column)
        return array.cast(wanted)
    except pa.ArrowException as error:
        if pa.types.is_decimal(array.type) and pa.types.is_integer(wanted):
            raise refusal(column, lost_decimals(array, column.dtype)) from error
        raise _type_error(array, column) from error


def _microseconds(array: pa.Array, column: Column) -> pa.Array:
    try:
        return array.cast(pa.timestamp("us", array.type.tz))
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {column.name!r}: expected times in whole microseconds of the years 1 to 9999, got {array.type} "
            f"with others ({error}); round them, or read the files through Spark with from_dataframe"
        ) from error


def _units(decimals: pa.Array) -> np.ndarray:
    """The whole numbers that a decimal128 array keeps, in 16 bytes each, the low ones first."""
    words = np.frombuffer(decimals.buffers()[1], np.int64)
    return np.ascontiguousarray(words[2 * decimals.offset :: 2][: len(decimals)])


def _blank(column: Column) -> bytes:
    """What stands in place of a missing text."""
    return fill_bytes(column.fill)


def _binary(array: pa.Array) -> pa.Array:
    return array if pa.types.is_large_binary(array.type) else array.cast(pa.large_string()).cast(pa.large_binary())


def _texts(array: pa.Array, column: Column) -> Text | Raw:
    """Texts by their codes where Arrow has them so, else as they are."""
    array = _without_nulls(array, column)
    if pa.types.is_dictionary(array.type):
        return _text(array)
    return Raw(pa.chunked_array([_binary(array)]))


def _nearest_doubles(decimals: pa.Array) -> pa.Array:
    """Each decimal as the float64 nearest to it, as Spark casts; Arrow's own cast is often a digit off."""
    digits, scale = decimals.type.precision, decimals.type.scale
    if digits > _EXACT_DIGITS or not 0 <= scale <= _EXACT_POWER:
        return decimals.cast(pa.string()).cast(pa.float64())
    # Both are float64 numbers exactly, and IEEE 754 rounds their quotient once.
    doubles = _units(decimals.cast(pa.decimal128(digits, scale))) / 10.0**scale
    return pa.array(doubles, mask=np.asarray(decimals.is_null()) if decimals.null_count else None)


def _without_nulls(texts: pa.Array, column: Column) -> pa.Array:
    if not texts.null_count:
        return texts
    return _binary(texts).fill_null(pa.scalar(_blank(column), pa.large_binary()))


def _text(array: pa.Array) -> Text:
    values = array.dictionary.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
    return Text(array.indices.cast(pa.int32()).to_numpy(zero_copy_only=True), values)


def _type_error(array: pa.Array, column: Column) -> DataError:
    return DataError(
        f"column {column.name!r}: expected values of the Spark type {column.spark_type}, got Arrow values of type "
        f"{array.type}; cast the column to {column.spark_type}"
    )
