"""The element spec as lines for a person: each column, its tensor and its nulls. Needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfdist.data.column import Column, Tensor
from tfdist.data.schema import Schema


@dataclass(frozen=True)
class Element:
    """A line of the element spec; a text is empty where there is nothing to say.

    Args:
        column: name of the column, or of a tensor that no single column becomes.
        spark_type: its type, or what the tensor is made of.
        tensor: dtype and shape of a row, ``*`` for a length that varies, ``?`` for one that is not known yet.
        nulls: how many there are.
        policy: what happens to them.
    """

    column: str
    spark_type: str
    tensor: str
    nulls: str = ""
    policy: str = ""


def elements(schema: Schema, null_counts: Mapping[str, int] | None = None) -> list[Element]:
    """The lines of a schema: columns in their order, matrices, the label, then what a transform makes of the features.

    Args:
        schema: of the data.
        null_counts: column to its nulls; of others the number is unknown.
    """
    counts = null_counts or {}
    packed = {name: pack.name for pack in schema.packs for name in pack.members}
    features = [schema.column(name) for name in schema.features]
    found: list[Element] = []
    for i, column in enumerate(features):
        if column.nested and (i == 0 or features[i - 1].path[:1] != column.path[:1]):
            found.append(_struct(column.path[0], [c for c in features if c.nested and c.path[0] == column.path[0]]))
        tensor = f"in {packed[column.name]}" if column.name in packed else _tensor(column)
        found += _lines(column, column.name, tensor, counts)
    found += [
        Element(tensor.name, f"{len(pack.members)} columns", tensor.text)
        for pack, tensor in zip(schema.packs, schema.inputs[len(schema.inputs) - len(schema.packs) :], strict=True)
    ]
    if schema.label is not None:
        label = schema.column(schema.label)
        found += _lines(label, f"{label.name} (label)", _tensor(label), counts)
    return [*found, *(_output(tensor) for tensor in schema.outputs or ())]


def _lines(column: Column, name: str, tensor: str, counts: Mapping[str, int]) -> Iterator[Element]:
    policy = f"fill {column.fill!r}" if column.nulls == "fill" else column.nulls
    count = f"{counts[column.name]:,}" if column.name in counts else "unknown"
    nulls = "left out" if column.nulls == "drop" else count
    if not column.nullable:
        nulls, policy = "never", ""
    yield Element(name, column.spark_type, tensor, nulls, policy)
    for mask in column.tensors[1:]:
        yield Element(mask.name, f"nulls of {column.name}", mask.text)


def _tensor(column: Column) -> str:
    text = column.tensors[0].text
    if not column.shape or column.layout == "ragged":
        return text
    if None in column.shape:
        return f"{text.replace('*', '?')}, length known when counted"
    if column.layout == "padded":
        return f"{text}, shorter ones padded"
    return f"{text}, length {'proved' if column.proved else 'declared'}"


def _struct(name: str, members: list[Column]) -> Element:
    return Element(name, "struct", f"dict of {', '.join(c.path[1] for c in members)}")


def _output(tensor: Tensor) -> Element:
    return Element(tensor.name, "made by the transform", tensor.text)
