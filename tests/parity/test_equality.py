"""Several replicas equal one process: weights, history, evaluate and predict."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .cases import CASES
from .gang import Outcome, run_gang

Gang = list[dict[str, Outcome]]

# Unequal shares of three workers, and replicas in one process, matter where losses, gradients and metrics are combined.
COMBINING = (
    "tabular",
    "convolutional",
    "sgd",
    "even",
    "global-clipnorm",
    "clipped-embeddings",
    "accumulation",
    "overflow-everywhere",
    "two-outputs",
    "weighted-rows",
    "sum-of-losses",
    "mean-by-weights",
    "masked-sequences",
    "one-number-loss",
    "hand-written",
    "synchronized-normalization",
    "normalization",
    "dropout",
)
EQUAL = {case.name: case for case in CASES if case.same}
GANGS = {"two": (2, 1, tuple(case.name for case in CASES)), "three": (3, 1, COMBINING), "mirrored": (1, 2, COMBINING)}


@pytest.fixture(scope="module")
def one() -> dict[str, Outcome]:
    """The outcomes of one process without a strategy."""
    return run_gang(1, strategy="single", names=list(EQUAL))[0]


@pytest.fixture(scope="module")
def gang() -> Callable[[str], Gang]:
    """Runs a gang when it is first asked for."""
    done: dict[str, Gang] = {}

    def run(name: str) -> Gang:
        if name not in done:
            workers, replicas, names = GANGS[name]
            strategy = "mirrored" if replicas > 1 else "multi_worker_mirrored"
            done[name] = run_gang(workers, strategy=strategy, names=names, replicas=replicas)
        return done[name]

    return run


def assert_close(got: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    """Equal relative to each value, or to the largest one where a sum cancels out."""
    largest = max(float(np.max(np.abs(e))) for e in expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(
    ("gang_name", "case_name"),
    [(gang, name) for gang, (_, _, names) in GANGS.items() for name in names if name in EQUAL],
)
def test_equals_one_process(
    gang: Callable[[str], Gang], one: dict[str, Outcome], gang_name: str, case_name: str
) -> None:
    """Weights, history, evaluate and predict are those of one process, and ranks agree bit by bit."""
    ranks = [rank[case_name] for rank in gang(gang_name)]
    expected, tolerance = one[case_name], EQUAL[case_name].tolerance
    got = ranks[0]
    assert_close(got.weights, expected.weights, tolerance)
    assert got.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=tolerance, err_msg=name)
    assert got.evaluated.keys() == expected.evaluated.keys()
    for name, value in expected.evaluated.items():
        assert got.evaluated[name] == pytest.approx(value, rel=tolerance), name
    if expected.predicted is not None:
        assert got.predicted is not None
        assert_close([got.predicted], [expected.predicted], tolerance)
    if "values" in expected.extra:
        assert_close(got.extra["values"], expected.extra["values"], tolerance)
    assert_ranks_agree(ranks)


def assert_ranks_agree(ranks: list[Outcome]) -> None:
    for other in ranks[1:]:
        assert other.history == ranks[0].history
        assert all(np.array_equal(a, b) for a, b in zip(other.weights, ranks[0].weights, strict=True))


@pytest.mark.parametrize("name", ["normalization", "dropout"])
def test_local_randomness_and_statistics_do_not_depend_on_processes(gang: Callable[[str], Gang], name: str) -> None:
    """Two workers and two devices of one process train alike where a share has its own statistics or random numbers."""
    workers, devices = gang("two"), gang("mirrored")
    assert_close(workers[0][name].weights, devices[0][name].weights, 1e-6)
    assert_ranks_agree([rank[name] for rank in workers])


def test_dropout_masks_differ_by_replica(gang: Callable[[str], Gang]) -> None:
    """Each replica drops other units, and a second run of the same seed drops the same ones."""
    masks = [rank["dropout"].extra["masks"][0] for rank in gang("three")]
    assert len({mask.tobytes() for mask in masks}) == 3
    in_one_process = gang("mirrored")[0]["dropout"].extra["masks"]
    on_two = [rank["dropout"].extra["masks"][0] for rank in gang("two")]
    assert all(np.array_equal(a, b) for a, b in zip(in_one_process, on_two, strict=True))


@pytest.mark.parametrize("name", ["normalization", "normalization-late"])
def test_moving_statistics_are_the_mean_over_replicas(gang: Callable[[str], Gang], name: str) -> None:
    """Every rank reads the mean of what the replicas have gathered, and evaluates with it."""
    ranks = [rank[name].extra for rank in gang("two")]
    local = [rank["trained"]["local"] for rank in ranks]
    assert not np.allclose(local[0], local[1])
    for rank in ranks:
        np.testing.assert_allclose(rank["trained"]["seen"], np.mean(local, axis=0), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(rank["evaluated"]["local"], rank["evaluated"]["seen"])
    np.testing.assert_array_equal(ranks[0]["trained"]["seen"], ranks[1]["trained"]["seen"])
