"""The variables of a gang's checkpoint as another number of workers takes them. Pure: needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from tfdist.train.checkpoint import Checkpoint
from tfdist.train.plain import as_stored, storable


def regrouped(
    checkpoint: Checkpoint, rank: int, replicas: Sequence[int], on_read: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """The values of one rank of another gang.

    What is a sum when it is read (metrics so far in the epoch) keeps its total: the first replica of all gets it, the
    others zeros. What is a mean (moving statistics) becomes that mean everywhere. All else is equal on all replicas.

    Args:
        checkpoint: of a gang of another size.
        rank: in the new gang.
        replicas: for each variable how many values this rank holds of it.
        on_read: as in the manifest, for the new gang.

    Returns:
        Arrays by name, as :func:`tfdist.train.state.read_variables` gives them.
    """
    manifest, found = checkpoint.manifest, {}
    with ExitStack() as stack:
        ranks = [stack.enter_context(checkpoint.archive(r)) for r in range(manifest.world_size)]
        for number, (_, shape, dtype) in enumerate(manifest.variables):
            kind = manifest.on_read.get(str(number))
            stored = [values for one in (ranks if kind else ranks[:1]) for values in _of_variable(one, number, kind)]
            values = [as_stored(array, np.dtype(dtype), tuple(shape)) for array in stored]
            whole = together(values, kind) if kind else values[0]
            for replica in range(replicas[number]):
                apart = on_read.get(str(number)) == "sum" and (rank, replica) != (0, 0)
                found[f"v{number}.{replica}"] = storable(np.zeros_like(whole) if apart else whole)
    return found


def together(values: Sequence[np.ndarray], kind: str) -> np.ndarray:
    """The ``sum`` or ``mean`` of the values of all replicas, rounded once."""
    wide = np.stack([value.astype(np.result_type(value.dtype, np.float64)) for value in values])
    return np.asarray(wide.sum(axis=0) if kind == "sum" else wide.mean(axis=0)).astype(values[0].dtype)


def _of_variable(archive: Mapping[str, np.ndarray], number: int, kind: str | None) -> list[np.ndarray]:
    """The values of the replicas of a rank; of equal ones the first."""
    found = [archive[f"v{number}.0"]]
    while kind and (name := f"v{number}.{len(found)}") in archive:
        found.append(archive[name])
    return found
