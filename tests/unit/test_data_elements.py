"""The element spec as lines: what each kind of column becomes, and how many nulls it has."""

from __future__ import annotations

from dataclasses import replace

from tfdist.data import Schema
from tfdist.data.column import Tensor
from tfdist.data.elements import Element, elements
from tfdist.data.fields import Field

FIELDS = [
    Field("a", "int", "c0", nullable=False),
    Field("b", "double", "c1"),
    Field("c", "double", "c2"),
    Field("place.city", "string", "c3_0", path=("place", "city")),
    Field("place.at", "array<double>", "c3_1", path=("place", "at")),
    Field("words", "array<string>", "c4"),
    Field("codes", "array<int>", "c5"),
    Field("days", "array<date>", "c6"),
    Field("points", "array<array<float>>", "c7"),
    Field("v", "vector", "c8", length=10),
    Field("y", "boolean", "c9"),
]
CHOICE = {
    "label": "y",
    "nulls": {"b": ("fill", 0.5), "place.city": "mask", "codes": "drop"},
    "dtypes": {"c": "float64", "words": "string[<=4]", "codes": "int64[2]", "days": "int32[*]", "v": "sparse float32"},
    "pack": {"x": ["b", "c"]},
}


def test_each_kind_of_column_has_its_line() -> None:
    """Structs, lists of each layout, masks, matrices, the label and what a transform makes, with nulls and policies."""
    schema = Schema.from_fields(FIELDS, **CHOICE).with_lengths({"place.at": 3, "words": 4, "codes": 2, "v": 10})
    schema = replace(schema, outputs=(Tensor("z", "float32", (5, None)),))
    assert elements(schema, {"b": 1234, "c": 0, "place.city": 2, "codes": 0, "y": 0}) == [
        Element("a", "int", "int32[]", "never"),
        Element("b", "double", "in x", "1,234", "fill 0.5"),
        Element("c", "double", "in x", "0", "error"),
        Element("place", "struct", "dict of city, at"),
        Element("place.city", "string", "string[]", "2", "mask"),
        Element("place.city_is_null", "nulls of place.city", "bool[]"),
        Element("place.at", "array<double>", "float64[3], length proved", "unknown", "error"),
        Element("words", "array<string>", "string[4], shorter ones padded", "unknown", "error"),
        Element("codes", "array<int>", "int64[2], length declared", "left out", "drop"),
        Element("days", "array<date>", "int32[*]", "unknown", "error"),
        Element("points", "array<array<float>>", "float32[*, *]", "unknown", "error"),
        Element("v", "vector", "sparse float32[10], length declared", "unknown", "error"),
        Element("x", "2 columns", "float64[2]"),
        Element("y (label)", "boolean", "bool[]", "0", "error"),
        Element("z", "made by the transform", "float32[5, *]"),
    ]


def test_a_length_that_nobody_counted_is_a_question() -> None:
    """Before the rows are read, an array without a declared length shows that its length is not known."""
    schema = Schema.from_fields([FIELDS[4], FIELDS[7]])
    texts = [line.tensor for line in elements(schema)]
    assert texts == ["dict of at", "float64[?], length known when counted", "int32[?], length known when counted"]


def test_what_was_proved_is_kept_in_files() -> None:
    """A schema that is written and read again tells the same lines."""
    schema = Schema.from_fields(FIELDS, **CHOICE).with_lengths({"place.at": 3})
    assert elements(Schema.from_json(schema.to_json())) == elements(schema)
