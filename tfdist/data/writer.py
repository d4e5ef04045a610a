"""Rows of a DataFrame to Parquet files in a folder, by Spark."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyspark.sql import DataFrame

from tfdist.data.fields import nearest
from tfdist.data.location import hadoop_url
from tfdist.data.storage import Storage
from tfdist.errors import ConfigError, DataError

ROW_GROUP_ROWS = 32768
"""benchmarks/pipeline.py: smaller ones cost reads, larger ones memory while shuffling."""

_ROW_GROUP_BYTES = 16 * 2**20
_CODECS = {"snappy": "snappy", "zstd": "zstd", "lz4": "lz4_raw", "gzip": "gzip", "none": "uncompressed"}
_NO_FILE_SYSTEM = re.compile(r'No FileSystem for scheme "?([\w+.-]+)|Class (org\.apache\.hadoop\.fs\.\S+) not found')


@dataclass(frozen=True)
class FileOptions:
    """How files are cut and packed.

    Args:
        row_group_rows: most rows of a row group.
        compression: one of ``snappy``, ``zstd``, ``lz4``, ``gzip`` and ``none``.

    Raises:
        ConfigError: a value is none of these.
    """

    row_group_rows: int = ROW_GROUP_ROWS
    compression: str = "snappy"

    def __post_init__(self) -> None:
        problems = []
        rows, codec = self.row_group_rows, self.compression
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            problems.append(f"row_group_rows: expected a whole number of at least 1, got {rows!r}")
        if not isinstance(codec, str) or codec not in _CODECS:
            names = ", ".join(map(repr, _CODECS))
            problems.append(f"compression: expected one of {names}, got {codec!r}{nearest(str(codec), list(_CODECS))}")
        if problems:
            raise ConfigError(problems)


def write_files(rows: DataFrame, folder: Storage, options: FileOptions) -> None:
    """Write the rows.

    Raises:
        ConfigError: Spark does not know the file system of the folder.
        DataError: the driver does not see what the executors wrote.
    """
    try:
        (
            rows.write.option("parquet.block.size", _ROW_GROUP_BYTES)
            .option("parquet.block.row.count.limit", options.row_group_rows)
            .option("compression", _CODECS[options.compression])
            .parquet(hadoop_url(folder))
        )
    except Exception as error:
        if found := _NO_FILE_SYSTEM.search(str(error)):
            raise ConfigError(
                f"cache_dir: Spark does not know {found[1] or found[2]}, which it needs for {folder.parent.url}; add "
                "Hadoop's package for it to the session"
            ) from error
        raise
    if folder.stat("_SUCCESS") is None:
        raise DataError(
            f"cache_dir: expected a folder that the driver and all executors see, got {folder.parent.url}, where the "
            "driver finds nothing that was written; use shared storage"
        )
