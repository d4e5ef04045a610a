"""Which rows of a stream make each step of a worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data.dealt import POOL_BYTES, Order


@st.composite
def orders(draw: st.DrawFn) -> Order:
    rows = draw(st.integers(1, 3000))
    return Order(
        rows=rows,
        steps=draw(st.integers(1, rows)),
        row_bytes=draw(st.sampled_from([1, 40_000, POOL_BYTES // 50, 3 * POOL_BYTES])),
        rank=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 5)),
        shuffle=draw(st.sampled_from([True, False, "pool"])),
    )


@given(orders(), st.integers(0, 3))
def test_every_row_is_in_one_step_of_an_epoch(order: Order, epoch: int) -> None:
    """The pools of an epoch hold each row once, and each step gets its share of them, at least a row."""
    bounds = [order.bounds(pool) for pool in range(order.pools)]
    sizes = np.concatenate([np.diff(b) for b in bounds])
    n, steps = order.rows, order.steps
    assert sizes.tolist() == [(k + 1) * n // steps - k * n // steps for k in range(steps)]
    assert sizes.min() >= 1
    sources = [order.sources(epoch, pool) for pool in range(order.pools)]
    assert [len(s) for s in sources] == [b[-1] - b[0] for b in bounds]
    assert sorted(np.concatenate(sources).tolist()) == list(range(n))


@given(orders())
def test_rows_that_arrive_wait_for_no_later_pool(order: Order) -> None:
    """In the first epoch, and without shuffling or with shuffle="pool" in all, a pool holds the rows of its place."""
    for epoch in (0, 1):
        for pool in range(order.pools):
            if not epoch or order.shuffle is not True:
                start, *_, stop = order.bounds(pool)
                assert sorted(order.sources(epoch, pool).tolist()) == list(range(start, stop))


def test_later_epochs_draw_from_everywhere() -> None:
    """Shuffling, the first pool of a later epoch spans all rows, in another order for each epoch, rank and seed."""
    base = Order(rows=10_000, steps=100, row_bytes=POOL_BYTES // 1000, rank=0, seed=1, shuffle=True)
    first = base.sources(1, 0)
    assert first.mean() == pytest.approx(5000, rel=0.2)
    others = [base.sources(2, 0), Order(10_000, 100, base.row_bytes, 1, 1, True).sources(1, 0)]
    others.append(Order(10_000, 100, base.row_bytes, 0, 2, True).sources(1, 0))
    assert all(other.tolist() != first.tolist() for other in others)
    assert base.sources(1, 0).tolist() == first.tolist()
