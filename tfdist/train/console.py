"""What a training shows on the driver when the caller asks for nothing else."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol

from rich.console import Console

from tfdist.launch.protocol import Event
from tfdist.train.live import LiveDisplay, is_ours, is_place, numbers

STEP_EVERY_S = 30.0
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)|[\x00-\x08\x0b-\x1f\x7f]")


class Display(Protocol):
    """Shows the events of a training; ``live`` says whether the steps are seen as they go by."""

    @property
    def live(self) -> bool: ...

    def __call__(self, event: Event, /) -> None: ...


@contextmanager
def shown(console: Console | None = None, *, indent: str = "", workers: bool = False) -> Iterator[Display]:
    """Show the events of a training while the block runs: live on a terminal, elsewhere as plain lines.

    Args:
        console: where to; by default standard output.
        indent: before each line.
        workers: also say where each worker runs.
    """
    console = console or Console()

    def line(event: Event) -> str | None:
        if event["kind"] == "joined" and workers and is_ours(event):
            return f"{indent}worker {event['rank']} on {event['host']}"
        text = describe(event)
        return text if text is None else indent + text

    if console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter:
        with LiveDisplay(console, line) as display:
            yield display
    else:
        yield PlainLines(console, line, indent)


class PlainLines:
    """Events as lines, for logs, pipes and notebooks; within long epochs a line with the step now and then.

    Args:
        console: where to.
        line: the line of an event, or None.
        indent: before the line of a step.
        clock: seconds.
    """

    live = False

    def __init__(
        self,
        console: Console,
        line: Callable[[Event], str | None],
        indent: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._line, self._indent, self._clock = console, line, indent, clock
        self._said_at = clock()

    def __call__(self, event: Event) -> None:
        text = self._line(event)
        if text is None and is_place(event) and self._clock() - self._said_at >= STEP_EVERY_S:
            text = self._indent + describe_step(event)
        if event["kind"] in ("start", "epoch") or (text is not None and is_place(event)):
            self._said_at = self._clock()
        if text is not None:
            self._console.file.write(text + "\n")
            self._console.file.flush()


def describe(event: Event) -> str | None:
    """One line for an event, or None for one that is not shown."""
    if not is_ours(event):
        return None
    match event["kind"]:
        case "waiting":
            since = f", since {event['cause']}" if "cause" in event else ""
            return f"waiting for the cluster: {event['ready']}/{event['wanted']} slots{since}"
        case "world":
            return f"training on {event['workers']} of {event['slots']} workers"
        case "line":
            return f"[{event['rank']}] {readable(event['text'])}"
        case "epoch":
            head = f"epoch {event['epoch'] + 1}/{event['epochs']}"
            return f"{head}  {numbers(event['logs'])}  {event['rows_per_s']:,.0f} rows/s  {event['seconds']:.1f} s"
        case "restart":
            place = f"from epoch {event['epoch'] + 1}, step {event['step']}{_with_workers(event)}"
            return f"restart {event['attempt']} of {event['of']} {place}: {event['cause']}"
        case "checkpoint-failed":
            return f"warning: no checkpoint of step {event['step']}, the one before stays: {event['error']}"
    return None


def _with_workers(event: Event) -> str:
    """With how many workers a training goes on, where these are not all of them as before."""
    if {event["workers"], event["workers_before"]} == {event["slots"]}:
        return ""
    return f", with {event['workers']} of {event['slots']} workers"


def describe_step(event: Event) -> str:
    """One line for where a training is."""
    speed = "" if event["rows_per_s"] is None else f"  {event['rows_per_s']:,.0f} rows/s"
    where = "validating" if event.get("validating") else f"step {event['step']:,}/{event['steps']:,}"
    return f"epoch {event['epoch'] + 1}/{event['epochs']}  {where}  {numbers(event['logs'])}{speed}"


def readable(text: str) -> str:
    """What a line of a worker's output shows in the end, without control characters: bars write over themselves."""
    return _CONTROL.sub("", text.rstrip("\r").rpartition("\r")[2])


def print_event(event: Event) -> None:
    """Write the line of an event to standard output."""
    text = describe(event)
    if text is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def workers_text(world_sizes: Sequence[int]) -> str:
    """The number of workers of each launch in words: ``3, then 2 workers``."""
    return f"{', then '.join(str(size) for size, _ in groupby(world_sizes))} workers"


def print_outcome(result: Any, console: Console | None = None) -> None:
    """Say on a terminal what a training came to; ``result`` is a :class:`tfdist.FitResult`."""
    console = console or Console()
    last: Mapping[str, float] = {name: values[-1] for name, values in result.history.items() if values}
    epochs = max(map(len, result.history.values()), default=0)
    again = f", {result.restarts} restarts" if result.restarts else ""
    workers = workers_text(result.world_sizes)
    facts = {
        "trained": f"{epochs} epochs on {workers} in {result.seconds['total']:.1f} s{again}",
        "speed": f"{result.rows_per_s:,.0f} rows/s",
        "metrics": numbers(last),
        "model": str(result.model_path),
    }
    text = "\n".join(f"{name:<9}{value}" for name, value in facts.items())
    console.print(text, soft_wrap=True, markup=False, highlight=False)
