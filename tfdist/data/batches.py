"""How an epoch is cut into global batches, and which part of each is a worker's: integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.errors import ConfigError

SHARED_LANES = 12
"""Lanes when shuffling: 1, 2, 3, 4, 6 and 12 workers take whole lanes of the same order."""


@dataclass(frozen=True)
class Batches:
    """The sizes of an epoch's global batches: ``full`` of ``global_batch`` rows, then the sizes in ``tail``."""

    global_batch: int
    full: int
    tail: tuple[int, ...]

    @property
    def steps(self) -> int:
        return self.full + len(self.tail)

    @property
    def rows(self) -> int:
        return self.full * self.global_batch + sum(self.tail)

    def size(self, step: int) -> int:
        """Rows of the global batch of a step."""
        return self.global_batch if step < self.full else self.tail[step - self.full]


@dataclass(frozen=True)
class Share:
    """Worker ``rank`` of ``world``."""

    rank: int = 0
    world: int = 1

    def of(self, n: int) -> tuple[int, int]:
        """Its positions, start and stop, in a global batch of ``n`` rows."""
        return self.rank * n // self.world, (self.rank + 1) * n // self.world


ALONE = Share()


def plan_batches(
    rows: int, global_batch: int, world: int = 1, drop_remainder: bool = False, laid_out_for: int | None = None
) -> Batches:
    """Cut an epoch into global batches of which every worker gets at least a row.

    Rows move to a short last batch from the one before it, so that it has at least as many as there are lanes. Where
    both together cannot give every worker a row twice, they are one batch.

    Args:
        rows: rows of the epoch.
        global_batch: rows of a global batch.
        world: number of workers.
        drop_remainder: leave out the rows that do not fill a batch.
        laid_out_for: the number of workers that decides where the batches are cut; by default that of now.

    Raises:
        ConfigError: there are fewer rows, or smaller batches, than workers.
    """
    problems = []
    if global_batch < world:
        problems.append(
            f"global_batch: expected at least a row for each of {world} workers, got {global_batch}; enlarge it"
        )
    if rows < world:
        problems.append(
            f"rows: expected at least a row for each of {world} workers, got {rows} rows; use at most {rows} workers"
            if rows
            else "rows: expected at least one, got an empty data set; check the filters that made it"
        )
    if problems:
        raise ConfigError(problems)
    full, rest = divmod(rows, global_batch)
    if drop_remainder:
        if not full:
            raise ConfigError(
                f"drop_remainder: expected rows for at least one global batch of {global_batch}, got {rows}; "
                "use a smaller global_batch or keep the remainder"
            )
        return Batches(global_batch, full, ())
    planned = laid_out_for or world
    least = lane_count(planned, global_batch)
    if not full or not rest or rest >= least:
        found = Batches(global_batch, full, (rest,) if rest else ())
    else:
        both = global_batch + rest
        last = min(least, both // 2)
        found = Batches(global_batch, full - 1, (both - last, last) if last >= planned else (both,))
    if min(found.tail, default=world) < world:
        raise ConfigError(
            f"slots: expected at most {min(found.tail)} workers, got {world}; the batches are those of a training that "
            f"began with {planned}, and the last ones have {', '.join(map(str, found.tail))} rows"
        )
    return found


def lane_count(world: int, global_batch: int) -> int:
    """Lanes when shuffling: the smallest multiple of the workers from 12 on, lowered to the batch."""
    return min(-(-SHARED_LANES // world) * world, global_batch)
