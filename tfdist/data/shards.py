"""Which rows make each global batch, and which of them are a worker's: integer arithmetic, no files.

docs/architecture.md, "The order of rows", states the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from tfdist.data.batches import Batches, Share
from tfdist.data.permutation import generator, keys_of, permuted
from tfdist.data.rounds import Piece, Pool, Round, Take

Mixing = Literal["none", "rows", "pool"]
"""How rows are shuffled: not at all; all rows of a lane, a few consecutive ones of which stay together on their way
into a pool; or only those of a pool of consecutive rows, whose row groups are permuted."""


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch for one worker.

    Args:
        groups: rows of each row group, in the order of the source.
        batches: the global batches.
        lanes: number of lanes.
        steps_per_round: global batches whose rows are mixed with each other inside a lane.
        share: which worker.
        seed: of the order.
        epoch: number of the epoch.
        mixing: how rows are shuffled, see :data:`Mixing`.
        run_rows: rows that stay together on their way into a pool, with ``rows``.
        steps_per_block: most steps of a block.
    """

    groups: tuple[int, ...]
    batches: Batches
    lanes: int
    steps_per_round: int
    share: Share
    seed: int = 0
    epoch: int = 0
    mixing: Mixing = "rows"
    run_rows: int = 1
    steps_per_block: int = 2**30

    @property
    def rounds(self) -> int:
        return -(-self.batches.steps // self.steps_per_round)

    @property
    def blocks(self) -> int:
        """Blocks of all rounds."""
        return self._whole_rounds * self._blocks_per_round + sum(map(len, self._last_sections))

    def block_at(self, step: int) -> tuple[int, int]:
        """The block that holds a step, and the step's place in it."""
        number = min(step // self.steps_per_round, self._whole_rounds)
        block = number * self._blocks_per_round
        for start, count, _ in (part for r in range(number, self.rounds) for part in self._sections(r)):
            if start + count > step:
                return block, step - start
            block += 1
        raise IndexError(f"step {step} of {self.batches.steps}")

    def round_of(self, block: int) -> tuple[int, int]:
        """The round that holds a block, and the block's place in it."""
        number, place = divmod(block, self._blocks_per_round)
        if number < self._whole_rounds:
            return number, place
        place = block - self._whole_rounds * self._blocks_per_round
        for number, sections in enumerate(self._last_sections, self._whole_rounds):
            if place < len(sections):
                return number, place
            place -= len(sections)
        raise IndexError(f"block {block} of {self.blocks}")

    def round(self, number: int) -> Round:
        """One round, computed without those before it."""
        start = number * self.steps_per_round
        stop = min(start + self.steps_per_round, self.batches.steps)
        sections = self._sections(number)
        lanes, takes = range(*self._touched), {}
        for lane in lanes:
            if of_lane := self._takes(lane, start, sections):
                takes[lane] = of_lane
        parts = [(lane, self._lane_rows(lane, start), self._lane_rows(lane, stop)) for lane in takes]
        pools = [
            Pool(
                runs, after - before, None if self.mixing == "none" else (self.seed, self.epoch, lane, number), of_lane
            )
            for (lane, before, after), runs, of_lane in zip(parts, self._runs(parts), takes.values(), strict=True)
        ]
        local = [(count, _length(self.share.of(n))) for _, count, n in sections]
        return Round(start, tuple(local), tuple(p for p in pools if p.rows))

    @property
    def touched_rows(self) -> int:
        """Rows of the lanes that hold a row of this worker."""
        first, last = self._touched
        return self._lane_start(last) - self._lane_start(first)

    def pieces(self, pool: Pool) -> list[Piece]:
        """Where the rows of a pool lie in the row groups, in the pool's order before it is permuted."""
        found = []
        for start, stop in pool.runs.tolist():
            place = int(np.searchsorted(self._bounds, start, side="right")) - 1
            while start < stop:
                low, high = int(self._bounds[place]), min(int(self._bounds[place + 1]), stop)
                if start < high:
                    found.append(Piece(int(self._sequence[place]), start - low, high - low))
                    start = high
                place += 1
        return found

    def sources(self, pool: Pool) -> np.ndarray:
        """``[rows] int64``: the rows of a pool as numbers in the order of the source, permuted."""
        starts, stops = pool.runs.T
        lengths = stops - starts
        stream = np.arange(pool.rows) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        first, last = self._group_places(pool)
        shifts = np.repeat(self._shifts[first], lengths)
        if len(astride := np.flatnonzero(first != last)):  # few runs lie in two row groups
            rows = np.flatnonzero(np.repeat(np.isin(np.arange(len(starts)), astride), lengths))
            shifts[rows] = self._shifts[np.searchsorted(self._bounds, stream[rows], side="right") - 1]
        stream += shifts
        return stream if pool.order is None else np.asarray(stream[pool.order])

    def _group_places(self, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
        """``[runs] int64`` twice: where in the stream of row groups each run begins and ends."""
        first, last = pool.runs[:, 0], pool.runs[:, 1] - 1
        return np.searchsorted(self._bounds, first, "right") - 1, np.searchsorted(self._bounds, last, "right") - 1

    def groups_of(self, planned: Round) -> list[int]:
        """The row groups that hold rows of a round, in the order of the stream."""
        needed = np.zeros(len(self.groups) + 1, np.int64)
        for pool in planned.pools:
            first, last = (
                np.searchsorted(self._bounds, at, side="right") - 1 for at in (pool.runs.T[0], pool.runs.T[1] - 1)
            )
            np.add.at(needed, first, 1)
            np.add.at(needed, last + 1, -1)
        places = np.flatnonzero(np.cumsum(needed[:-1]))
        return [int(self._sequence[place]) for place in places if self.groups[self._sequence[place]]]

    def done(self, planned: Round) -> tuple[int, ...]:
        """Row groups that no later round of this worker needs; unknown, so none, where rows of a lane are mixed."""
        if self.mixing == "rows":
            return ()
        start = planned.start
        return self._done(start, min(start + self.steps_per_round, self.batches.steps))

    @property
    def _whole_rounds(self) -> int:
        """Rounds of full batches only, which have equally many blocks."""
        return self.batches.full // self.steps_per_round

    @property
    def _blocks_per_round(self) -> int:
        return -(-self.steps_per_round // self.steps_per_block)

    @property
    def _last_sections(self) -> list[list[tuple[int, int, int]]]:
        return [self._sections(number) for number in range(self._whole_rounds, self.rounds)]

    def _sections(self, number: int) -> list[tuple[int, int, int]]:
        """The blocks of a round: first step, steps, rows of each global batch."""
        start = number * self.steps_per_round
        stop = min(start + self.steps_per_round, self.batches.steps)
        whole = max(0, min(stop, self.batches.full) - start)
        size = self.steps_per_block
        sections = [
            (k, min(size, start + whole - k), self.batches.global_batch) for k in range(start, start + whole, size)
        ]
        return sections + [(k, 1, self.batches.size(k)) for k in range(start + whole, stop)]

    def _takes(self, lane: int, start: int, sections: Sequence[tuple[int, int, int]]) -> tuple[Take, ...]:
        """Where the rows go that a lane gives to the steps from ``start`` on; none are this worker's."""
        before = self._lane_rows(lane, start)
        takes = []
        for block, (step, count, n) in enumerate(sections):
            low, high = lane * n // self.lanes, (lane + 1) * n // self.lanes
            mine_low, mine_high = self.share.of(n)
            first, last = max(low, mine_low), min(high, mine_high)
            if first < last:
                offset = self._lane_rows(lane, step) - before
                takes.append(Take(block, offset, count, high - low, first - low, last - low, first - mine_low))
        return tuple(takes)

    def _runs(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Of each lane the rows from a first one to a last one, as :class:`Pool` has them."""
        origins = [self._lane_start(lane) for lane, _, _ in parts]
        if self.mixing != "rows":
            return [np.array([[at + start, at + stop]]) for at, (_, start, stop) in zip(origins, parts, strict=True)]
        size = self.run_rows
        places = [np.arange(start // size, -(-stop // size)) for _, start, stop in parts]
        counts = [(self._lane_start(lane + 1) - at) // size for at, (lane, _, _) in zip(origins, parts, strict=True)]
        found = []
        for at, (lane, start, stop), of, runs in zip(
            origins, parts, places, self._scattered(parts, places, counts), strict=True
        ):
            ends = np.minimum((of + 1) * size, self._lane_start(lane + 1) - at)
            # The last rows of a lane may not fill a run: they stay last.
            runs = np.stack([runs * size, runs * size + ends - of * size], axis=1)
            runs[0, 0] += start % size
            runs[-1, 1] -= ends[-1] - stop
            found.append(at + runs)
        return found

    def _scattered(
        self, parts: Sequence[tuple[int, int, int]], places: Sequence[np.ndarray], counts: Sequence[int]
    ) -> list[np.ndarray]:
        """Where the runs at some places of lanes come from; of all lanes at once, since each has few."""
        if not parts:
            return []
        lengths = [len(of) for of in places]
        keys = np.stack([keys_of(self.seed, self.epoch, lane) for lane, _, _ in parts], axis=1)
        runs = permuted(np.concatenate(places), np.repeat(counts, lengths), np.repeat(keys, lengths, axis=1))
        return np.split(runs, np.cumsum(lengths)[:-1])

    def _done(self, start: int, stop: int) -> tuple[int, ...]:
        """Row groups of which no touched lane needs a row after the steps before ``stop``."""
        lanes = [
            (origin + self._lane_rows(lane, start), origin + self._lane_rows(lane, stop), self._lane_start(lane + 1))
            for lane in range(*self._touched)
            for origin in [self._lane_start(lane)]
        ]
        done = set()
        for low, high, _ in lanes:
            if low == high:
                continue
            first = int(np.searchsorted(self._bounds, low, side="right")) - 1
            last = int(np.searchsorted(self._bounds, high, side="left"))
            for place in range(first, last):
                begin, end = int(self._bounds[place]), int(self._bounds[place + 1])
                if not any(max(begin, at) < min(end, finish) for _, at, finish in lanes):
                    done.add(int(self._sequence[place]))
        return tuple(sorted(done))

    def _lane_start(self, lane: int) -> int:
        """Rows of the stream before a lane."""
        b = self.batches
        return b.full * (lane * b.global_batch // self.lanes) + sum(lane * n // self.lanes for n in b.tail)

    def _lane_rows(self, lane: int, step: int) -> int:
        """Rows that a lane gives to the batches before ``step``."""
        b, v = self.batches, self.lanes
        full = min(step, b.full) * ((lane + 1) * b.global_batch // v - lane * b.global_batch // v)
        return full + sum((lane + 1) * n // v - lane * n // v for n in b.tail[: max(0, step - b.full)])

    @cached_property
    def _sequence(self) -> np.ndarray:
        """``[row groups] int64``: the row groups in the order of the stream."""
        n = len(self.groups)
        if self.mixing == "none":
            return np.arange(n)
        # One for all epochs where workers keep what they have read.
        key = (self.seed,) if self.mixing == "rows" else (self.seed, self.epoch)
        return generator(*key).permutation(n)

    @cached_property
    def _shifts(self) -> np.ndarray:
        """``[row groups] int64``, in the order of the stream: a row's number in the source minus that in the stream."""
        starts = np.cumsum([0, *self.groups])[:-1]
        return np.asarray(starts[self._sequence] - self._bounds[:-1])

    @cached_property
    def _bounds(self) -> np.ndarray:
        """``[row groups + 1] int64``: the first row of each row group in the stream, and the end."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.groups, np.int64)[self._sequence])])

    @cached_property
    def _touched(self) -> tuple[int, int]:
        """The lanes that hold a row of this worker: first, and one past the last."""
        first, last = self.lanes, 0
        for n in {*([self.batches.global_batch] if self.batches.full else []), *self.batches.tail}:
            low, high = self.share.of(n)
            for lane in range(self.lanes):
                if max(low, lane * n // self.lanes) < min(high, (lane + 1) * n // self.lanes):
                    first, last = min(first, lane), max(last, lane + 1)
        return first, last


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]
