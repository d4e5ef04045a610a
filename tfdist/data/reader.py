"""Row groups to blocks of batches, as numpy arrays: a thread reads ahead, one gather per column and lane."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.data.columns import Text, Values, values_of
from tfdist.data.manifest import Manifest
from tfdist.data.schema import Column
from tfdist.data.shards import Epoch, Pool, Round, Share, lane_count, plan_batches
from tfdist.errors import DataError

MIXED_BYTES = 16 * 2**20
"""Memory of the rows that are mixed with each other, over all lanes and workers."""

IN_ORDER_BYTES = 4 * 2**20
"""Memory of the rows that are read together in the order of the source."""

_OPEN_FILES = 16
_ALIGNMENT = 64  # TensorFlow takes over arrays at such addresses and copies others

Block = list[np.ndarray]
"""For each tensor ``[steps, rows, *shape]``; for text its codes, followed by the distinct values ``[distinct]``."""


@dataclass(frozen=True)
class Reading:
    """What a worker reads: a data set, cut into global batches, in an order.

    Args:
        manifest: the data set.
        global_batch: rows of a global batch.
        share: which worker.
        seed: of the order.
        shuffle: False keeps the order of the source.
        drop_remainder: leave out the rows that do not fill a batch.
        lanes: parts of the data set that each batch draws from; None decides.
    """

    manifest: Manifest
    global_batch: int
    share: Share = Share()
    seed: int = 0
    shuffle: bool = True
    drop_remainder: bool = False
    lanes: int | None = None

    def epoch(self, number: int) -> Epoch:
        """The order of an epoch.

        Raises:
            ConfigError: there are fewer rows, or smaller batches, than workers.
        """
        manifest, world = self.manifest, self.share.world
        together = MIXED_BYTES if self.shuffle else IN_ORDER_BYTES
        lanes = lane_count(world, self.global_batch) if self.shuffle else 1
        return Epoch(
            groups=tuple(rows for f in manifest.fragments for rows in f.row_groups),
            batches=plan_batches(manifest.rows, self.global_batch, world, self.drop_remainder),
            lanes=self.lanes or lanes,
            steps_per_round=max(1, together // (manifest.row_bytes * self.global_batch)),
            share=self.share,
            seed=self.seed,
            epoch=number,
            shuffle=self.shuffle,
        )

    def blocks(self, first_epoch: int, last_epoch: int | None = None) -> Iterator[Block]:
        """The blocks of the epochs from ``first_epoch`` to ``last_epoch``, or without end."""
        with ThreadPoolExecutor(1, thread_name_prefix="tfdist-read") as thread:
            groups = _RowGroups(self.manifest, thread)
            try:
                ahead = self._rounds(first_epoch, last_epoch)
                current = next(ahead, None)
                if current is not None:
                    groups.want(current[1])
                while current is not None:
                    number, now = current
                    following = next(ahead, None)
                    if following is not None:
                        groups.want(following[1], again=following[0] != number)
                    yield from _assemble(now, groups, self.manifest.schema.columns)
                    groups.drop(now.done)
                    current = following
            finally:
                thread.shutdown(wait=False, cancel_futures=True)

    def _rounds(self, first: int, last: int | None) -> Iterator[tuple[int, Round]]:
        number = first
        while last is None or number <= last:
            for planned in self.epoch(number).rounds_from():
                yield number, planned
            number += 1
