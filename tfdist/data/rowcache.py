"""Rows that were read once, on the local disk: one after another in fixed width, found by their number."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from tfdist.data.column import Tensor
from tfdist.data.layout import Layout
from tfdist.data.location import make_folder
from tfdist.data.manifest import Manifest
from tfdist.data.rowgroups import RowGroups
from tfdist.data.schema import Schema
from tfdist.data.sparse import entry_type
from tfdist.data.texts import Text, as_text, plain
from tfdist.data.values import Ragged, Values, aligned
from tfdist.errors import DataError

_SPARE_BYTES = 64 * 2**20  # left free for others on the same disk


def local_dir() -> Path:
    """Folder for what is read again in later epochs: ``$TFDIST_LOCAL_DIR``, else the system's temporary folder."""
    folder = os.environ.get("TFDIST_LOCAL_DIR")
    if not folder:
        return Path(tempfile.gettempdir())
    make_folder(Path(folder), "TFDIST_LOCAL_DIR")
    return Path(folder)


class RowStore:
    """Rows on the local disk, written and found by their number.

    Files are deleted as soon as they are open, so that the disk is free again when the process ends, however it ends.

    Args:
        schema: of the rows.
        rows: how many numbers there are.
        needed_rows: how many of them will be written, for the disk space.
        row_bytes: of a row, on average.

    Raises:
        DataError: the disk has too little space.
    """

    def __init__(self, schema: Schema, rows: int, needed_rows: int, row_bytes: int) -> None:
        heap = _File()
        self._codecs = [_codec(tensor, heap) for tensor in schema.tensors]
        self._layout = Layout([codec.dtype for codec in self._codecs])
        width = self._layout.dtype.itemsize
        _check_space(max(width, row_bytes) * needed_rows)
        self._file = _File(width * rows)

    def write(self, start: int, tensors: Sequence[Values]) -> None:
        """Keep the tensors of consecutive rows, the first of which has the number ``start``.

        Raises:
            DataError: the disk is full.
        """
        encoded = [codec.encoded(values) for codec, values in zip(self._codecs, tensors, strict=True)]
        together, width = self._layout.together, self._layout.dtype.itemsize
        for first in range(0, len(encoded[0]), together):
            columns = [values[first : first + together] for values in encoded]
            rows = np.zeros(len(columns[0]), self._layout.dtype)
            self._layout.pack(columns, rows)
            self._file.write(rows, (start + first) * width)

    def take(self, rows: np.ndarray) -> list[Values]:
        """The tensors of rows.

        Args:
            rows: ``[n] int64``, their numbers; they were written.
        """
        taken = self._layout.take(np.frombuffer(self._file.mapped, self._layout.dtype), rows)
        return [codec.decoded(values) for codec, values in zip(self._codecs, taken, strict=True)]


class RowCache:
    """The rows of a data set, kept as they are first read.

    Args:
        manifest: the data set.
        rows: how many of its rows will be read, for the disk space.

    Raises:
        DataError: the disk has too little space.
    """

    def __init__(self, manifest: Manifest, rows: int) -> None:
        groups = [n for f in manifest.fragments for n in f.row_groups]
        self._starts = np.cumsum([0, *groups])
        self._store = RowStore(manifest.schema, int(self._starts[-1]), rows, manifest.row_bytes)
        self._reader = RowGroups(manifest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-cache")
        self._groups: dict[int, Future[None]] = {}

    def want(self, groups: Sequence[int]) -> None:
        """Have row groups read that are not here yet."""
        for group in groups:
            if group not in self._groups:
                self._groups[group] = self._thread.submit(self._fill, group)

    def take(self, rows: np.ndarray) -> list[Values]:
        """The tensors of rows.

        Args:
            rows: ``[n] int64``, their numbers in the order of the source; their row groups are wanted.
        """
        return self._store.take(rows)

    def wait(self, groups: Sequence[int]) -> None:
        """Wait until row groups are here.

        Raises:
            DataError: the disk is full, or a row group cannot be read.
        """
        for group in groups:
            self._groups[group].result()

    def _fill(self, group: int) -> None:
        self._store.write(int(self._starts[group]), self._reader.read(group))


class _File:
    """A file without a name, written by one thread and mapped into memory.

    Args:
        size_bytes: of the mapping; disk space is used only where something was written.
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self._raw = tempfile.TemporaryFile(prefix="tfdist-rows-", dir=local_dir())  # noqa: SIM115  lives as long as this
        weakref.finalize(self, self._raw.close)
        self._end = 0
        self._mapped: mmap.mmap | None = None
        if size_bytes:
            self._raw.truncate(size_bytes)
            self._mapped = mmap.mmap(self._raw.fileno(), size_bytes, prot=mmap.PROT_READ)

    @property
    def mapped(self) -> Any:
        """The bytes; what was appended since it was last asked for is there too."""
        if self._mapped is None or len(self._mapped) < self._end:
            # The old mapping lives on in the arrays that were made of it.
            self._mapped = mmap.mmap(self._raw.fileno(), self._end, prot=mmap.PROT_READ) if self._end else None
        return self._mapped or b""

    def append(self, array: np.ndarray, item_bytes: int = 1) -> int:
        """Write at the end, at a multiple of a size; returns the place in bytes."""
        start = -(-self._end // item_bytes) * item_bytes
        self.write(array, start)
        self._end = start + array.nbytes
        return start

    def write(self, array: np.ndarray, at: int) -> None:
        """Write at a place in bytes."""
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        try:
            while left:
                done = os.pwrite(self._raw.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _no_space(0) from error


class _Codec(Protocol):
    """How a tensor lies in a row.

    Attributes:
        dtype: of its part of the row, a sub-array where the tensor has a shape.
    """

    dtype: np.dtype[Any]

    def encoded(self, values: Any) -> np.ndarray:
        """``[rows, ...]``, as :meth:`decoded` takes it."""

    def decoded(self, stored: np.ndarray) -> Values:
        """The values again."""


class _Numbers:
    def __init__(self, dtype: str | np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype((np.dtype(dtype), shape))

    def encoded(self, values: np.ndarray) -> np.ndarray:
        return values

    def decoded(self, stored: np.ndarray) -> np.ndarray:
        return stored


class _Texts:
    """Texts by place and length; equal ones of a row group have one place."""

    def __init__(self, shape: tuple[int, ...], heap: _File) -> None:
        self.dtype = np.dtype((np.int64, (*shape, 2)))
        self._heap = heap

    def encoded(self, values: Values) -> np.ndarray:
        text = as_text(values)
        lengths = np.fromiter(map(len, text.values), np.int64, len(text.values))
        # A byte between them, so that also an empty text has a place of its own.
        start = self._heap.append(np.frombuffer(b"\0".join([*text.values, b""]), np.uint8))
        places = start + np.cumsum(lengths + 1) - lengths - 1
        both: np.ndarray = np.stack([places, lengths], axis=1)
        return np.take(both, text.codes, axis=0)

    def decoded(self, stored: np.ndarray) -> Text:
        codes, places = pd.factorize(stored[..., 0].reshape(-1))
        lengths = np.zeros(len(places), np.int64)
        lengths[codes] = stored[..., 1].reshape(-1)
        heap, values = self._heap.mapped, np.empty(len(places), object)
        values[:] = [heap[at : at + n] for at, n in zip(places.tolist(), lengths.tolist(), strict=True)]
        return Text(codes.reshape(stored.shape[:-1]).astype(np.int32), values)


class _Raw:
    """Bytes by place and length, each by itself."""

    def __init__(self, heap: _File) -> None:
        self.dtype = np.dtype((np.int64, (2,)))
        self._heap = heap

    def encoded(self, values: Values) -> np.ndarray:
        texts = plain(values)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        start = self._heap.append(np.frombuffer(b"".join(texts.tolist()), np.uint8))
        return np.stack([start + np.cumsum(lengths) - lengths, lengths], axis=1)

    def decoded(self, stored: np.ndarray) -> np.ndarray:
        heap, values = self._heap.mapped, np.empty(len(stored), object)
        values[:] = [heap[at : at + n] for at, n in stored.tolist()]
        return values


class _Lists:
    """Lists by the place and number of their values."""

    def __init__(self, inner: _Codec, heap: _File) -> None:
        self.dtype = np.dtype((np.int64, (2,)))
        self._inner = inner
        self._heap = heap

    def encoded(self, values: Ragged) -> np.ndarray:
        item = self._inner.dtype.itemsize
        start = self._heap.append(self._inner.encoded(values.values), item) // item
        return np.stack([values.splits[:-1] + start, np.diff(values.splits)], axis=1)

    def decoded(self, stored: np.ndarray) -> Ragged:
        starts, lengths = stored.T
        splits = np.zeros(len(stored) + 1, np.int64)
        np.cumsum(lengths, out=splits[1:])
        flat = np.repeat(starts - splits[:-1], lengths) + np.arange(splits[-1])
        heap, item = self._heap.mapped, self._inner.dtype
        values = np.frombuffer(heap, item.base, len(heap) // item.itemsize * int(np.prod(item.shape)))
        out = aligned((len(flat), *item.shape), item.base)
        if len(flat):
            np.take(values.reshape(-1, *item.shape), flat, axis=0, out=out, mode="clip")
        return Ragged(self._inner.decoded(out), splits)


def _codec(tensor: Tensor, heap: _File) -> _Codec:
    if tensor.sparse:
        return _Lists(_Numbers(entry_type(tensor.dtype), ()), heap)
    depth = len(tensor.shape) if None in tensor.shape else 0
    shape = () if depth else tuple(n for n in tensor.shape if n is not None)
    if tensor.raw and not tensor.shape:
        return _Raw(heap)
    codec: _Codec = _Texts(shape, heap) if tensor.dtype == "string" else _Numbers(tensor.dtype, shape)
    for _ in range(depth):
        codec = _Lists(codec, heap)
    return codec


def _check_space(needed_bytes: int) -> None:
    if shutil.disk_usage(local_dir()).free < needed_bytes + _SPARE_BYTES:
        raise _no_space(needed_bytes)


def _no_space(needed_bytes: int) -> DataError:
    folder, mib = local_dir(), 2**20
    wanted = f"{needed_bytes // mib + 1:,} MiB" if needed_bytes else "more space"
    return DataError(
        f"{folder}: expected {wanted} for the rows that are read again in later epochs, got "
        f"{shutil.disk_usage(folder).free // mib:,} MiB free; set TFDIST_LOCAL_DIR to another local disk on every "
        "worker, or say shuffle='pool', which mixes less and needs no disk; a stream needs none for one epoch"
    )
