"""Which GPUs a process may see: pure functions of what Spark assigned and what the host allows."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.errors import LaunchError


def visible_devices(addresses: Sequence[str], existing: str | None) -> tuple[str, ...]:
    """The entries for CUDA_VISIBLE_DEVICES that stand for Spark's ``addresses``.

    Args:
        addresses: as Spark's discovery script gave them: indexes, or UUIDs of GPUs or MIG slices.
        existing: CUDA_VISIBLE_DEVICES of the executor. An index counts into it, as CUDA itself counts; a UUID stands
            for itself.

    Raises:
        LaunchError: an index points beyond the existing list.
    """
    if not existing:
        return tuple(addresses)
    allowed = [entry.strip() for entry in existing.split(",")]
    chosen = []
    for address in addresses:
        if not address.isdecimal():
            chosen.append(address)
        elif int(address) < len(allowed):
            chosen.append(allowed[int(address)])
        else:
            raise LaunchError(f"GPU address {address}: expected an index into CUDA_VISIBLE_DEVICES={existing}")
    return tuple(chosen)
