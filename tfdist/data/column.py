"""A column and the tensor it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tfdist.data.types import tensor_type

NullPolicy = Literal["error", "drop", "mask", "fill"]
Layout = Literal["fixed", "padded", "ragged", "sparse"]


class Tensor(NamedTuple):
    """One tensor of a batch: ``[rows, *shape]``, ragged where a length is None, or sparse."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    path: tuple[str, ...] = ()
    """Keys under which it lies in a batch, one inside the other; none for its name alone."""
    sparse: bool = False
    """Whether only the values that are not 0 are there, each with its place."""
    raw: bool = False
    """Whether its texts are bytes, such as images, which rarely repeat."""

    @property
    def text(self) -> str:
        """For a person to read, for example ``float32[10]``, and ``*`` for a length that varies."""
        return f"{'sparse ' * self.sparse}{self.dtype}[{', '.join('*' if n is None else str(n) for n in self.shape)}]"


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
        layout: of arrays: ``fixed`` length, shorter ones ``padded`` to a length, or ``ragged``; of vectors ``fixed``
            or ``sparse``.
        scaled: whether a decimal becomes the whole number of its last digit's units.
        path: of a field inside a struct, the names from that of the column on.
        member: the part of the path to follow inside the column ``file_name`` of the files.
        proved: whether the length of its arrays was found in the rows, instead of declared.
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
    proved: bool = False
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
    def item_bytes(self) -> int | None:
        """Bytes of a number, where a row of the source holds the numbers of a tensor as bytes; None elsewhere."""
        return np.dtype(self.dtype).itemsize if self.spark_type == "binary" and self.dtype != "string" else None

    @property
    def declared(self) -> str:
        """What ``dtypes`` would say to get this tensor."""
        length = self.shape[0] if len(self.shape) == 1 else None
        wanted = "*" if length is None else f"<={length}" if self.layout == "padded" else str(length)
        known = len(self.shape) == 1 and (length is not None or self.layout == "ragged")
        manner = "scaled " if self.scaled else "sparse " if self.layout == "sparse" else ""
        return f"{manner}{self.dtype}{f'[{wanted}]' if known else ''}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensor, and with the policy ``mask`` the one that says where it was null."""
        path = self.path if self.nested else ()
        raw = self.spark_type == "binary" and self.dtype == "string"
        own = Tensor(self.name, self.dtype, self.shape, path, self.layout == "sparse", raw)
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
