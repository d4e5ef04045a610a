"""Rows as tf.train.Example messages and back: nothing changes on the way, or it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tfdist.data.features import BYTES, CASTS, FLOAT, INT64, SOURCES, Feature
from tfdist.data.records import Record
from tfdist.errors import DataError


def encode(batch: pa.RecordBatch, features: Sequence[Feature]) -> Iterator[bytes]:
    """The rows of a batch, whose columns are the features in this order, as serialized examples.

    Raises:
        DataError: an array holds a null.
    """
    from tensorflow.core.example.example_pb2 import Example

    columns = [_lists(column, feature) for column, feature in zip(batch.columns, features, strict=True)]
    for row in range(batch.num_rows):
        example = Example()
        held = example.features.feature
        for feature, column in zip(features, columns, strict=True):
            values = column[row]
            if values is not None:
                place = getattr(held[feature.name], feature.kind)
                place.SetInParent()  # an empty array is a list without values, no absent feature
                place.value.extend(values)
        yield example.SerializeToString(deterministic=True)


def decode(records: Sequence[Record], features: Sequence[Feature], closed: bool) -> pa.RecordBatch:
    """Records as columns ``c0``, ``c1``, ... of the features' types; an absent feature is a null.

    Args:
        records: serialized examples.
        features: what to read.
        closed: whether a feature that is not among them is an error; else it is left out.

    Raises:
        DataError: naming file, record and feature that are not as expected.
    """
    names = {feature.name for feature in features}
    columns: list[list[Any]] = [[] for _ in features]
    for record in records:
        held = _parsed(record)
        for feature, column in zip(features, columns, strict=True):
            column.append(_values(held.get(feature.name), feature, record))
        if closed and not names.issuperset(held):
            for name in sorted(held):
                if name not in names and held[name].WhichOneof("kind"):
                    raise DataError(
                        f"{record.where}: feature {name!r} is not among the columns found in the first records; "
                        "give schema= with the columns you want"
                    )
    arrays = [_array(column, feature, records) for column, feature in zip(columns, features, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(features))])


def infer(records: Iterable[Record], source: str) -> list[Feature]:
    """The features of some records, by name: scalars where each record that has one holds one value, else arrays.

    Args:
        records: serialized examples.
        source: where they are from, for the error that there are none.

    Raises:
        DataError: a feature is of two kinds, or there is none.
    """
    kinds: dict[str, str] = {}
    arrays, binary = set(), set()
    for record in records:
        for name, value in _parsed(record).items():
            kind = value.WhichOneof("kind")
            if kind is None:
                continue
            if kinds.setdefault(name, kind) != kind:
                raise DataError(
                    f"{record.where}: feature {name!r}: expected {_a(kinds[name])} as before, got {_a(kind)}"
                )
            values = getattr(value, kind).value
            if len(values) != 1:
                arrays.add(name)
            if kind == BYTES and name not in binary and not all(map(_is_text, values)):
                binary.add(name)
    if not kinds:
        raise DataError(f"{source}: expected records to find the columns in, got none with a feature; give schema=")
    elements = {INT64: "bigint", FLOAT: "float", BYTES: "string"}
    return [Feature(n, "binary" if n in binary else elements[kinds[n]], n in arrays) for n in sorted(kinds)]


def _lists(column: pa.Array, feature: Feature) -> list[list[Any] | None]:
    """The values of each row; None for a null."""
    if not feature.array:
        return [None if value is None else [value] for value in _plain(column, feature)]
    flat = column.flatten()
    if flat.null_count:
        raise DataError(
            f"column {feature.name!r}: expected no nulls inside its arrays, which a tf.train.Example cannot hold; "
            "fill them in Spark with transform, or leave them out with array_compact"
        )
    values, lists, start = _plain(flat, feature), [], 0
    for length in column.value_lengths().to_pylist():
        lists.append(None if length is None else values[start : start + length])
        start += length or 0
    return lists


def _plain(values: pa.Array, feature: Feature) -> list[Any]:
    if feature.kind == INT64:
        values = values.cast(pa.int32() if feature.element == "date" else pa.int64())
    elif feature.element == "string":
        values = values.cast(pa.large_binary())
    return list(values.to_pylist())


def _parsed(record: Record) -> Mapping[str, Any]:
    """The features of an example, by name."""
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet
    from tensorflow.core.example.example_pb2 import Example

    try:
        example = Example.FromString(record.content)
        foreign = len(UnknownFieldSet(example))
    except DecodeError:
        foreign = 1
    if foreign:  # for example a SequenceExample, which would come out as an example without its sequences
        raise DataError(f"{record.where}: expected a tf.train.Example, got {len(record.content)} bytes of another kind")
    held: Mapping[str, Any] = example.features.feature
    return held


def _values(value: Any, feature: Feature, record: Record) -> Any:
    kind = None if value is None else value.WhichOneof("kind")
    if kind is None:
        return None
    if kind != feature.kind:
        raise DataError(
            f"{record.where}: feature {feature.name!r}: expected {_a(feature.kind)} for {feature.spark_type}, "
            f"got {_a(kind)}"
        )
    values = list(getattr(value, kind).value)
    if feature.array:
        return values
    if len(values) != 1:
        raise DataError(
            f"{record.where}: feature {feature.name!r}: expected one value for {feature.spark_type}, "
            f"got {len(values)}; read it as array<{feature.element}> with schema="
        )
    return values[0]


def _array(values: list[Any], feature: Feature, records: Sequence[Record]) -> pa.Array:
    try:
        return _cast(values, feature)
    except pa.ArrowInvalid:
        for value, record in zip(values, records, strict=True):
            try:
                _cast([value], feature)
            except pa.ArrowInvalid:
                wider = "binary" if feature.kind == BYTES else "bigint"
                raise DataError(
                    f"{record.where}: feature {feature.name!r}: expected values that fit {feature.spark_type}, got "
                    f"{str(value)[:80]}; read it as {f'array<{wider}>' if feature.array else wider} with schema="
                ) from None
        raise


def _cast(values: list[Any], feature: Feature) -> pa.Array:
    def shaped(element: pa.DataType) -> pa.DataType:
        return pa.list_(element) if feature.array else element

    array = pa.array(values, shaped(SOURCES[feature.kind]))
    for step in CASTS[feature.element]:
        if step == pa.bool_():
            flat = (array.flatten() if feature.array else array).drop_null()
            if len(flat) and max(flat.to_pylist()) > 1:
                raise pa.ArrowInvalid("expected 0 or 1")
        array = array.cast(shaped(step))
    return array


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _a(kind: str) -> str:
    return f"an {kind}" if kind == INT64 else f"a {kind}"
