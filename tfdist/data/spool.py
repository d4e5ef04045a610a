"""Rows that arrive in a training process: taken in their order, and kept on the local disk for later epochs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tfdist import environ
from tfdist.data.arrow import values_of
from tfdist.data.dealt import Dealt, Order
from tfdist.data.rowcache import RowStore
from tfdist.data.tables import tensors_of
from tfdist.data.values import Values, gathered, joined, part, rows_of
from tfdist.errors import ConfigError, DataError

TRANSFORMED_TOGETHER = 2
"""Batches that go through a transform at the same time."""

# How far an iteration may have run ahead of one batch that Keras looked at before it begins again: tf.distribute draws
# up to four batches, a transform some more, and the pipeline makes pools before they are needed.
_PEEKED_STEPS = 8 + TRANSFORMED_TOGETHER
_PEEKED_POOLS = 3

# Rows that end early may be those of a plan that failed: to pyspark both are the end of a stream. Spark's own error,
# which says why, ends this process in the meantime.
_SPARK_GRACE_S = 5.0


class Arrivals:
    """The rows that the Spark task hands to this process, as tensors.

    Args:
        dealt: the stream.
        rank: whose share arrives here.

    Raises:
        ConfigError: no rows are handed to this process, or they are being read already.
    """

    def __init__(self, dealt: Dealt, rank: int) -> None:
        self._dealt, self._rank = dealt, rank
        fd = os.environ.get(environ.ROWS_FD)
        if fd is None:
            raise ConfigError(
                f"{dealt.name}: expected a training to which Spark hands the rows, and one pipeline in it, got another "
                "process or a second pipeline; give the stream to tfdist.fit, or use from_dataframe"
            )
        environ.adopt({environ.ROWS_FD: None})
        self._batches = self._received(int(fd))
        self._waiting: deque[list[Values]] = deque()
        self._missing = dealt.shares[rank]

    def take(self, rows: int) -> list[Values]:
        """The tensors of the next rows.

        Raises:
            DataError: there are fewer or more rows than counted, or a value does not fit its column.
        """
        parts: list[list[Values]] = []
        left = rows
        while left:
            tensors = self._waiting.popleft() if self._waiting else self.next()
            here = min(left, rows_of(tensors[0]))
            parts.append([part(values, 0, here) for values in tensors])
            if here < rows_of(tensors[0]):
                self._waiting.appendleft([part(values, here, rows_of(values)) for values in tensors])
            left -= here
        return [joined(column) for column in zip(*parts, strict=True)]

    def next(self) -> list[Values]:
        """The tensors of the rows that arrive together.

        Raises:
            DataError: there are fewer or more rows than counted, or a value does not fit its column.
        """
        schema, batch = self._dealt.schema, next(self._batches, None)
        if batch is None:
            time.sleep(_SPARK_GRACE_S)
            raise self._changed(str(self._dealt.shares[self._rank] - self._missing))
        self._missing -= batch.num_rows
        if self._missing < 0 or (not self._missing and next(self._batches, None) is not None):
            raise self._changed("more")
        return tensors_of(schema, {c.name: values_of(batch.column(c.file_name), c) for c in schema.columns})

    def _received(self, fd: int) -> Iterator[pa.RecordBatch]:
        with socket.socket(fileno=fd) as line, line.makefile("rb") as stream:
            if not stream.peek(1):
                return  # no batch, no schema either
            with pa.ipc.open_stream(stream) as batches:
                yield from (batch for batch in batches if batch.num_rows)

    def _changed(self, got: str) -> DataError:
        return DataError(
            f"{self._dealt.name}: rank {self._rank}: expected {self._dealt.shares[self._rank]} rows, as counted before "
            f"the training, got {got}; the frame gives other rows each time it is computed (random values, a source "
            "that changes): cache() it, or use from_dataframe"
        )


class Spool:
    """The pools of all epochs of a worker, by their number.

    With one epoch nothing is written; a pool is kept until no iteration can ask for it again. With several, rows are
    written to the local disk as they arrive.

    Args:
        dealt: the stream.
        order: of the worker's rows.
    """

    def __init__(self, dealt: Dealt, order: Order) -> None:
        self.dealt, self.order = dealt, order
        self._arrivals = Arrivals(dealt, order.rank)
        self._arrived = 0
        self._store = RowStore(dealt.schema, order.rows, order.rows, dealt.row_bytes) if dealt.epochs > 1 else None
        self._held: dict[int, list[Values]] = {}
        self._iterations = self._made = 0
        self._lock = threading.Lock()

    @property
    def pools(self) -> int:
        """Pools of all epochs."""
        return self.order.pools * self.dealt.epochs

    def begin(self) -> np.int64:
        """Number of a new iteration."""
        with self._lock:
            self._iterations += 1
            return np.int64(self._iterations - 1)

    def pool(self, iteration: Any, number: Any) -> tuple[np.ndarray, list[Values]]:
        """A pool as an iteration asks for it.

        Returns:
            ``[steps + 1] int64``, the first row of each step and the end, and the tensors of the rows.

        Raises:
            DataError: the rows are not those that were counted, or were let go of.
        """
        epoch, pool = divmod(int(number), self.order.pools)
        bounds = self.order.bounds(pool)
        with self._lock:
            if self._store is None:
                tensors = self._passing(int(iteration), pool)
            else:
                while not epoch and self._arrived < bounds[-1]:
                    self._keep(self._store)
                tensors = self._store.take(self.order.sources(epoch, pool))
        return bounds - bounds[0], tensors

    def _keep(self, store: RowStore) -> None:
        tensors = self._arrivals.next()
        store.write(self._arrived, tensors)
        self._arrived += rows_of(tensors[0])

    def _passing(self, iteration: int, pool: int) -> list[Values]:
        while self._made <= pool:
            places = self.order.sources(0, self._made)
            rows = self._arrivals.take(len(places))
            if self.order.shuffle:
                rows = [gathered(values, places - places.min()) for values in rows]
            self._held[self._made] = rows
            self._made += 1
        if pool not in self._held:
            raise DataError(
                f"{self.dealt.name}: expected to read each row once, got a new iteration over rows that are gone; use "
                "from_dataframe, which writes them, where the rows of an epoch are read more than once"
            )
        tensors = self._held[pool]
        if iteration or (pool - _PEEKED_POOLS) * self.order.steps_per_pool >= _PEEKED_STEPS:
            self._held = {number: held for number, held in self._held.items() if number > pool}
        return tensors
