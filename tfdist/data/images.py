"""Encoded images as tensors, and the name of one that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
            column, row and file.
    """
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    if len(sizes) != 3 or not all(isinstance(n, int) and n > 0 for n in sizes) or sizes[2] not in (1, 3, 4):
        raise ConfigError(f"decode_images: expected (height, width, channels) with 1, 3 or 4 channels, got {shape!r}")
    if dtype not in ("uint8", "float32"):
        raise ConfigError(f"decode_images: expected the dtype uint8 or float32, got {dtype!r}")
    return DecodeImages(column, (sizes[0], sizes[1], sizes[2]), dtype, resize)


def _decoded(wanted: DecodeImages, manifest: Manifest | None, contents: np.ndarray) -> np.ndarray:
    images = np.empty((len(contents), *wanted.shape), wanted.dtype)
    for row, content in enumerate(contents):
        try:
            image = tf.io.decode_image(content, channels=wanted.shape[2], expand_animations=False)
        except tf.errors.OpError as error:
            raise _refusal(wanted, manifest, row, content, f"no image that can be decoded ({error.message})") from None
        if image.shape != wanted.shape:
            if not wanted.resize:
                raise _refusal(wanted, manifest, row, content, f"one of shape {tuple(image.shape)}")
            image = tf.image.resize(image, wanted.shape[:2])
            image = image if wanted.dtype == "float32" else tf.cast(tf.round(image), tf.uint8)
        images[row] = image if wanted.dtype == "uint8" else np.asarray(image, np.float32) / 255
    return images


def _refusal(wanted: DecodeImages, manifest: Manifest | None, row: int, content: bytes, got: str) -> DataError:
    place = f"row {row} of a batch" if manifest is None else _place(manifest, wanted.column, content)
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
