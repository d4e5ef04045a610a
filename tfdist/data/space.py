"""Room on the disk for the files of a data set: what is surely too little, and what to do when there was too little."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from tfdist.data.storage import Storage
from tfdist.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_PACKED = frozenset({"ParquetFileFormat", "OrcFileFormat"})
_SAME_ROWS = frozenset({"SubqueryAlias", "Sort", "Repartition", "RepartitionByExpression", "RebalancePartitions"})
_MOST_SMALLER = 10  # times: how much smaller than the source's Parquet files ours may be, by another compression
_NONSENSE = 2**60  # Spark's estimate where it knows nothing is 2**63 - 1


def check_room(rows: DataFrame, cache: Storage) -> None:
    """Refuse rows for which the disk of a local cache surely lacks room.

    Raises:
        DataError: it does.
    """
    if not cache.is_local:
        return
    free, source = _free_bytes(cache), _source_bytes(rows)
    if source is not None and source // _MOST_SMALLER > free:
        raise DataError(
            f"cache_dir: expected room for files of about {decimal(source)} in {cache.url}, got {decimal(free)} free; "
            "make room, or choose another folder, fewer rows or fewer columns"
        )


@contextmanager
def room_told(cache: Storage) -> Iterator[None]:
    """Turn what fails for lack of room inside into an error that says so.

    Raises:
        DataError: a disk was full.
    """
    free = _free_bytes(cache) if cache.is_local else None
    try:
        yield
    except Exception as error:
        if not _FULL.search(str(error)):
            raise
        had = "" if free is None else f", of which {decimal(free)} ({free:,} bytes) were free before"
        raise DataError(
            f"cache_dir: a disk was full while data was written to {cache.url}{had}; make room there and in Spark's "
            "own folders (spark.local.dir), or choose another cache_dir, fewer rows, fewer columns or "
            "compression='zstd'. What was written is deleted; Spark's executors may hold its room until they end"
        ) from error


def _free_bytes(cache: Storage) -> int:
    folder: Path = cache.local
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _source_bytes(rows: DataFrame) -> int | None:
    """Bytes of the Parquet and ORC files that a frame reads, when it takes all their rows and columns as they are.

    Spark's own estimate is of use only there: filters do not lower it, and it takes all texts for equally long.
    """
    frame = getattr(rows, "_jdf", None)
    return None if frame is None else _kept_bytes(frame.queryExecution().optimizedPlan())


def _kept_bytes(plan: Any) -> int | None:
    name, children = _class(plan), plan.children()
    if name == "LogicalRelation":
        relation, size = plan.relation(), int(str(plan.stats().sizeInBytes()))
        files = _class(relation) == "HadoopFsRelation" and _class(relation.fileFormat()) in _PACKED
        return size if files and size < _NONSENSE else None
    if name == "Union":
        parts = [_kept_bytes(children.apply(i)) for i in range(children.size())]
        return sum(part or 0 for part in parts)
    if name in _SAME_ROWS or (name == "Project" and _takes_all(plan)):
        return _kept_bytes(children.apply(0))
    return None


def _takes_all(project: Any) -> bool:
    """Whether a projection has all columns of its input, as they are."""
    taken = set()
    for i in range(project.projectList().size()):
        value = project.projectList().apply(i)
        value = value.child() if _class(value) == "Alias" else value
        if _class(value) == "AttributeReference":
            taken.add(value.exprId().id())
    wanted = project.children().apply(0).output()
    return all(wanted.apply(i).exprId().id() in taken for i in range(wanted.size()))


def _class(java: Any) -> str:
    return str(java.getClass().getSimpleName()).rstrip("$")
