"""The order of rows: properties that hold for every layout, number of workers and batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tfdist.data.batches import Share, lane_count, plan_batches
from tfdist.data.permutation import permuted
from tfdist.data.shards import Epoch, Mixing
from tfdist.errors import ConfigError

GROUPS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda g: sum(g) > 0)
WORKERS = st.integers(1, 8)
MIXING: st.SearchStrategy[Mixing] = st.sampled_from(["none", "rows", "pool"])
BATCH = st.integers(1, 70)


def make_epoch(
    groups: list[int],
    batch: int,
    world: int,
    *,
    mixing: Mixing = "rows",
    per_round: int = 3,
    laid_out_for: int | None = None,
) -> Epoch:
    planned = laid_out_for or world
    return Epoch(
        groups=tuple(groups),
        batches=plan_batches(sum(groups), batch, world, laid_out_for=planned),
        lanes=1 if mixing == "none" else lane_count(planned, batch),
        steps_per_round=per_round,
        share=Share(0, world),
        seed=5,
        epoch=2,
        mixing=mixing,
        run_rows=4,
        steps_per_block=2,
    )


def batches_of(epoch: Epoch) -> list[list[int]]:
    """The rows of each step of one worker, as numbers in the order of the source."""
    starts = np.concatenate([[0], np.cumsum(epoch.groups)])
    steps: list[list[int]] = []
    for planned in map(epoch.round, range(epoch.rounds)):
        blocks = [np.full(shape, -1) for shape in planned.blocks]
        for pool in planned.pools:
            rows = epoch.sources(pool)
            assert len(rows) == pool.rows
            pieces = [np.arange(starts[p.group] + p.start, starts[p.group] + p.stop) for p in epoch.pieces(pool)]
            assert (np.concatenate(pieces)[... if pool.order is None else pool.order] == rows).all()
            for t in pool.takes:
                chosen = rows[t.offset : t.offset + t.count * t.width].reshape(t.count, t.width)[:, t.first : t.last]
                blocks[t.block][:, t.column : t.column + t.last - t.first] = chosen
        steps += [row.tolist() for block in blocks for row in block]
    return steps


def workers_of(epoch: Epoch) -> list[list[list[int]]]:
    world = epoch.share.world
    return [batches_of(replace(epoch, share=Share(rank, world))) for rank in range(world)]


@given(GROUPS, BATCH, WORKERS, MIXING, st.integers(1, 5))
def test_every_row_is_read_once_in_equally_many_steps_and_no_worker_is_without_a_row(
    groups: list[int], batch: int, world: int, mixing: Mixing, per_round: int
) -> None:
    """For any row groups, batch and number of workers: each row once, equal steps, no empty share."""
    assume(sum(groups) >= world and batch >= world)
    epoch = make_epoch(groups, batch, world, mixing=mixing, per_round=per_round)
    workers = workers_of(epoch)
    assert {len(steps) for steps in workers} == {epoch.batches.steps}
    assert all(rows for steps in workers for rows in steps)
    assert Counter(row for steps in workers for rows in steps for row in rows) == Counter(range(sum(groups)))
    for step in range(epoch.batches.steps):
        assert sum(len(steps[step]) for steps in workers) == epoch.batches.size(step)


@given(GROUPS, st.integers(1, 70), MIXING)
def test_any_number_of_workers_sees_the_same_global_batches(groups: list[int], batch: int, mixing: Mixing) -> None:
    """1, 2, 3, 4, 6 and 12 workers train on the same rows in each step, wherever each can have a row in each."""
    tail = plan_batches(sum(groups), batch).tail
    seen = None
    for world in (1, 2, 3, 4, 6, 12):
        if world > batch or world > min([*tail, sum(groups)]):
            break
        workers = workers_of(make_epoch(groups, batch, world, mixing=mixing))
        together = [Counter(row for steps in workers for row in steps[k]) for k in range(len(workers[0]))]
        assert seen is None or together == seen
        seen = together
    assert seen is not None


@given(GROUPS, BATCH, WORKERS, WORKERS, MIXING)
def test_other_workers_keep_the_batches_of_those_that_began(
    groups: list[int], batch: int, began: int, now: int, mixing: Mixing
) -> None:
    """Laid out for the workers that a training began with, the global batches are theirs for any number of workers.

    More workers than the rows of a short last batch are refused.
    """
    assume(sum(groups) >= max(began, now) and batch >= max(began, now))
    before = make_epoch(groups, batch, began, mixing=mixing)
    if now > min(before.batches.tail, default=now):
        with pytest.raises(ConfigError, match=rf"slots: expected at most \d+ workers, got {now}"):
            make_epoch(groups, batch, now, mixing=mixing, laid_out_for=began)
        return
    seen, wanted = (
        [Counter(row for steps in workers for row in steps[k]) for k in range(len(workers[0]))]
        for workers in map(workers_of, (make_epoch(groups, batch, now, mixing=mixing, laid_out_for=began), before))
    )
    assert seen == wanted


@given(GROUPS, BATCH, WORKERS, MIXING)
def test_the_order_is_a_function_of_seed_and_epoch(groups: list[int], batch: int, world: int, mixing: Mixing) -> None:
    """The same seed and epoch give the same order, to every process that computes it."""
    assume(sum(groups) >= world and batch >= world)
    epoch = make_epoch(groups, batch, world, mixing=mixing)
    assert batches_of(epoch) == batches_of(replace(epoch))


@given(GROUPS, BATCH, WORKERS, st.integers(1, 5))
def test_each_step_is_found_in_its_block(groups: list[int], batch: int, world: int, per_round: int) -> None:
    """Blocks are numbered through all rounds, and each step and each block is found by its number."""
    assume(sum(groups) >= world and batch >= world)
    epoch = make_epoch(groups, batch, world, per_round=per_round)
    blocks = [(r, place) for r in range(epoch.rounds) for place in range(len(epoch.round(r).blocks))]
    assert [epoch.round_of(block) for block in range(epoch.blocks)] == blocks
    steps = [(b, k) for b, (r, place) in enumerate(blocks) for k in range(epoch.round(r).blocks[place][0])]
    assert [epoch.block_at(step) for step in range(epoch.batches.steps)] == steps


def test_another_seed_and_another_epoch_are_another_order() -> None:
    """Seed and epoch each change the order of shuffled rows, and neither that of the source."""
    epoch = make_epoch([50, 60, 70], 30, 1)
    orders = [batches_of(e) for e in (epoch, replace(epoch, seed=6), replace(epoch, epoch=3))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    flat = [row for rows in batches_of(replace(epoch, mixing="none", lanes=1)) for row in rows]
    assert flat == list(range(180))


@given(GROUPS, BATCH, WORKERS)
def test_the_remainder_can_be_left_out(groups: list[int], batch: int, world: int) -> None:
    """With drop_remainder all batches are full and each row is read at most once."""
    assume(sum(groups) >= batch >= world)
    epoch = replace(
        make_epoch(groups, batch, world), batches=plan_batches(sum(groups), batch, world, drop_remainder=True)
    )
    workers = workers_of(epoch)
    assert {sum(len(steps[k]) for steps in workers) for k in range(sum(groups) // batch)} == {batch}
    assert max(Counter(row for steps in workers for rows in steps for row in rows).values()) == 1


@given(GROUPS, BATCH, WORKERS, st.sampled_from(["none", "pool"]))
def test_a_row_group_is_given_up_exactly_after_its_last_use(
    groups: list[int], batch: int, world: int, mixing: Mixing
) -> None:
    """No round needs a row group after it was called done, and at the end all that were read are done."""
    assume(sum(groups) >= world and batch >= world)
    for rank in range(world):
        epoch = replace(make_epoch(groups, batch, world, mixing=mixing, per_round=2), share=Share(rank, world))
        done: set[int] = set()
        used: set[int] = set()
        for planned in map(epoch.round, range(epoch.rounds)):
            now = {p.group for pool in planned.pools for p in epoch.pieces(pool)}
            assert now == set(epoch.groups_of(planned))
            assert not now & done
            used |= now
            done |= set(epoch.done(planned))
        assert used <= done


@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_some_numbers_of_a_permutation_are_those_of_the_whole(count: int, key: int) -> None:
    """Every number comes once, those beyond the end stay, and a part is permuted as it is in the whole."""
    keys = np.random.default_rng(key).integers(0, 2**63, size=4, dtype=np.uint64)
    whole = permuted(np.arange(count + 3), count, keys)
    assert sorted(whole[:count]) == list(range(count))
    assert whole[count:].tolist() == [count, count + 1, count + 2]
    assert (permuted(np.arange(count // 3, count), count, keys) == whole[count // 3 : count]).all()


@pytest.mark.parametrize("world", [1, 3])
def test_batches_of_sorted_rows_are_as_different_as_batches_drawn_at_random(world: int) -> None:
    """The means of shuffled batches spread at most half as much again as those of a perfect shuffle."""
    rows, batch = 300_000, 1024
    epoch = replace(
        make_epoch([5000] * (rows // 5000), batch, world, per_round=32), run_rows=16, batches=plan_batches(rows, batch)
    )
    steps = [np.concatenate(shares) for shares in zip(*workers_of(epoch), strict=True)][: rows // batch]
    means = np.array([np.mean(step) for step in steps])
    ideal = rows / np.sqrt(12 * batch)
    assert np.std(means) < 1.5 * ideal
    order = np.concatenate(steps)  # ranks by themselves
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 0.02
    neighbours = np.concatenate([np.diff(np.asarray(step) // 5000) == 0 for step in steps])
    assert neighbours.mean() < 1.5 * 12 * 5000 / rows  # a lane holds a twelfth of the row groups


@settings(max_examples=300)
@given(st.integers(1, 5000), st.integers(1, 300), WORKERS)
def test_batches_are_full_but_for_the_last_two(rows: int, batch: int, world: int) -> None:
    """Sizes sum to the rows, every worker gets a row of each, and one process has ceil(rows / batch) steps."""
    assume(rows >= world and batch >= world)
    batches = plan_batches(rows, batch, world)
    assert batches.rows == rows
    assert min([batch, *batches.tail]) >= world
    assert len(batches.tail) <= 2
    assert plan_batches(rows, batch).steps == -(-rows // batch)


def test_a_worker_in_twelve_lanes_reads_no_row_of_another() -> None:
    """When the lanes are a multiple of the workers, what a worker reads is its own share and nothing else."""
    epoch = make_epoch([100] * 12, 120, 4)
    for rank in range(4):
        mine = replace(epoch, share=Share(rank, 4))
        read = sum(pool.rows for planned in map(mine.round, range(mine.rounds)) for pool in planned.pools)
        assert read == sum(len(rows) for rows in batches_of(mine)) == 300


@pytest.mark.parametrize(
    ("rows", "batch", "world", "drop", "words"),
    [
        (3, 8, 4, False, ["4 workers", "3 rows"]),
        (100, 3, 4, False, ["4 workers", "got 3"]),
        (0, 8, 1, False, ["empty"]),
        (7, 8, 1, True, ["global batch of 8", "got 7"]),
    ],
)
def test_too_few_rows_are_refused_with_the_numbers(
    rows: int, batch: int, world: int, drop: bool, words: list[str]
) -> None:
    """Fewer rows, or smaller batches, than workers: the error names both numbers and a way out."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(rows, batch, world, drop)
    assert all(word in str(caught.value) for word in words)
    assert ";" in str(caught.value)
