"""Encoded images as tensors, and the name of one that cannot be read."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from tfdist.data.arrow import member_of
from tfdist.data.failures import noted
from tfdist.data.manifest import Manifest
from tfdist.data.transform import manifest_read
from tfdist.errors import ConfigError, DataError

_TOGETHER = 8  # images that a thread decodes at a time: some milliseconds


@dataclass(frozen=True)
class DecodeImages:
    """A transform that decodes a column of images; see :func:`decode_images`."""

    column: str
    shape: tuple[int, int, int]
    dtype: str = "uint8"
    resize: bool = False

    def __call__(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features with ``[rows, height, width, channels]`` in place of the encoded images."""
        if self.column not in features:
            raise ConfigError(f"decode_images: expected one of the features {list(features)}, got {self.column!r}")
        if features[self.column].dtype != tf.string:
            raise ConfigError(
                f"decode_images: expected encoded bytes in {self.column!r}, got {features[self.column].dtype.name}"
            )
        decode = noted(partial(_decoded, self, manifest_read()))
        images = tf.numpy_function(decode, [features[self.column]], self.dtype, stateful=False)
        return {**features, self.column: tf.ensure_shape(images, (None, *self.shape))}


def decode_images(
    column: str, shape: tuple[int, int, int], *, dtype: str = "uint8", resize: bool = False
) -> DecodeImages:
    """A transform that decodes a binary column of JPEG, PNG, GIF (its first picture) or BMP images.

    Args:
        column: holds the bytes of an image in each row.
        shape: height, width and channels (1, 3 or 4) of each image.
        dtype: ``uint8``, or ``float32`` from 0 to 1.
        resize: bring images of another size to this one, bilinearly; otherwise they are an error.

    Raises:
        ConfigError: a setting makes no sense. While reading, an image that cannot be decoded is a DataError that names
            column, row and file; where there are no files, in a stream and in scoring, its SHA-256.
    """
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    if len(sizes) != 3 or not all(isinstance(n, int) and n > 0 for n in sizes) or sizes[2] not in (1, 3, 4):
        raise ConfigError(f"decode_images: expected (height, width, channels) with 1, 3 or 4 channels, got {shape!r}")
    if dtype not in ("uint8", "float32"):
        raise ConfigError(f"decode_images: expected the dtype uint8 or float32, got {dtype!r}")
    return DecodeImages(column, (sizes[0], sizes[1], sizes[2]), dtype, resize)


def _decoded(wanted: DecodeImages, manifest: Manifest | None, contents: np.ndarray) -> np.ndarray:
    """``[rows, height, width, channels]`` of the encoded images of a batch, several at a time."""
    images = np.empty((len(contents), *wanted.shape), wanted.dtype)

    def decode(start: int) -> None:
        with tf.device("CPU:0"):
            for row in range(start, min(start + _TOGETHER, len(contents))):
                try:
                    _decode(wanted, contents[row], images[row])
                except _UnusableError as error:
                    raise _refusal(wanted, manifest, row, contents[row], str(error)) from None

    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    starts = range(0, len(contents), _TOGETHER)
    for _ in map(decode, starts) if threads == 1 else _pool(threads).map(decode, starts):
        pass  # in order, so that the first of several is told
    return images


class _UnusableError(Exception):
    """What came in place of an image."""


def _decode(wanted: DecodeImages, content: bytes, out: np.ndarray) -> None:
    # The operations themselves: what TensorFlow wraps around them holds the lock of Python, which other threads need.
    ops = tf.raw_ops
    try:
        image = ops.DecodeImage(contents=content, channels=wanted.shape[2], dtype=tf.uint8, expand_animations=False)
    except tf.errors.OpError as error:
        reason = error.message.rpartition("}} ")[2].partition(" [Op:")[0]  # without the names of operations
        raise _UnusableError(f"no image that can be decoded ({reason})") from None
    pixels = np.asarray(image)
    if pixels.shape != wanted.shape:
        if not wanted.resize:
            raise _UnusableError(f"one of shape {pixels.shape}")
        alone = ops.ExpandDims(input=image, axis=0)
        pixels = np.asarray(ops.ResizeBilinear(images=alone, size=wanted.shape[:2], half_pixel_centers=True))[0]
    if wanted.dtype == "float32":
        np.divide(pixels, np.float32(255), out=out)
    elif pixels.dtype == np.uint8:
        out[:] = pixels
    else:
        np.rint(pixels, out=out, casting="unsafe")


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """For all pipelines of the process, which together take no more threads than TensorFlow would."""
    return ThreadPoolExecutor(threads, "decode-images")


def _refusal(wanted: DecodeImages, manifest: Manifest | None, row: int, content: bytes, got: str) -> DataError:
    if manifest is None:
        digest = hashlib.sha256(content).hexdigest()
        place = f"row {row} of a batch; Spark finds it where sha2({wanted.column}, 256) is '{digest}'"
    else:
        place = _place(manifest, wanted.column, content)
    return DataError(
        f"column {wanted.column!r}: expected images of shape {wanted.shape}, got {got}, {len(content)} bytes, "
        f"in {place}"
    )


def _place(manifest: Manifest, name: str, content: bytes) -> str:
    """The first row that holds these bytes; searched for, since it is needed once in the life of a data set."""
    column, before = manifest.schema.column(name), 0
    for fragment in manifest.fragments:
        path = manifest.storage.shown(fragment.path)
        with manifest.storage.parquet(fragment.path) as file:
            for group, rows in enumerate(fragment.row_groups):
                table = file.read_row_group(group, columns=[".".join((column.file_name, *column.member))])
                values = member_of(table.column(0), column.member).cast(pa.large_binary())
                found = pc.index(values, pa.scalar(content, pa.large_binary())).as_py()
                if found >= 0:
                    return f"row {before + found} of the data (row {found} of row group {group} of {path})"
                before += rows
    return "a row of the data"
