"""What driver, supervisor and training process say to each other: plain values, no Spark and no TensorFlow."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from tfdist.config import ComputeConfig
from tfdist.environ import ROWS_FD

Event = dict[str, Any]
"""A small JSON object that a worker sends while it runs; it has at least ``kind`` and ``rank``."""

# Variables that TensorFlow and CUDA read after import: a warm parent can serve children that differ in them.
LATE_VARIABLES = (
    *("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"),
    *("TFDIST_CONTEXT", "TFDIST_EVENT_FD", "no_grpc_proxy", ROWS_FD),
)


class OnEvent(Protocol):
    """Receives each event on the driver, in the thread that started the training, in order per rank."""

    def __call__(self, event: Event, /) -> None: ...


@dataclass(frozen=True)
class LaunchPlan:
    """How the workers of one training are started.

    Args:
        run_id: identifies the launch.
        tasks: number of workers (processes).
        slots: number of workers (CPU) or devices (GPU); at least ``tasks``.
        strategy: name of the strategy in force, told to the workers.
        use_gpu: share the scheduled GPUs among the workers; without it they see none.
        gpu_resource_name: name of the Spark resource that holds the GPUs.
        gpu_memory_growth: as in ``ComputeConfig``.
        gpus_shared: several workers train on one GPU; set by the Spark launcher.
        gpus: of this host for local workers, as CUDA_VISIBLE_DEVICES names them; None: all that there are.
        env: variables set before TensorFlow is imported; never shown, they may be secrets.
        show_output: whose output lines are sent to the driver; a number is a rank.
        results: ``chief`` brings the return value of rank 0, ``all`` of every rank.
        sample_every_s: seconds between two samples of a worker's CPU and memory.
        warm: fork the workers from a process that has imported TensorFlow already.
        application: the Spark application, set by its launcher; workers of one share a warm parent on a host.
        stall_timeout_s: seconds without a sign of progress after which the training is ended; None waits for ever.
    """

    run_id: str
    tasks: int
    slots: int
    strategy: str
    use_gpu: bool = False
    gpu_resource_name: str = "gpu"
    gpu_memory_growth: bool | None = None
    gpus_shared: bool = False
    gpus: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    show_output: Literal["chief", "all", "none"] | int = "chief"
    results: Literal["chief", "all"] = "chief"
    sample_every_s: float = 5.0
    warm: bool = True
    application: str = ""
    stall_timeout_s: float | None = None

    @staticmethod
    def of(
        compute: ComputeConfig, run_id: str, *, results: Literal["chief", "all"], tasks: int | None = None
    ) -> LaunchPlan:
        """The plan for ``compute``, with as many tasks as slots unless ``tasks`` says otherwise."""
        tasks = tasks or compute.slots
        strategy = compute.strategy_in_force
        if tasks == 1 and strategy == "multi_worker_mirrored":
            strategy = "mirrored"  # one worker has nobody to meet; it mirrors over its own devices
        return LaunchPlan(
            run_id=run_id,
            tasks=tasks,
            slots=compute.slots,
            strategy=strategy,
            use_gpu=compute.use_gpu,
            gpu_resource_name=compute.gpu_resource_name,
            gpu_memory_growth=compute.gpu_memory_growth,
            env=dict(compute.env),
            show_output=compute.show_output,
            results=results,
            warm=compute.warm_start,
            stall_timeout_s=compute.stall_timeout_s,
        )

    def shows(self, rank: int) -> bool:
        """Whether the output lines of ``rank`` go to the driver."""
        return self.show_output == "all" or rank == (0 if self.show_output == "chief" else self.show_output)


@dataclass(frozen=True)
class Failure:
    """Why a worker ended without a result; travels as JSON.

    ``secondary`` marks what a worker sees when a peer is gone (a broken collective): the cause is elsewhere.
    """

    rank: int
    host: str
    error_type: str
    message: str
    traceback: str = ""
    last_output: tuple[str, ...] = ()
    secondary: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Failure:
        raw = json.loads(text)
        raw["last_output"] = tuple(raw["last_output"])
        return Failure(**raw)


def new_run_id() -> str:
    """A short name that no other run has, sorted by time."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)


def emit(kind: str, **values: Any) -> None:
    """Send an event from inside a training to the driver; outside a training this does nothing.

    Args:
        kind: what happened, for example ``epoch``.
        **values: JSON values.
    """
    fd = os.environ.get("TFDIST_EVENT_FD")
    if fd is None:
        return
    line = json.dumps({"kind": kind, "time": time.time(), **values}) + "\n"
    os.write(int(fd), line.encode())
