"""TFRecord files: which ones a folder holds, in which order, and their records with every checksum verified."""

from __future__ import annotations

import gzip
import inspect
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tfdist.errors import ConfigError, DataError

FRAME_BYTES = 16
"""Around each record: its length (8), the length's checksum (4), the content's (4); TensorFlow's record_writer.h."""

_GZIP_MAGIC = b"\x1f\x8b\x08"


class Record(NamedTuple):
    """A record and where it lies.

    Args:
        path: its file.
        number: how many records stand before it in the file.
        offset: how many bytes stand before it in the file; in what gzip unpacks, for a gzip file.
        content: its bytes.
    """

    path: str
    number: int
    offset: int
    content: bytes

    @property
    def where(self) -> str:
        """File, record and byte, as errors begin."""
        return f"{self.path}, record {self.number} at byte {self.offset}"


def record_files(path: Path) -> list[Path]:
    """The record files of a folder in the order of their names, numbers by value; or the one file.

    Raises:
        DataError: there is nothing, or a folder inside it, whose files would be left out.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: expected a TFRecord file or a folder of them, found nothing")
    found = [p for p in path.iterdir() if not p.name.startswith(("_", "."))]
    inner = sorted(p.name for p in found if p.is_dir())
    if inner:
        raise DataError(f"{path}: expected files only, found the folder {inner[0]!r}; read each folder by itself")
    return sorted(found, key=_natural)


def records(path: str) -> Iterator[Record]:
    """The records of a file, plain or gzip by its first bytes.

    Raises:
        DataError: the file is damaged or cut off, naming the byte. A file cut exactly between two records is a whole
            file by its format, unless it is gzip.
    """
    import tensorflow as tf

    packed = _is_gzip(path)
    # It takes no device, as tf.data would; it is called deprecated for as long as TensorFlow 2 exists.
    iterator = inspect.unwrap(tf.compat.v1.io.tf_record_iterator)
    offset, number = 0, 0
    try:
        for content in iterator(path, tf.io.TFRecordOptions(compression_type="GZIP" if packed else "")):
            yield Record(path, number, offset, content)
            offset += FRAME_BYTES + len(content)
            number += 1
    except tf.errors.OpError as error:
        raise _damage(path, number, offset, packed, error.message) from None
    # TensorFlow takes a header or a gzip stream that is cut off for the end.
    size = _unpacked_size(path) if packed else os.stat(path).st_size
    if isinstance(size, str) or size != offset:
        raise _damage(path, number, offset, packed, size if isinstance(size, str) else "the file is cut off")


def local_path(path: str | Path) -> Path:
    """A path or ``file:`` URL as an absolute path.

    Raises:
        ConfigError: it is a URL of another kind.
    """
    text = str(path)
    url = urlsplit(text)
    if url.scheme == "file" and not url.netloc:
        return Path(unquote(url.path)).absolute()
    if "://" in text or url.scheme == "file":
        raise ConfigError(f"path: expected a path or a file: URL of a mounted file system, got {text!r}")
    return Path(text).absolute()


def _damage(path: str, number: int, offset: int, packed: bool, reason: str) -> DataError:
    unpacked = " of what gzip unpacks" if packed else ""
    return DataError(
        f"{path}: expected a whole TFRecord file, got damage at byte {offset}{unpacked}, after {number} whole records "
        f"({reason}); write or copy the file again"
    )


def _unpacked_size(path: str) -> int | str:
    """How many bytes gzip unpacks, or what is wrong with the stream."""
    size = 0
    with gzip.open(path) as stream:
        try:
            while piece := stream.read(2**20):
                size += len(piece)
        except (EOFError, OSError, zlib.error) as error:
            return f"gzip: {error}"
    return size


def _is_gzip(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(12)
    except FileNotFoundError:
        raise DataError(f"{path}: found no such file; the driver and every executor must see it") from None
    # A plain record of 559,903 bytes begins with gzip's magic too; the checksum of its length tells them apart.
    return start.startswith(_GZIP_MAGIC) and _masked_crc32c(start[:8]) != int.from_bytes(start[8:], "little")


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _natural(path: Path) -> list[str | int]:
    """part-100000 stands after part-99999."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path.name)]
