"""Random orders: the same on every machine, computed in parts."""

from __future__ import annotations

import numpy as np

_RUN_BYTES = 4096  # a page of the file that rows are read from again
_RUN_ROWS = 16


def generator(*key: int) -> np.random.Generator:
    """The random numbers that belong to a key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def keys_of(*key: int) -> np.ndarray:
    """``[4] uint64``, for :func:`permuted`."""
    return generator(*key).integers(0, 2**63, size=4, dtype=np.uint64)


def run_rows(row_bytes: int, steps_per_pool: int) -> int:
    """Rows that stay together on their way from everywhere into a pool.

    Few, so that the rows of a batch come from many places; no more than a page, for files that are not in memory; and
    half a step of a pool at most, see docs/architecture.md.
    """
    return max(1, min(_RUN_ROWS, _RUN_BYTES // row_bytes, steps_per_pool // 2))


def permuted(places: np.ndarray, counts: int | np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where random permutations take some numbers, without computing where they take the others.

    A Feistel network over the smallest power of two that holds them, repeated where it leads out of the range
    (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        places: ``[n] int64``; those from ``counts`` on come back as they are.
        counts: how many numbers are permuted, of one permutation or ``[n] int64`` of each place's own.
        keys: ``[rounds] uint64``, or ``[rounds, n]`` with each place's own; they decide the permutation.

    Returns:
        ``[n] int64``.
    """
    counts = np.broadcast_to(np.asarray(counts, np.int64), places.shape)
    keys = np.broadcast_to(keys.reshape(len(keys), -1), (len(keys), len(places)))
    bits = np.maximum(2, np.frexp(np.maximum(counts - 1, 0))[1]).astype(np.uint64)
    result = places.astype(np.uint64)
    walking = np.flatnonzero(places < counts)
    while len(walking):
        result[walking] = _encrypted(result[walking], bits[walking], keys[:, walking])
        walking = walking[result[walking] >= counts[walking]]
    return result.astype(np.int64)


def _encrypted(values: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """A bijection of the numbers of so many bits."""
    one = np.uint64(1)
    left_bits = bits // np.uint64(2)
    right_bits = bits - left_bits
    for key in keys:
        left, right = values >> right_bits, values & ((one << right_bits) - one)
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # odd, near 2**64 / golden ratio
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)  # of SplitMix64
        left ^= mixed >> (np.uint64(64) - left_bits)
        values = right << left_bits | left
        left_bits, right_bits = right_bits, left_bits
    return values
