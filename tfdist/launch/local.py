"""The local launcher: all workers are processes on this host, without Spark."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tfdist.cluster import Roster, WorkerContext, WorkerHello, share_devices, tf_config
from tfdist.errors import PreflightError
from tfdist.launch.devices import first_devices, host_devices, memory_growth
from tfdist.launch.failures import SECONDARY_GRACE_S, cause, worker_error
from tfdist.launch.ports import reserve_port, with_other_ports
from tfdist.launch.protocol import Event, Failure, LaunchPlan
from tfdist.launch.reach import past_proxies
from tfdist.launch.vigil import OF_OURS, Vigil
from tfdist.launch.warm import WarmOwner
from tfdist.launch.watch import Watch, scratch_dir

_HOST = "127.0.0.1"
_CHECK_EVERY_S = 0.5


class LocalLauncher:
    """Starts each worker as a process of this host and stays until all have ended."""

    def launch(self, program: bytes, plan: LaunchPlan, on_event: Callable[[Event], None]) -> list[bytes]:
        """Run ``program`` once on each of ``plan.tasks`` workers.

        Returns:
            The bytes that ``program`` returned on each rank, or of the chief only when ``plan.results`` says so.

        Raises:
            PreflightError: this host has too few GPUs.
            WorkerError: a worker failed; the others were ended.
        """
        devices = _devices(plan)
        return with_other_ports(lambda: self._launch(program, plan, devices, on_event))

    def _launch(
        self, program: bytes, plan: LaunchPlan, devices: Sequence[tuple[str, ...]], on_event: Callable[[Event], None]
    ) -> list[bytes]:
        inbox: queue.SimpleQueue[tuple[int, Event | bytes | Failure]] = queue.SimpleQueue()
        with ExitStack() as cleanup:
            hellos = []
            for rank in range(plan.tasks):
                hellos.append(WorkerHello(rank, _HOST, cleanup.enter_context(reserve_port())))
            roster = Roster.gather(hellos)
            watches = []
            for rank, hello in enumerate(hellos):
                scratch = cleanup.enter_context(scratch_dir(plan.run_id, rank))
                context = WorkerContext(rank, plan.tasks, roster.addresses, scratch, plan.run_id, plan.strategy)
                env = {"CUDA_VISIBLE_DEVICES": ",".join(devices[rank])}
                if plan.use_gpu:
                    env |= memory_growth(plan.gpu_memory_growth, False, {**os.environ, **plan.env})
                if plan.tasks > 1:
                    env["TF_CONFIG"] = tf_config(roster, rank)
                    env |= past_proxies({**os.environ, **plan.env}, [_HOST])
                owner = WarmOwner(os.getpid(), f"local-{os.getpid()}") if plan.warm else None
                watch = Watch(plan, program, context, hello, env, owner)
                cleanup.callback(watch.close)
                who = {"host": _HOST, "pid": watch.child.pid, "devices": list(devices[rank])}
                inbox.put((rank, {"kind": "joined", "rank": rank, **who}))
                watches.append(watch)
            threads = [threading.Thread(target=_follow, args=(rank, w, inbox)) for rank, w in enumerate(watches)]
            for thread in threads:
                thread.start()
                cleanup.callback(thread.join)
            for watch in watches:
                cleanup.callback(watch.child.kill)  # runs before the joins: what was ended is soon followed to its end
            results = _gather(inbox, plan, on_event)
        return results if plan.results == "all" else results[:1]


def _devices(plan: LaunchPlan) -> list[tuple[str, ...]]:
    """Of each rank; every worker has GPUs of its own."""
    if not plan.use_gpu:
        return [()] * plan.tasks
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    left = host_devices(visible) if plan.gpus is None else plan.gpus
    if len(left) < plan.slots:
        where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise PreflightError(
            f"compute.slots: expected {plan.slots} GPUs on this host, found {len(left)}{where}; use fewer slots, or "
            "train on the CPU with use_gpu=False"
        )
    found = []
    for share in share_devices(plan.slots, plan.tasks):
        found.append(first_devices(left, share))
        left = left[share:]
    return found


def _follow(rank: int, watch: Watch, inbox: queue.SimpleQueue[Any]) -> None:
    inbox.put((rank, watch.until_done(lambda event: inbox.put((rank, event)))))


def _gather(
    inbox: queue.SimpleQueue[tuple[int, Event | bytes | Failure]], plan: LaunchPlan, on_event: Callable[[Event], None]
) -> list[bytes]:
    results: dict[int, bytes] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    vigil = Vigil(plan.tasks, plan.stall_timeout_s)
    while len(results) + len(failures) < plan.tasks:
        now = time.monotonic()
        found = vigil.stall(now) or (vigil.blame(now) if failures else None)
        if found:
            raise worker_error(found)
        if deadline is not None and now >= deadline:
            break
        try:
            rank, item = inbox.get(timeout=_CHECK_EVERY_S)
        except queue.Empty:
            continue
        if isinstance(item, bytes):
            results[rank] = item
        elif isinstance(item, Failure):
            failures.append(item)
            if not item.secondary:
                break
            deadline = deadline or time.monotonic() + SECONDARY_GRACE_S
        else:
            vigil.note(item, time.monotonic())
            if item["kind"] not in OF_OURS:
                on_event(item)
    if failures:
        raise worker_error(cause(failures))
    return [results[rank] for rank in range(plan.tasks)]
