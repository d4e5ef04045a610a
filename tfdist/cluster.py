"""Who takes part in a training: plain values and pure functions, no Spark and no TensorFlow."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tfdist.errors import LaunchError


@dataclass(frozen=True)
class WorkerHello:
    """What a worker says of itself in the handshake.

    Args:
        rank: its number, 0 is the chief.
        host: the name or address under which its peers reach it, without port and without brackets.
        port: the TCP port reserved for TensorFlow.
        versions: package name to version, of everything that must agree between workers.
        devices: addresses of the GPUs given to it.
        other_hosts: more addresses of its host, for peers that do not reach ``host``.
    """

    rank: int
    host: str
    port: int
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    other_hosts: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerHello:
        raw = json.loads(text)
        raw["devices"], raw["other_hosts"] = tuple(raw["devices"]), tuple(raw["other_hosts"])
        return WorkerHello(**raw)


@dataclass(frozen=True)
class Roster:
    """All workers of one training, by rank."""

    workers: tuple[WorkerHello, ...]

    @staticmethod
    def gather(hellos: Sequence[WorkerHello]) -> Roster:
        """Order the greetings by rank and check that they agree.

        Raises:
            LaunchError: a rank is missing or double, two workers claim one address, or versions differ; the message
                names the ranks.
        """
        workers = tuple(sorted(hellos, key=lambda w: w.rank))
        ranks = [w.rank for w in workers]
        if ranks != list(range(len(workers))):
            raise LaunchError(
                f"handshake: expected one worker for each rank 0 to {len(workers) - 1}, got ranks {ranks}"
            )
        seen: dict[str, int] = {}
        for worker in workers:
            address = join_address(worker.host, worker.port)
            if address in seen:
                raise LaunchError(f"handshake: rank {seen[address]} and rank {worker.rank} both advertise {address}")
            seen[address] = worker.rank
        chief = workers[0]
        differences = [
            f"rank {w.rank} on {w.host} has {name} {w.versions.get(name, 'not installed')},"
            f" rank 0 on {chief.host} has {chief.versions.get(name, 'not installed')}"
            for w in workers[1:]
            for name in sorted({*chief.versions, *w.versions})
            if w.versions.get(name) != chief.versions.get(name)
        ]
        if differences:
            raise LaunchError(
                "handshake: workers disagree on versions; install the same everywhere:\n" + "\n".join(differences)
            )
        return Roster(workers)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of each worker, by rank; IPv6 hosts in brackets."""
        return tuple(join_address(w.host, w.port) for w in self.workers)


@dataclass(frozen=True)
class WorkerContext:
    """Where am I: what code inside a training may ask.

    Attributes:
        rank: number of this worker, 0 to ``world_size - 1``.
        world_size: number of workers.
        addresses: ``host:port`` of each worker, by rank; empty when there is only this process.
        scratch_dir: a private folder of this worker, removed when the training ends.
        run_id: identifies this launch; the same on all workers.
        strategy: name of the strategy in force.
    """

    rank: int = 0
    world_size: int = 1
    addresses: tuple[str, ...] = ()
    scratch_dir: Path | None = None
    run_id: str = ""
    strategy: str = "single"

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def to_json(self) -> str:
        raw = asdict(self)
        raw["scratch_dir"] = None if self.scratch_dir is None else str(self.scratch_dir)
        return json.dumps(raw)

    @staticmethod
    def from_json(text: str) -> WorkerContext:
        raw = json.loads(text)
        raw["addresses"] = tuple(raw["addresses"])
        raw["scratch_dir"] = None if raw["scratch_dir"] is None else Path(raw["scratch_dir"])
        return WorkerContext(**raw)


_current: WorkerContext | None = None


def worker_context() -> WorkerContext:
    """The context of the training that this process takes part in; on the driver, a context of one worker."""
    return _current if _current is not None else WorkerContext()


def inside_training() -> bool:
    """Whether this process takes part in a training that tfdist launched."""
    return _current is not None


def enter_training(context: WorkerContext | None) -> WorkerContext | None:
    """Make ``context`` this process' own and return the one before; launchers call it, users do not."""
    global _current
    before, _current = _current, context
    return before


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host as in RFC 3986, section 3.2.2."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int | None]:
    """Host and port of ``host:port``, ``[v6]:port``, a bare host or a bare IPv6 address.

    Also of all eight groups of an IPv6 address and a port, as Spark names its barrier tasks.
    """
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, int(rest[1:]) if rest.startswith(":") else None
    if address.count(":") == 8 and "::" not in address:
        host, _, port = address.rpartition(":")
        return str(ipaddress.ip_address(host)), int(port)
    if address.count(":") > 1:
        return address, None
    host, colon, port = address.partition(":")
    return host, int(port) if colon else None


def tf_config(roster: Roster, rank: int) -> str:
    """The TF_CONFIG of a worker under MultiWorkerMirroredStrategy, as JSON text."""
    return json.dumps({"cluster": {"worker": list(roster.addresses)}, "task": {"type": "worker", "index": rank}})


def share_devices(slots: int, tasks: int) -> tuple[int, ...]:
    """How many of ``slots`` devices each of ``tasks`` tasks uses: they sum to ``slots`` and differ by at most one."""
    if tasks < 1 or slots < tasks:
        raise ValueError(f"expected at least one device for each task, got {slots} devices over {tasks} tasks")
    return tuple(slots // tasks + (rank < slots % tasks) for rank in range(tasks))
