"""Where the rows of an epoch come from: row groups in memory, or a cache on the local disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfdist.data.manifest import Manifest
from tfdist.data.rowcache import RowCache
from tfdist.data.rowgroups import Group, RowGroups
from tfdist.data.shards import Epoch, Pool, Round
from tfdist.data.values import Values, gathered, joined, part


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


class Source(Protocol):
    """Where the rows of rounds come from."""

    def blocks(self, epoch: Epoch, planned: Round, ahead: tuple[Epoch, Round] | None) -> Callable[[int], Block]:
        """A function that makes the blocks of a round, by their place, while the round ``ahead`` begins to be read."""

    def close(self) -> None:
        """Forget what was read."""


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
