"""Which GPUs a process may see: pure functions of what Spark assigned and what the host allows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile

from tfdist.errors import LaunchError
from tfdist.launch.preflight import DISCOVERY_SCRIPT

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""TensorFlow reads it when it opens a GPU; it goes before ``tf.config.experimental.set_memory_growth``."""


def visible_devices(addresses: Sequence[str], existing: str | None) -> tuple[str, ...]:
    """The entries for CUDA_VISIBLE_DEVICES that stand for Spark's ``addresses``, in an order that is always the same.

    Args:
        addresses: as Spark's discovery script gave them: indexes, or UUIDs of GPUs or MIG slices. Spark tells those of
            a task in any order; indexes are ordered by number, UUIDs as texts.
        existing: CUDA_VISIBLE_DEVICES of the executor, None where it is not set. An index counts into it, as CUDA
            itself counts; a UUID stands for itself.

    Raises:
        LaunchError: an index points beyond the existing list, or what remains mixes indexes and UUIDs.
    """
    ordered = sorted(addresses, key=lambda address: (int(address) if address.isdecimal() else -1, address))
    if existing is None:
        chosen = ordered
    else:
        allowed = listed_devices(existing)
        for address in ordered:
            if address.isdecimal() and int(address) >= len(allowed):
                raise LaunchError(f"GPU address {address}: expected an index into CUDA_VISIBLE_DEVICES={existing}")
        chosen = [allowed[int(address)] if address.isdecimal() else address for address in ordered]
    if len({device.isdecimal() for device in chosen}) > 1:
        raise LaunchError(
            f"GPU addresses {', '.join(chosen)}: expected either indexes or UUIDs, since CUDA takes no mixture; let "
            f"the discovery script give UUIDs only, as {DISCOVERY_SCRIPT.name} does"
        )
    return tuple(chosen)


def listed_devices(existing: str) -> tuple[str, ...]:
    """The entries of CUDA_VISIBLE_DEVICES; CUDA ignores -1 and whatever comes after it."""
    entries = (entry.strip() for entry in existing.split(","))
    return tuple(takewhile(lambda entry: entry not in ("", "-1"), entries))


def first_devices(mine: Sequence[str], wanted: int) -> tuple[str, ...]:
    """The devices that a worker uses of those it may see.

    Raises:
        LaunchError: there are too few, or CUDA would show the worker fewer.
    """
    if len(mine) < wanted:
        raise LaunchError(f"expected {wanted} GPUs, got {len(mine)}: {', '.join(mine) or 'none'}")
    used = tuple(mine[:wanted])
    # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA Device Enumeration")
    if len(used) > 1 and any(device.startswith("MIG") for device in used):
        raise LaunchError(
            f"expected one MIG slice for each worker, got {', '.join(used)}; CUDA shows a process the first slice "
            "only: set spark.task.resource.gpu.amount=1 (or that of your resource)"
        )
    return used


def host_devices(existing: str | None) -> tuple[str, ...]:
    """The GPUs of this host that a process may see: those of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    if existing is not None:
        return listed_devices(existing)
    try:
        found = subprocess.run(["/bin/sh", str(DISCOVERY_SCRIPT)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no nvidia-smi, or one without a driver
        return ()
    return tuple(json.loads(found)["addresses"])


def memory_growth(wish: bool | None, shared: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which TensorFlow takes GPU memory as it needs it, rather than nearly all at once.

    Args:
        wish: what the user asked for; None leaves it to TensorFlow, unless GPUs are shared.
        shared: several workers train on one GPU: the first would leave the others nothing.
        environ: of the training process; a variable that is set there stays where ``wish`` is None.
    """
    if wish is None and (not shared or GROWTH in environ):
        return {}
    return {GROWTH: "false" if wish is False else "true"}
