"""The rows of a stream as the workers get them: plain values, and which rows make each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.data.handle import Shuffle
from tfdist.data.permutation import generator, keys_of, permuted, run_rows
from tfdist.data.schema import Schema
from tfdist.errors import ConfigError

POOL_BYTES = 16 * 2**20
"""Memory of the rows of a worker that are mixed with each other."""


@dataclass(frozen=True)
class Dealt:
    """What each worker of a training needs to know of a stream. Holds no rows; picklable.

    Args:
        name: what errors call it.
        schema: columns and tensors.
        shares: rows of each worker, by rank.
        row_bytes: bytes of a row in memory, on average.
        epochs: how often the rows are read.
        transform: applied to the features of each batch.
    """

    name: str
    schema: Schema
    shares: tuple[int, ...]
    row_bytes: int
    epochs: int = 1
    transform: Callable[[Any], Any] | None = None

    @property
    def rows(self) -> int:
        """Rows of an epoch over all workers."""
        return sum(self.shares)

    def steps(self, global_batch: int, drop_remainder: bool = False) -> int:
        """Steps of an epoch, the same on every worker.

        Args:
            global_batch: rows of a step over all workers, on average at most.
            drop_remainder: must be False.

        Raises:
            ConfigError: ``drop_remainder`` was asked for.
        """
        if drop_remainder:
            raise ConfigError(
                "drop_remainder: expected False for a stream, whose rows are spread evenly over the steps of an epoch, "
                "got True; leave it out, or use from_dataframe"
            )
        return steps_of(self.rows, global_batch)

    def to_tf(
        self,
        *,
        global_batch: int,
        shuffle: Shuffle = True,
        seed: int = 0,
        epoch: int = 0,
        start_step: int = 0,
        repeat: bool = True,
        drop_remainder: bool = False,
    ) -> Any:
        """This worker's share of all epochs as batches, one epoch after the other; can be called once.

        Step ``k`` of ``S`` takes the rows ``floor(k n / S)`` to ``floor((k + 1) n / S)`` of a worker that has ``n``.

        Args:
            global_batch: rows of a step over all workers, on average at most.
            shuffle: mix rows inside of pools while they arrive, and from everywhere in later epochs; ``"pool"`` mixes
                inside of pools in all epochs, False keeps the order of arrival.
            seed: of the order.
            epoch: must be 0: what arrives is read from its beginning.
            start_step: must be 0.
            repeat: must be True: what arrives cannot be read from its start again.
            drop_remainder: must be False.

        Returns:
            A ``tf.data.Dataset``; in the scope of a strategy over several workers the distributed dataset that
            ``model.fit`` takes.

        Raises:
            ConfigError: a setting is out of range, or this is no training to which rows are handed.
            DataError: the local disk has too little space for the rows of later epochs.
        """
        if epoch or start_step:
            raise ConfigError(
                f"epoch and start_step: expected 0 for a stream, got {epoch} and {start_step}; use from_dataframe"
            )
        if not repeat:
            raise ConfigError("repeat: expected True for a stream, got False; give model.fit steps_per_epoch")
        from tfdist.data.pools import dataset

        return dataset(self, self.steps(global_batch, drop_remainder), shuffle, seed)


def steps_of(rows: int, global_batch: int) -> int:
    """Steps of an epoch: ``ceil(rows / global_batch)``."""
    return -(-rows // global_batch)


@dataclass(frozen=True)
class Order:
    """Which rows make each pool and each step of a worker's epochs.

    Args:
        rows: of the worker.
        steps: of an epoch.
        row_bytes: bytes of a row in memory, on average.
        rank: of the worker.
        seed: of the order.
        shuffle: True mixes all rows, ``"pool"`` those of a pool, False keeps the order of arrival.
    """

    rows: int
    steps: int
    row_bytes: int
    rank: int
    seed: int
    shuffle: Shuffle

    @property
    def steps_per_pool(self) -> int:
        return max(1, POOL_BYTES // self.row_bytes * self.steps // self.rows)

    @property
    def pools(self) -> int:
        """Pools of an epoch."""
        return -(-self.steps // self.steps_per_pool)

    def bounds(self, pool: int) -> np.ndarray:
        """``[steps + 1] int64``: the first row of each step of a pool, and the end, counted in the epoch."""
        start = pool * self.steps_per_pool
        steps = np.arange(start, min(start + self.steps_per_pool, self.steps) + 1)
        return steps * self.rows // self.steps

    def sources(self, epoch: int, pool: int) -> np.ndarray:
        """``[rows] int64``: the rows of a pool in their order, numbered as they arrived."""
        start, *_, stop = self.bounds(pool).tolist()
        places = np.arange(start, stop)
        if not self.shuffle:
            return places
        if epoch and self.shuffle is True:  # by then all rows are here: from everywhere, in runs that lie together
            size = run_rows(self.row_bytes, self.steps_per_pool)
            runs = np.arange(start // size, -(-stop // size))
            runs = permuted(runs, self.rows // size, keys_of(self.seed, epoch, self.rank))
            places = runs[places // size - start // size] * size + places % size
        return generator(self.seed, epoch, self.rank, pool).permutation(places)
