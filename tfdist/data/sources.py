"""Where the rows of an epoch come from: row groups in memory, or a cache on the local disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from tfdist.data.layout import Layout
from tfdist.data.manifest import Manifest
from tfdist.data.rounds import Pool, Round
from tfdist.data.rowcache import RowCache
from tfdist.data.rowgroups import Group, RowGroups
from tfdist.data.shards import Epoch
from tfdist.data.texts import is_text
from tfdist.data.values import Ragged, Values, aligned, gathered, joined, part, rows_of

T = TypeVar("T")


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

    def blocks(self, epoch: Epoch, number: int, ahead: tuple[Epoch, int] | None) -> Callable[[int], Block]:
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
        self._rounds = _Rounds[tuple[Round, list[int], list[np.ndarray]]]("tfdist-plan")

    def blocks(self, epoch: Epoch, number: int, ahead: tuple[Epoch, int] | None) -> Callable[[int], Block]:
        planned, groups, rows = self._rounds.get(self._wanted, epoch, number, ahead)
        self._cache.wait(groups)
        return lambda place: Block(*planned.blocks[place], self._cache.take(rows[place]))

    def close(self) -> None:
        self._rounds.forget()

    def _wanted(self, epoch: Epoch, number: int) -> tuple[Round, list[int], list[np.ndarray]]:
        planned = epoch.round(number)
        groups = epoch.groups_of(planned)
        self._cache.want(groups)
        return planned, groups, _rows_of(epoch, planned)


class Streamed:
    """Rows of row groups in memory, read by one thread in the order in which they are needed.

    Args:
        manifest: the data set.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = RowGroups(manifest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-read")
        self._held: dict[tuple[int, int], Future[Group]] = {}
        self._next: tuple[tuple[int, int], Round, list[int]] | None = None
        self._tensors = len(manifest.schema.tensors)
        self._rounds = _Rounds[Callable[[int], Block]]("tfdist-rounds")

    def blocks(self, epoch: Epoch, number: int, ahead: tuple[Epoch, int] | None) -> Callable[[int], Block]:
        return self._rounds.get(self._assembled, epoch, number, ahead)

    def close(self) -> None:
        self._rounds.forget(self._forget)

    def _assembled(self, epoch: Epoch, number: int) -> Callable[[int], Block]:
        before, self._next = self._next, None
        if before is not None and before[0] == (epoch.epoch, number):
            _, planned, wanted = before
        else:  # another than the one after
            self._forget()
            planned, wanted = self._want(epoch, number)
        groups = {group: self._held[epoch.epoch, group].result() for group in wanted}
        for group in epoch.done(planned):
            self._held.pop((epoch.epoch, group), None)
        if number + 1 < epoch.rounds:
            self._next = (epoch.epoch, number + 1), *self._want(epoch, number + 1)
        return _assembled(epoch, planned, groups, self._tensors)

    def _want(self, epoch: Epoch, number: int) -> tuple[Round, list[int]]:
        """Have the row groups of a round read; the round, and those row groups."""
        planned = epoch.round(number)
        wanted = epoch.groups_of(planned)
        for group in wanted:
            if (epoch.epoch, group) not in self._held:
                self._held[epoch.epoch, group] = self._thread.submit(self._reader.read, group)
        return planned, wanted

    def _forget(self) -> None:
        for future in self._held.values():
            future.cancel()
        self._held.clear()


class _Rounds(Generic[T]):
    """What is made of rounds, one after another by one thread, a round ahead of its use.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._ahead: tuple[tuple[int, int], Future[T]] | None = None

    def get(self, make: Callable[[Epoch, int], T], epoch: Epoch, number: int, ahead: tuple[Epoch, int] | None) -> T:
        """What ``make`` makes of a round, while it begins with the round ``ahead``."""
        before, self._ahead = self._ahead, None
        asked = before[1] if before and before[0] == (epoch.epoch, number) else self._thread.submit(make, epoch, number)
        if ahead is not None:
            self._ahead = (ahead[0].epoch, ahead[1]), self._thread.submit(make, *ahead)
        return asked.result()

    def forget(self, forget: Callable[[], None] | None = None) -> None:
        """Drop what was made ahead, and then call ``forget`` in the thread."""
        self._ahead = None
        if forget is not None:
            self._thread.submit(forget)


def _assembled(epoch: Epoch, planned: Round, groups: dict[int, Group], tensors: int) -> Callable[[int], Block]:
    """Makes the blocks of a round out of row groups."""
    pieces = [piece for pool in planned.pools for piece in epoch.pieces(pool)]
    parts = [[part(groups[p.group][t], p.start, p.stop) for p in pieces] for t in range(tensors)]
    order, places = _order(planned.pools), _places(planned)
    if order is not None:
        mixed = _Together(parts)
        chosen = [_picked(order, place, shape) for place, shape in zip(places, planned.blocks, strict=True)]
        return lambda place: Block(*planned.blocks[place], mixed.take(chosen[place]))
    rows = [joined(of_tensor) for of_tensor in parts]

    def make(place: int) -> Block:
        at, shape = places[place], planned.blocks[place]
        if isinstance(at, int):
            # Views of row groups: the pipeline cuts batches out of them by copying, so nobody writes to them.
            return Block(*shape, [part(values, at, at + shape[0] * shape[1]) for values in rows])
        return Block(*shape, [gathered(values, at) for values in rows])

    return make


class _Together:
    """The rows of a round, to be gathered: the numbers of a row lie together.

    Args:
        parts: of each tensor, the parts that the rows consist of.
    """

    def __init__(self, parts: Sequence[Sequence[Values]]) -> None:
        self._others = [joined(p) if isinstance(p[0], Ragged) or is_text(p[0]) else None for p in parts]
        numbers = [[p for p in of_tensor if isinstance(p, np.ndarray) and not is_text(p)] for of_tensor in parts]
        numbers = [of_tensor for of_tensor in numbers if of_tensor]
        self._layout = Layout([np.dtype((of_tensor[0].dtype, of_tensor[0].shape[1:])) for of_tensor in numbers])
        self._rows = aligned((sum(map(rows_of, parts[0])),), self._layout.dtype)
        start = 0
        for columns in zip(*numbers, strict=True):
            stop = start + len(columns[0])
            self._layout.pack(columns, self._rows[start:stop])
            start = stop

    def take(self, places: np.ndarray) -> list[Values]:
        """The tensors of the rows at ``places``, ``[n] int64``."""
        numbers = iter(self._layout.take(self._rows, places))
        return [next(numbers) if values is None else gathered(values, places) for values in self._others]


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
