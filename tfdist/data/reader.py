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
from tfdist.data.shards import ALONE, Epoch, Round, Share, lane_count, plan_batches
from tfdist.errors import DataError

MIXED_BYTES = 16 * 2**20
"""Memory of the rows that are mixed with each other, over all lanes and workers."""

IN_ORDER_BYTES = 4 * 2**20
"""Most memory of the rows that are read together in the order of the source; a row group at most."""

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

    def blocks(self, first_epoch: int, last_epoch: int | None = None) -> Iterator[Block]:
        """The blocks of the epochs from ``first_epoch`` to ``last_epoch``, or without end."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="tfdist-read")
        try:
            groups = _RowGroups(self.manifest, thread)
            rounds = self._rounds(first_epoch, last_epoch)
            following = next(rounds, None)
            while following is not None:
                epoch, planned = following
                groups.want(epoch, planned)
                following = next(rounds, None)
                if following is not None:
                    groups.want(*following)
                yield from _assemble(planned, groups.taken(epoch, planned), self.manifest.schema.columns)
                groups.drop(epoch, planned)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _rounds(self, first: int, last: int | None) -> Iterator[tuple[int, Round]]:
        number = first
        while last is None or number <= last:
            for planned in self.epoch(number).rounds_from():
                yield number, planned
            number += 1


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
        fragment, columns = self._manifest.fragments[number], self._manifest.schema.columns
        table = self._file(number).read_row_group(place, columns=[c.file_name for c in columns])
        if table.num_rows != fragment.row_groups[place]:
            raise self._changed(number, f"{table.num_rows} rows in row group {place}")
        return [values for c in columns for values in self._values(table, c, number, place)]

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


def _assemble(planned: Round, groups: dict[int, Group], columns: Sequence[Column]) -> list[Block]:
    """The blocks of a round."""
    tensors = sum(len(c.tensors) for c in columns)
    blocks: list[Block] = [[] for _ in planned.blocks]
    for place in range(tensors):
        values: dict[int, Any] = {group: held[place] for group, held in groups.items()}
        if isinstance(next(iter(values.values())), Text):
            codes, distinct = _one_code(values)
            for block, part in zip(blocks, _mixed(planned, codes), strict=True):
                block += [part, distinct]
        else:
            for block, part in zip(blocks, _mixed(planned, values), strict=True):
                block.append(part)
    return blocks


def _one_code(values: dict[int, Any]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Codes of several row groups as codes into the values of all."""
    codes, first = {}, 0
    for group, text in values.items():
        codes[group] = text.codes + np.int32(first) if first else text.codes
        first += len(text.values)
    return codes, np.concatenate([text.values for text in values.values()])


def _mixed(planned: Round, values: dict[int, np.ndarray]) -> list[np.ndarray]:
    """One tensor of a round's blocks, each ``[steps, rows, *shape]``.

    A block may be a view of a row group: the pipeline cuts batches out of it by copying, so nobody writes to it.
    """
    some = next(iter(values.values()))
    out: list[np.ndarray | None] = [None] * len(planned.blocks)
    for pool in planned.pools:
        parts = [values[p.group][p.start : p.stop] for p in pool.pieces]
        whole = pool.order is None and len(planned.pools) == 1
        rows = _joined(parts) if len(parts) > 1 else parts[0]
        for take in pool.takes:
            shape = planned.blocks[take.block]
            end = take.offset + take.count * take.width
            if pool.order is None:
                chosen = rows[take.offset : end].reshape(take.count, take.width, *some.shape[1:])
                chosen = chosen[:, take.first : take.last]
                if whole and take.width == shape[1]:
                    out[take.block] = chosen
                    continue
            else:
                order = pool.order[take.offset : end].reshape(take.count, take.width)
                chosen = np.take(rows, order[:, take.first : take.last], axis=0)
            block = out[take.block]
            if block is None:
                block = out[take.block] = _aligned((*shape, *some.shape[1:]), some.dtype)
            block[:, take.column : take.column + take.last - take.first] = chosen
    return [block for block in out if block is not None]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts after one another, in new memory."""
    out = _aligned((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    return np.concatenate(parts, out=out)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
