"""What tests need: small data sets made without Spark, and the place of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.cluster import WorkerContext, enter_training
from tfdist.data.handle import Handle
from tfdist.data.parquet import from_parquet


def tiny_table(rows: int, columns: int = 3, seed: int = 0) -> pa.Table:
    """Rows from which a small model can learn.

    Args:
        rows: how many.
        columns: how many numeric features.
        seed: of the random values.

    Returns:
        ``row`` (``int64``, the number of the row), ``x0`` ... (``float32``), ``kind`` (one of three texts) and
        ``label`` (``float32``, 0 or 1, which follows from the features).
    """
    rng = np.random.default_rng(seed)
    values = rng.random((columns, rows), np.float32)
    kind = rng.integers(0, 3, rows)
    label = (values.sum(axis=0) + (kind == 0) > columns / 2 + 1 / 3).astype(np.float32)
    return pa.table(
        {
            "row": np.arange(rows, dtype=np.int64),
            **{f"x{i}": values[i] for i in range(columns)},
            "kind": pa.array(np.array(["red", "green", "blue"])[kind]),
            "label": label,
        }
    )


def tiny_parquet(
    folder: str | Path, rows: int = 100, *, columns: int = 3, row_group: int = 32, seed: int = 0, **choice: Any
) -> Handle:
    """A handle on one new Parquet file with the rows of :func:`tiny_table`.

    Args:
        folder: where the file goes.
        rows: how many.
        columns: how many numeric features.
        row_group: rows in a row group.
        seed: of the random values.
        choice: arguments of :func:`tfdist.data.from_parquet`; without any, ``label`` is the label and ``row`` is left
            out.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = tiny_table(rows, columns, seed)
    pq.write_table(table, folder / "part.parquet", row_group_size=row_group)
    if not choice:
        choice = {"label": "label", "features": [f"x{i}" for i in range(columns)] + ["kind"]}
    return from_parquet(folder, **choice)


@contextmanager
def as_worker(rank: int, world: int) -> Iterator[None]:
    """In the block this process is worker ``rank`` of ``world``, so that ``Handle.to_tf`` gives that worker's share."""
    before = enter_training(WorkerContext(rank=rank, world_size=world))
    try:
        yield
    finally:
        enter_training(before)
