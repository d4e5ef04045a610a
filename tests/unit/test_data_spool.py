"""Rows that arrive in a training process, without Spark and TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from tfdist import environ
from tfdist.data.dealt import POOL_BYTES, Dealt, Order
from tfdist.data.fields import Field
from tfdist.data.schema import Schema
from tfdist.data.spool import Spool
from tfdist.data.texts import plain
from tfdist.errors import ConfigError, DataError
from tfdist.launch.feed import Feed

ROWS, STEPS = 4000, 100
SCHEMA = Schema.from_fields([Field("n", "bigint", "c0"), Field("t", "string", "c1")])


@contextmanager
def spool(epochs: int) -> Iterator[Spool]:
    """A worker's rows, two steps in a pool, arriving 300 at a time."""
    batches = (
        pa.record_batch({"c0": part, "c1": [f"text {i}" for i in part]})
        for part in np.split(np.arange(ROWS), range(300, ROWS, 300))
    )
    row_bytes = POOL_BYTES // (2 * ROWS // STEPS)
    feed = Feed(batches)
    environ.adopt({environ.ROWS_FD: str(os.dup(feed.theirs.fileno()))})
    try:
        feed.start(lambda: None)
        yield Spool(Dealt("s", SCHEMA, (ROWS,), 1, epochs), Order(ROWS, STEPS, row_bytes, 0, 1, True))
        feed.stop()
        feed.check()
    finally:
        feed.close()
        environ.adopt({environ.ROWS_FD: None})


def numbers(rows: Spool, iteration: np.int64, pool: int) -> list[int]:
    _, (n, t) = rows.pool(iteration, pool)
    assert [text.decode() for text in plain(t)] == [f"text {i}" for i in n]
    return list(np.asarray(n))


def test_an_iteration_may_begin_again_after_a_look() -> None:
    """What one iteration looked at is there for the next; what a training has used is gone, and said to be."""
    with spool(epochs=1) as rows:
        look = rows.begin()
        seen = [numbers(rows, look, pool) for pool in range(7)]
        training = rows.begin()
        again = [numbers(rows, training, pool) for pool in range(rows.pools)]
        assert again[:7] == seen
        assert sorted(sum(again, [])) == list(range(ROWS))  # noqa: RUF017
        with pytest.raises(DataError, match="read each row once"):
            rows.pool(rows.begin(), 0)


def test_what_a_first_iteration_has_used_is_let_go_of() -> None:
    """An iteration that is further than a look can lead keeps no rows for another one."""
    with spool(epochs=1) as rows:
        only = rows.begin()
        for pool in range(20):
            rows.pool(only, pool)
        with pytest.raises(DataError, match="read each row once"):
            rows.pool(rows.begin(), 0)


def test_later_epochs_have_the_same_rows_in_another_order() -> None:
    """With several epochs every pool of each can be read again, and each epoch has all rows."""
    with spool(epochs=3) as rows:
        each = rows.order.pools
        epochs = [[numbers(rows, rows.begin(), e * each + p) for p in range(each)] for e in range(3)]
        assert all(sorted(sum(pools, [])) == list(range(ROWS)) for pools in epochs)  # noqa: RUF017
        assert epochs[0] != epochs[1] != epochs[2]
        assert numbers(rows, rows.begin(), 0) == epochs[0][0]


def test_a_second_reader_of_the_same_rows_is_refused() -> None:
    """Rows go to one reader in a process that gets rows; elsewhere there is none."""
    with spool(epochs=1) as rows, pytest.raises(ConfigError, match="one pipeline in it"):
        Spool(rows.dealt, rows.order)
