"""Spark DataFrames and Parquet files as training data: exact, in a known order, shared between workers.

Names are loaded when first used; importing this package pulls in neither TensorFlow nor pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.data.cache import cached_data as cached_data
    from tfdist.data.cache import delete_data as delete_data
    from tfdist.data.cache import delete_expired as delete_expired
    from tfdist.data.handle import Handle as Handle
    from tfdist.data.images import decode_images as decode_images
    from tfdist.data.materialize import from_dataframe as from_dataframe
    from tfdist.data.parquet import from_parquet as from_parquet
    from tfdist.data.schema import Schema as Schema
    from tfdist.data.streaming import Stream as Stream
    from tfdist.data.streaming import stream as stream
    from tfdist.data.tables import batch_from_arrow as batch_from_arrow
    from tfdist.data.tfrecord import read_tfrecords as read_tfrecords
    from tfdist.data.tfrecord import write_tfrecords as write_tfrecords
    from tfdist.data.transform import per_row as per_row

_HOMES = {
    "Handle": "tfdist.data.handle",
    "Schema": "tfdist.data.schema",
    "Stream": "tfdist.data.streaming",
    "batch_from_arrow": "tfdist.data.tables",
    "cached_data": "tfdist.data.cache",
    "decode_images": "tfdist.data.images",
    "delete_data": "tfdist.data.cache",
    "delete_expired": "tfdist.data.cache",
    "from_dataframe": "tfdist.data.materialize",
    "from_parquet": "tfdist.data.parquet",
    "per_row": "tfdist.data.transform",
    "read_tfrecords": "tfdist.data.tfrecord",
    "write_tfrecords": "tfdist.data.tfrecord",
    "stream": "tfdist.data.streaming",
}

__all__ = [
    "Handle",
    "Schema",
    "Stream",
    "batch_from_arrow",
    "cached_data",
    "decode_images",
    "delete_data",
    "delete_expired",
    "from_dataframe",
    "from_parquet",
    "per_row",
    "read_tfrecords",
    "stream",
    "write_tfrecords",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfdist.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
