"""Watches over a whole gang from the driver: who came, who goes on, and whose fault it is when nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tfdist.errors import LaunchError
from tfdist.launch.protocol import Event, Failure
from tfdist.launch.pulse import At, Sign

OF_OURS = ("arrived", "alive")
"""Kinds of events that are for a vigil, not for the user."""

SILENT_S = 4.0
"""Supervisors report every second; one that is silent for so long while its peers fail no longer answers."""

_STARTUP_S = 120.0
_STALL = "tfdist.errors.StallError"


@dataclass
class _Rank:
    host: str = ""
    heard: float | None = None
    reports: bool = False  # its training process was started; the import of TensorFlow before that takes its time
    sign: Sign = field(default_factory=Sign)
    output: tuple[str, ...] = ()

    def silent_s(self, now: float) -> float:
        return 0.0 if self.heard is None else now - self.heard


class Vigil:
    """What the driver knows of the workers of one launch.

    Args:
        tasks: number of workers.
        stall_timeout_s: seconds without a sign of progress that are a stall; None looks for none.
        startup_timeout_s: seconds from the first worker's arrival in which all must have met; None waits.
    """

    def __init__(self, tasks: int, stall_timeout_s: float | None, startup_timeout_s: float | None = None) -> None:
        self._limit_s, self._startup_s = stall_timeout_s, startup_timeout_s
        self._ranks = [_Rank() for _ in range(tasks)]
        self._arrived: dict[int, float] = {}
        self._met = False

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank; empty where it is not known."""
        return [rank.host for rank in self._ranks]

    @property
    def anybody_came(self) -> bool:
        return bool(self._arrived) or self._met

    def note(self, event: Event, now: float) -> None:
        """Take in an event; ``now`` is a monotonic clock in seconds."""
        if event["rank"] not in range(len(self._ranks)):
            return
        rank = self._ranks[event["rank"]]
        rank.heard = now
        match event["kind"]:
            case "arrived":
                self._arrived[event["rank"]] = now
                for known, host in zip(self._ranks, event["hosts"], strict=True):
                    known.host = known.host or host
            case "joined":
                self._met = True
                rank.host = event["host"]
            case "alive":
                self._met = rank.reports = True
                rank.sign = Sign(**event["sign"])
                rank.output = tuple(event["output"])

    def check_arrivals(self, now: float) -> None:
        """Have all workers met in time?

        Raises:
            LaunchError: some are missing; it names them and their hosts.
        """
        if self._met or not self._arrived or self._startup_s is None:
            return
        if now - min(self._arrived.values()) < self._startup_s:
            return
        tasks = len(self._ranks)
        missing = [f"rank {i} of {self._ranks[i].host}" for i in range(tasks) if i not in self._arrived]
        who = f"missing: {', '.join(missing)}" if missing else "all came, and the handshake between them did not end"
        raise LaunchError(
            f"{len(self._arrived)} of {tasks} workers came in {self._startup_s:.0f} s (compute.startup_timeout_s); "
            f"{who}. Look at the log of those executors: their Python did not start, or Spark could not start the task "
            "there"
        )

    def stall(self, now: float) -> Failure | None:
        """The failure of a gang that has stalled, or None.

        Only when no worker goes on: one that waits for a peer is still as well. A worker that the driver has never
        heard of (it has no line) has no say.
        """
        if self._limit_s is None:
            return None
        known = {i: r for i, r in enumerate(self._ranks) if r.heard is not None and r.sign.at != At.DONE}
        if not self._met or not known:
            return None
        starting_s = max(self._limit_s, self._startup_s or 0.0, _STARTUP_S)
        limits = {i: self._limit_s if r.reports else starting_s for i, r in known.items()}
        silent = [i for i, r in known.items() if r.silent_s(now) >= limits[i]]
        if not all(r.sign.stalled or r.sign.stopped or i in silent for i, r in known.items()):
            return None
        if not any(r.sign.stalled for r in known.values()) and not silent:
            return None  # suspended, and not for long
        guilty = silent or [i for i, r in known.items() if r.sign.stopped] or _behind(known)
        return self._failure(guilty, now)

    def blame(self, now: float) -> Failure | None:
        """After collectives broke on some workers: the failure of one that is suspended or silent, or None."""
        known = {i: r for i, r in enumerate(self._ranks) if r.heard is not None and r.sign.at != At.DONE}
        guilty = [i for i, r in known.items() if r.sign.stopped or (r.reports and r.silent_s(now) >= SILENT_S)]
        return self._failure(guilty, now) if guilty and len(guilty) < len(self._ranks) else None

    def _failure(self, guilty: Sequence[int], now: float) -> Failure:
        parts = [f"rank {i} on {self._ranks[i].host}: {self._cause(i, now)}" for i in guilty]
        missing = [i for i in guilty if self._ranks[i].sign.at in (At.UNMARKED, At.MEETING)]
        waiting = [i for i, r in enumerate(self._ranks) if r.sign.at == At.MEETING and i not in guilty]
        if waiting and missing:
            named = ", ".join(f"rank {i} of {self._ranks[i].host}" for i in missing)
            parts.append(
                f"{len(waiting)} of {len(self._ranks)} workers came to the strategy, where all meet; missing: {named}"
            )
        first = self._ranks[guilty[0]]
        return Failure(guilty[0], first.host, _STALL, "; ".join(parts), first.sign.stack.strip(), first.output)

    def _cause(self, index: int, now: float) -> str:
        rank = self._ranks[index]
        silent_s = rank.silent_s(now)
        if silent_s >= SILENT_S:
            what = f"no longer answers, for {silent_s:.0f} s: its host, its executor or its network stands still"
        elif rank.sign.stopped:
            what = f"no step for {rank.sign.still_s:.0f} s: its process is suspended (SIGSTOP)"
        elif rank.sign.at == At.UNMARKED:
            what = f"no sign of progress for {rank.sign.still_s:.0f} s"
        else:
            what = f"no step for {rank.sign.still_s:.0f} s"
        if rank.sign.at == At.UNMARKED:
            return what
        return f"{what}, last step {rank.sign.step}" if rank.sign.step else f"{what}, before the first step"


def _behind(ranks: Mapping[int, _Rank]) -> list[int]:
    """Whom the others wait for: who has made fewer marks, else who is not inside TensorFlow's own code."""
    fewest = min(r.sign.count for r in ranks.values())
    behind = [i for i, r in ranks.items() if r.sign.count == fewest]
    if len(behind) == len(ranks):
        behind = [i for i, r in ranks.items() if not _waits(r.sign.stack)]
    return behind or list(ranks)


def _waits(stack: str) -> bool:
    """Whether the innermost frame is TensorFlow running operations; waiting for a pipeline is nobody else's fault."""
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return bool(frames) and "/tensorflow/python/" in frames[0] and "dataset_ops" not in frames[0]


def alive_event(rank: int, sign: Sign, output: Sequence[str]) -> Event:
    """How a supervisor tells what it sees; the output only with a stall."""
    return {"kind": "alive", "rank": rank, "sign": asdict(sign), "output": list(output) if sign.stalled else []}
