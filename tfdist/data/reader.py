"""What a worker reads, and the blocks of an iteration over it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tfdist.data.batches import ALONE, Share, lane_count, plan_batches
from tfdist.data.manifest import Manifest
from tfdist.data.permutation import run_rows
from tfdist.data.rowcache import RowCache
from tfdist.data.shards import Epoch, Mixing
from tfdist.data.sources import Block, Cached, Source, Streamed

POOL_BYTES = 16 * 2**20
"""Memory of the rows that are mixed with each other, over all lanes and workers."""

BLOCK_BYTES = 8 * 2**20
"""Memory of a block: large enough that the cost of a block does not count, small enough for the processor's cache."""

SINGLE_BYTES = 2**20
"""Memory from which on a batch is a block by itself: to copy it would cost more than another call of Python."""


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
        laid_out_for: the number of workers whose batches these are; None: that of now.
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
    laid_out_for: int | None = None

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
        planned = self.laid_out_for or world
        lanes = lane_count(planned, self.global_batch) if mixed else 1
        return Epoch(
            groups=groups,
            batches=plan_batches(manifest.rows, self.global_batch, world, self.drop_remainder, planned),
            lanes=self.lanes or lanes,
            steps_per_round=steps,
            share=self.share,
            seed=self.seed,
            epoch=number,
            mixing=self.mixing,
            run_rows=run_rows(manifest.row_bytes, steps),
            steps_per_block=self._steps_per_block(world),
        )

    def _steps_per_block(self, world: int) -> int:
        batch_bytes = max(1, self.manifest.row_bytes * self.global_batch // world)
        return 1 if batch_bytes >= SINGLE_BYTES else max(1, BLOCK_BYTES // batch_bytes)

    def cache(self, epoch: Epoch) -> RowCache:
        """An empty cache for what this worker reads in all epochs.

        Raises:
            DataError: the disk has too little space.
        """
        return RowCache(self.manifest, epoch.touched_rows if self.mixing == "rows" else self.manifest.rows)


class Blocks:
    """The blocks of one iteration.

    They are asked for in their order, while threads make the block after and read the round after; any other order is
    right too, and reads anew.

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
        self._held: tuple[int, int] | None = None
        self._make: Callable[[int], Block] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-blocks")  # all the work, one block at a time
        self._ahead: tuple[int, Future[Block]] | None = None

    def __len__(self) -> int:
        """Blocks of the iteration; of its first epoch when it is endless."""
        return self._each - self._first_block

    def __getitem__(self, index: int) -> Block:
        """Block number ``index`` of the iteration."""
        ahead, self._ahead = self._ahead, None
        asked = ahead[1] if ahead and ahead[0] == index else self._thread.submit(self._made, index)
        if self._endless or index + 1 < len(self):
            self._ahead = index + 1, self._thread.submit(self._made, index + 1)
        return asked.result()

    def close(self) -> None:
        """Stop reading ahead; what is asked for afterwards is read anew."""
        self._ahead = None
        self._thread.submit(self._forget)

    def _made(self, index: int) -> Block:
        later, block = divmod(self._first_block + index, self._each)
        number, place = self._epoch(self._first_epoch + later).round_of(block)
        wanted = self._first_epoch + later, number
        if self._make is None or self._held != wanted:
            self._make = None
            self._make = self._read(*wanted)
            self._held = wanted
        taken = self._make(place)
        return taken.cut(self._first_place, taken.steps) if index == 0 and self._first_place else taken

    def _forget(self) -> None:
        self._source.close()
        self._make = None

    def _read(self, number: int, round_number: int) -> Callable[[int], Block]:
        following = (number, round_number + 1)
        if following[1] == self._epoch(number).rounds:
            following = (number + 1, 0)
        ahead = None
        if following[0] == number or self._endless:
            ahead = self._epoch(following[0]), following[1]
        return self._source.blocks(self._epoch(number), round_number, ahead)

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            self._epochs = {n: epoch for n, epoch in self._epochs.items() if n >= number - 1}
            self._epochs[number] = self._reading.epoch(number)
        return self._epochs[number]
