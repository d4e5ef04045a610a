"""What a worker reads together: the rows of consecutive steps, where they lie, and where in its batches they go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tfdist.data.permutation import generator


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Take:
    """Where rows of a pool go: ``pool[order][offset : offset + count * width]``, seen as ``[count, width]``, columns
    ``first`` to ``last``, to the columns from ``column`` of the block."""

    block: int
    offset: int
    count: int
    width: int
    first: int
    last: int
    column: int


@dataclass(frozen=True)
class Pool:
    """Rows of one lane that are mixed with each other.

    Args:
        runs: ``[runs, 2] int64``, where they lie in the stream: first row, and one past the last.
        rows: how many.
        key: decides the permutation; None keeps the order.
        takes: where they go.
    """

    runs: np.ndarray
    rows: int
    key: tuple[int, ...] | None
    takes: tuple[Take, ...]

    @cached_property
    def order(self) -> np.ndarray | None:
        """``[rows] int64``, the permutation; None keeps the order."""
        return None if self.key is None else generator(*self.key).permutation(self.rows)


@dataclass(frozen=True)
class Round:
    """Consecutive steps of a worker, read together.

    Args:
        start: the first step.
        blocks: (steps, local rows) of each block: of full batches first, then each batch of the tail by itself.
        pools: one for each lane that the worker touches.
    """

    start: int
    blocks: tuple[tuple[int, int], ...]
    pools: tuple[Pool, ...]
