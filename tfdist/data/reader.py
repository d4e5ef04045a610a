"""Row groups to blocks of batches, as numpy arrays: a thread reads ahead, one gather per column and lane."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.data.columns import tensors_of, values_of
from tfdist.data.manifest import Manifest
from tfdist.data.schema import Column
from tfdist.data.shards import ALONE, Epoch, Round, Share, lane_count, plan_batches
from tfdist.data.values import Values, gathered, joined, part
from tfdist.errors import DataError

MIXED_BYTES = 16 * 2**20
"""Memory of the rows that are mixed with each other, over all lanes and workers."""

IN_ORDER_BYTES = 4 * 2**20
"""Most memory of the rows that are read together in the order of the source; a row group at most."""

_OPEN_FILES = 16


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
        shuffle: False keeps the order of the source.
        drop_remainder: leave out the rows that do not fill a batch.
        lanes: parts of the data set that each batch draws from; None decides.
    """

    manifest: Manifest
    global_batch: int
    share: Share = ALONE
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
        groups = tuple(rows for f in manifest.fragments for rows in f.row_groups)
        if self.shuffle:
            together = MIXED_BYTES // manifest.row_bytes
        else:
            # Rows of one row group need no copy to lie after one another.
            together = min(IN_ORDER_BYTES // manifest.row_bytes, max(groups, default=0))
        lanes = lane_count(world, self.global_batch) if self.shuffle else 1
        return Epoch(
            groups=groups,
            batches=plan_batches(manifest.rows, self.global_batch, world, self.drop_remainder),
            lanes=self.lanes or lanes,
            steps_per_round=max(1, together // self.global_batch),
            share=self.share,
            seed=self.seed,
            epoch=number,
            shuffle=self.shuffle,
        )


class Blocks:
    """The blocks of one iteration.

    They are asked for in their order, while a thread reads a round ahead; any other order is right too, and reads anew.

    Args:
        reading: what to read.
        first_epoch: number of the epoch with which the iteration begins.
        start_step: step of that epoch with which it begins.
        endless: epoch after epoch, instead of one.
    """

    def __init__(self, reading: Reading, first_epoch: int, start_step: int = 0, endless: bool = False) -> None:
        self._reading = reading
        self._endless = endless
        self._first_epoch = first_epoch
        self._epochs = {first_epoch: reading.epoch(first_epoch)}
        self._each = self._epochs[first_epoch].blocks
        self._first_block, self._first_place = self._epochs[first_epoch].block_at(start_step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-read")
        self._groups = _RowGroups(reading.manifest, self._thread)
        self._plans: dict[tuple[int, int], Round] = {}
        self._held: tuple[int, int] | None = None
        self._held_blocks: list[Block] = []

    def __len__(self) -> int:
        """Blocks of the iteration; of its first epoch when it is endless."""
        return self._each - self._first_block

    def __getitem__(self, index: int) -> Block:
        """Block number ``index`` of the iteration."""
        later, block = divmod(self._first_block + index, self._each)
        number, place = self._epoch(self._first_epoch + later).round_of(block)
        wanted = self._first_epoch + later, number
        if self._held != wanted:
            self._read(*wanted)
        taken = self._held_blocks[place]
        return taken.cut(self._first_place, taken.steps) if index == 0 and self._first_place else taken

    def close(self) -> None:
        """Stop reading ahead; what is asked for afterwards is read anew."""
        self._groups.forget()
        self._held, self._held_blocks = None, []

    def _read(self, number: int, round_number: int) -> None:
        planned = self._planned(number, round_number)
        self._held, self._held_blocks = None, []
        if not self._groups.wanted(number, planned):
            self._groups.forget()
            self._groups.want(number, planned)
        following = (number, round_number + 1)
        if following[1] == self._epoch(number).rounds:
            following = (number + 1, 0)
        if following[0] == number or self._endless:
            self._groups.want(following[0], self._planned(*following))
        tensors = len(self._reading.manifest.schema.tensors)
        self._held_blocks = _assemble(planned, self._groups.taken(number, planned), tensors)
        self._held = number, round_number
        self._groups.drop(number, planned)

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


Group = list[Values]
"""The tensors of a row group, each ``[rows, *shape]``."""


class _RowGroups:
    """Row groups in memory, read by one thread in the order in which they were asked for.

    Args:
        manifest: the data set.
        thread: reads.
    """

    def __init__(self, manifest: Manifest, thread: ThreadPoolExecutor) -> None:
        self._manifest = manifest
        self._thread = thread
        self._places = [
            (f, i) for f, fragment in enumerate(manifest.fragments) for i in range(len(fragment.row_groups))
        ]
        self._held: dict[tuple[int, int], Future[Group]] = {}
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()

    def want(self, epoch: int, planned: Round) -> None:
        """Have the row groups of a round read."""
        for pool in planned.pools:
            for piece in pool.pieces:
                key = (epoch, piece.group)
                if key not in self._held:
                    self._held[key] = self._thread.submit(self._read, piece.group)

    def wanted(self, epoch: int, planned: Round) -> bool:
        """Whether all row groups of a round are here or on their way."""
        return all((epoch, piece.group) in self._held for pool in planned.pools for piece in pool.pieces)

    def forget(self) -> None:
        """Forget all row groups, also those on their way."""
        for future in self._held.values():
            future.cancel()
        self._held.clear()

    def taken(self, epoch: int, planned: Round) -> dict[int, Group]:
        """The row groups of a round, by number; waits until they are read."""
        wanted = dict.fromkeys(piece.group for pool in planned.pools for piece in pool.pieces)
        return {group: self._held[epoch, group].result() for group in wanted}

    def drop(self, epoch: int, planned: Round) -> None:
        """Forget the row groups that no later round of the epoch needs."""
        for group in planned.done:
            self._held.pop((epoch, group), None)

    def _read(self, group: int) -> Group:
        number, place = self._places[group]
        fragment, schema = self._manifest.fragments[number], self._manifest.schema
        # One thread: decoding has one core, TensorFlow the others; more threads disturb each other.
        table = self._file(number).read_row_group(
            place, columns=[c.file_name for c in schema.columns], use_threads=False
        )
        if table.num_rows != fragment.row_groups[place]:
            raise self._changed(number, f"{table.num_rows} rows in row group {place}")
        return tensors_of(schema, {c.name: self._values(table, c, number, place) for c in schema.columns})

    def _values(self, table: pa.Table, column: Column, number: int, place: int) -> tuple[Values, ...]:
        try:
            return values_of(table.column(table.schema.get_field_index(column.file_name)), column)
        except DataError as error:
            raise DataError(f"{error} (row group {place} of {self._path(number)})") from error

    def _file(self, number: int) -> pq.ParquetFile:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        path = self._path(number)
        # Codes and distinct values are how Parquet stores text; decoding them would cost more than all the rest.
        text = [c.file_name for c in self._manifest.schema.columns if c.spark_type in ("string", "binary")]
        try:
            opened = pq.ParquetFile(path, read_dictionary=text, coerce_int96_timestamp_unit="us")
        except FileNotFoundError as error:
            raise DataError(f"{path}: not found; the data must lie where every worker sees it") from error
        if opened.metadata.num_row_groups != len(self._manifest.fragments[number].row_groups):
            raise self._changed(number, f"{opened.metadata.num_row_groups} row groups")
        self._open[number] = opened
        return opened

    def _path(self, number: int) -> Path:
        return Path(self._manifest.root) / self._manifest.fragments[number].path

    def _changed(self, number: int, got: str) -> DataError:
        rows = list(self._manifest.fragments[number].row_groups)
        return DataError(f"{self._path(number)}: expected row groups of {rows} rows, got {got}; the file was changed")


def _assemble(planned: Round, groups: dict[int, Group], tensors: int) -> list[Block]:
    """The blocks of a round."""
    blocks = [Block(steps, rows, []) for steps, rows in planned.blocks]
    places = _places(planned)
    for tensor in range(tensors):
        pieces = (p for pool in planned.pools for p in pool.pieces)
        rows = joined([part(groups[p.group][tensor], p.start, p.stop) for p in pieces])
        for block, chosen in zip(blocks, places, strict=True):
            if isinstance(chosen, int):
                # A view of a row group: the pipeline cuts batches out of it by copying, so nobody writes to it.
                block.tensors.append(part(rows, chosen, chosen + block.steps * block.rows))
            else:
                block.tensors.append(gathered(rows, chosen))
    return blocks


def _places(planned: Round) -> list[np.ndarray | int]:
    """Where a round's blocks lie in its pools, laid end to end.

    Returns:
        For each block ``[steps * rows] int64``, or the place of the first row where all of them follow it.
    """
    found: list[np.ndarray | int] = [np.empty(shape, np.int64) for shape in planned.blocks]
    before = 0
    for pool in planned.pools:
        for take in pool.takes:
            if pool.order is None and take.width == take.last - take.first == planned.blocks[take.block][1]:
                found[take.block] = before + take.offset
                continue
            block, end = found[take.block], take.offset + take.count * take.width
            assert isinstance(block, np.ndarray)
            order = np.arange(take.offset, end) if pool.order is None else pool.order[take.offset : end]
            columns = order.reshape(take.count, take.width)[:, take.first : take.last]
            np.add(columns, before, out=block[:, take.column : take.column + columns.shape[1]])
        before += pool.rows
    return [block if isinstance(block, int) else block.reshape(-1) for block in found]
