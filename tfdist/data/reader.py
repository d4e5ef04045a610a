"""Rows to blocks of batches, as numpy arrays, in the order of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfdist.data.manifest import Manifest
from tfdist.data.rowcache import RowCache
from tfdist.data.rowgroups import Group, RowGroups
from tfdist.data.shards import ALONE, Epoch, Mixing, Pool, Round, Share, lane_count, plan_batches
from tfdist.data.values import Values, gathered, joined, part

POOL_BYTES = 16 * 2**20
"""Memory of the rows that are mixed with each other, over all lanes and workers."""

BLOCK_BYTES = 4 * 2**20
"""Memory of a block: large enough that the cost of a block does not count, small enough for the processor's cache."""

_RUN_BYTES = 4096  # a page of the cache's file
_RUN_ROWS = 16


@dataclass(frozen=True)
class Block:
    """Consecutive batches of equal size.

    Args:
        steps: how many.
        rows: of each batch.
        tensors: for each tensor ``steps * rows`` rows.
    """

    steps: int
    rows: int
    tensors: list[Values]

    def cut(self, start: int, stop: int) -> Block:
        """The steps from ``start`` to ``stop``."""
        return Block(stop - start, self.rows, [part(t, start * self.rows, stop * self.rows) for t in self.tensors])


@dataclass(frozen=True)
class Reading:
    """What a worker reads: a data set, cut into global batches, in an order.

    Args:
        manifest: the data set.
        global_batch: rows of a global batch.
        share: which worker.
        seed: of the order.
        mixing: how rows are shuffled.
        cached: keep rows on the local disk for later epochs; mixing ``rows`` needs it.
        drop_remainder: leave out the rows that do not fill a batch.
        lanes: parts of the data set that each batch draws from; None decides.
        pool_bytes: memory of the rows that are mixed with each other, over all workers.
    """

    manifest: Manifest
    global_batch: int
    share: Share = ALONE
    seed: int = 0
    mixing: Mixing = "rows"
    cached: bool = True
    drop_remainder: bool = False
    lanes: int | None = None
    pool_bytes: int = POOL_BYTES

    def epoch(self, number: int) -> Epoch:
        """The order of an epoch.

        Raises:
            ConfigError: there are fewer rows, or smaller batches, than workers.
        """
        manifest, world, mixed = self.manifest, self.share.world, self.mixing != "none"
        if not mixed:
            world = min(world, max(manifest.rows, 1))  # to evaluate, a worker may be without a row
        groups = tuple(rows for f in manifest.fragments for rows in f.row_groups)
        if mixed:
            together = self.pool_bytes // manifest.row_bytes
        else:
            # Rows of one row group need no copy to lie after one another.
            together = min(BLOCK_BYTES // manifest.row_bytes, max(groups, default=0))
        steps = max(1, together // self.global_batch)
        lanes = lane_count(world, self.global_batch) if mixed else 1
        return Epoch(
            groups=groups,
            batches=plan_batches(manifest.rows, self.global_batch, world, self.drop_remainder),
            lanes=self.lanes or lanes,
            steps_per_round=steps,
            share=self.share,
            seed=self.seed,
            epoch=number,
            mixing=self.mixing,
            # Short, so that the rows of a batch come from many places; a page of rows, where it is not in memory.
            run_rows=max(1, min(_RUN_ROWS, _RUN_BYTES // manifest.row_bytes, steps // 2)),
            steps_per_block=max(1, BLOCK_BYTES // manifest.row_bytes * world // self.global_batch),
        )

    def cache(self, epoch: Epoch) -> RowCache:
        """An empty cache for what this worker reads in all epochs.

        Raises:
            DataError: the disk has too little space.
        """
        return RowCache(self.manifest, epoch.touched_rows if self.mixing == "rows" else self.manifest.rows)


class Source(Protocol):
    """Where the rows of rounds come from."""

    def blocks(self, epoch: Epoch, planned: Round, ahead: tuple[Epoch, Round] | None) -> Callable[[int], Block]:
        """A function that makes the blocks of a round, by their place, while the round ``ahead`` begins to be read."""

    def close(self) -> None:
        """Forget what was read."""


class Blocks:
    """The blocks of one iteration.

    They are asked for in their order, while a thread reads a round ahead; any other order is right too, and reads anew.

    Args:
        reading: what to read.
        first_epoch: number of the epoch with which the iteration begins.
        start_step: step of that epoch with which it begins.
        endless: epoch after epoch, instead of one.
        cache: keeps what is read, for several iterations; None keeps nothing.
    """

    def __init__(
        self,
        reading: Reading,
        first_epoch: int,
        start_step: int = 0,
        endless: bool = False,
        cache: RowCache | None = None,
    ) -> None:
        self._reading = reading
        self._endless = endless
        self._first_epoch = first_epoch
        self._epochs = {first_epoch: reading.epoch(first_epoch)}
        self._each = self._epochs[first_epoch].blocks
        self._first_block, self._first_place = self._epochs[first_epoch].block_at(start_step)
        self._source: Source = Streamed(reading.manifest) if cache is None else Cached(cache)
        self._plans: dict[tuple[int, int], Round] = {}
        self._held: tuple[int, int] | None = None
        self._make: Callable[[int], Block] | None = None

    def __len__(self) -> int:
        """Blocks of the iteration; of its first epoch when it is endless."""
        return self._each - self._first_block

    def __getitem__(self, index: int) -> Block:
        """Block number ``index`` of the iteration."""
        later, block = divmod(self._first_block + index, self._each)
        number, place = self._epoch(self._first_epoch + later).round_of(block)
        wanted = self._first_epoch + later, number
        if self._make is None or self._held != wanted:
            self._make = None
            self._make = self._read(*wanted)
            self._held = wanted
        taken = self._make(place)
        return taken.cut(self._first_place, taken.steps) if index == 0 and self._first_place else taken

    def close(self) -> None:
        """Stop reading ahead; what is asked for afterwards is read anew."""
        self._source.close()
        self._make = None

    def _read(self, number: int, round_number: int) -> Callable[[int], Block]:
        planned = self._planned(number, round_number)
        following = (number, round_number + 1)
        if following[1] == self._epoch(number).rounds:
            following = (number + 1, 0)
        ahead = None
        if following[0] == number or self._endless:
            ahead = self._epoch(following[0]), self._planned(*following)
        return self._source.blocks(self._epoch(number), planned, ahead)

    def _planned(self, number: int, round_number: int) -> Round:
        key = number, round_number
        if key not in self._plans:
            self._plans = {**dict(list(self._plans.items())[-1:]), key: self._epoch(number).round(round_number)}
        return self._plans[key]

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            self._epochs = {n: epoch for n, epoch in self._epochs.items() if n >= number - 1}
            self._epochs[number] = self._reading.epoch(number)
        return self._epochs[number]


class Cached:
    """Rows out of a cache.

    Args:
        cache: reads what it has not.
    """

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-plan")
        self._ahead: tuple[tuple[int, int], Future[list[np.ndarray]]] | None = None

    def blocks(self, epoch: Epoch, planned: Round, ahead: tuple[Epoch, Round] | None) -> Callable[[int], Block]:
        key, before = (epoch.epoch, planned.start), self._ahead
        self._cache.want(epoch.groups_of(planned))
        if ahead is not None:
            self._cache.want(ahead[0].groups_of(ahead[1]))
            self._ahead = (ahead[0].epoch, ahead[1].start), self._thread.submit(_rows_of, *ahead)
        rows = before[1].result() if before is not None and before[0] == key else _rows_of(epoch, planned)
        self._cache.wait(epoch.groups_of(planned))
        return lambda place: Block(*planned.blocks[place], self._cache.take(rows[place]))

    def close(self) -> None:
        pass


class Streamed:
    """Rows of row groups in memory, read by one thread in the order in which they were asked for.

    Args:
        manifest: the data set.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = RowGroups(manifest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-read")
        self._held: dict[tuple[int, int], Future[Group]] = {}
        self._wanted: set[tuple[int, int]] = set()

    def blocks(self, epoch: Epoch, planned: Round, ahead: tuple[Epoch, Round] | None) -> Callable[[int], Block]:
        if (epoch.epoch, planned.start) not in self._wanted:  # the first one, or another than the next
            self.close()
            self._want(epoch, planned)
        if ahead is not None:
            self._want(*ahead)
        groups = {group: self._held[epoch.epoch, group].result() for group in epoch.groups_of(planned)}
        make = _assembled(epoch, planned, groups, len(self._manifest.schema.tensors))
        self._wanted.discard((epoch.epoch, planned.start))
        for group in epoch.done(planned):
            self._held.pop((epoch.epoch, group), None)
        return make

    def _want(self, epoch: Epoch, planned: Round) -> None:
        self._wanted.add((epoch.epoch, planned.start))
        for group in epoch.groups_of(planned):
            if (epoch.epoch, group) not in self._held:
                self._held[epoch.epoch, group] = self._thread.submit(self._reader.read, group)

    def close(self) -> None:
        for future in self._held.values():
            future.cancel()
        self._held.clear()
        self._wanted.clear()


def _assembled(epoch: Epoch, planned: Round, groups: dict[int, Group], tensors: int) -> Callable[[int], Block]:
    """Makes the blocks of a round out of row groups."""
    pieces = [piece for pool in planned.pools for piece in epoch.pieces(pool)]
    rows = [joined([part(groups[p.group][t], p.start, p.stop) for p in pieces]) for t in range(tensors)]
    order, places = _order(planned.pools), _places(planned)

    def make(place: int) -> Block:
        chosen, shape = places[place], planned.blocks[place]
        if order is not None:
            chosen = _picked(order, chosen, shape)
        if isinstance(chosen, int):
            # Views of row groups: the pipeline cuts batches out of them by copying, so nobody writes to them.
            return Block(*shape, [part(values, chosen, chosen + shape[0] * shape[1]) for values in rows])
        return Block(*shape, [gathered(values, chosen) for values in rows])

    return make


def _rows_of(epoch: Epoch, planned: Round) -> list[np.ndarray]:
    """For each block of a round ``[steps * rows] int64``: its rows as numbers in the order of the source."""
    rows = np.concatenate([epoch.sources(pool) for pool in planned.pools])
    return [_picked(rows, place, shape) for place, shape in zip(_places(planned), planned.blocks, strict=True)]


def _order(pools: Sequence[Pool]) -> np.ndarray | None:
    """``[rows] int64``: the permutations of pools that lie end to end, or None where they are not permuted."""
    before = np.cumsum([0, *(pool.rows for pool in pools)])
    orders = [pool.order + start for pool, start in zip(pools, before[:-1], strict=True) if pool.order is not None]
    return np.concatenate(orders) if orders else None


def _places(planned: Round) -> list[np.ndarray | int]:
    """Where a round's blocks lie in its permuted pools, laid end to end.

    Returns:
        For each block ``[steps * rows] int64``, or the place of the first row where all of them follow it.
    """
    found: list[np.ndarray | int] = [np.empty(shape, np.int64) for shape in planned.blocks]
    before = 0
    for pool in planned.pools:
        for take in pool.takes:
            block, start = found[take.block], before + take.offset
            if take.width == take.last - take.first == planned.blocks[take.block][1]:
                found[take.block] = start
                continue
            assert isinstance(block, np.ndarray)
            columns = np.arange(start, start + take.count * take.width).reshape(take.count, take.width)
            block[:, take.column : take.column + take.last - take.first] = columns[:, take.first : take.last]
        before += pool.rows
    return [block if isinstance(block, int) else block.reshape(-1) for block in found]


def _picked(array: np.ndarray, place: np.ndarray | int, shape: tuple[int, int]) -> np.ndarray:
    """The rows of a block of a shape, at places as :func:`_places` gives them."""
    return array[place : place + shape[0] * shape[1]] if isinstance(place, int) else array[place]
