"""The live display of a training on a terminal: two lines at the bottom, and above them what happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from tfdist.launch.protocol import Event

# A train function may send events of these names with anything in them; those are not shown.
_NEEDED = {
    "start": {"epoch", "epochs", "step", "steps", "rows"},
    "step": {"epoch", "epochs", "step", "steps", "logs", "rows_per_s"},
    "epoch": {"epoch", "epochs", "logs", "rows_per_s", "seconds"},
    "line": {"text"},
    "restart": {"attempt", "of", "epoch", "step", "cause", "workers", "workers_before", "slots"},
    "world": {"workers", "slots"},
    "checkpoint-failed": {"step", "error"},
    "waiting": {"ready", "wanted"},
    "joined": {"host"},
}
_WAITING = "waiting for slots"
_WIDEST_BAR, _NARROWEST_BAR = 40, 6
_STYLES = {"line": "dim", "joined": "dim", **dict.fromkeys(("restart", "world", "checkpoint-failed"), "yellow")}


def is_ours(event: Event) -> bool:
    """Whether an event is of a kind that is shown, and has what that takes."""
    return event["kind"] in _NEEDED and event.keys() >= _NEEDED[event["kind"]]


def is_place(event: Event) -> bool:
    """Whether an event says where ``tfdist.fit`` is."""
    return event["kind"] == "step" and is_ours(event)


def numbers(logs: Mapping[str, float]) -> str:
    """Metrics in a line; small ones keep their digits."""
    return "  ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or not abs(value) < 1e-3 else f"{value:.3e}"


def clock_text(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LiveDisplay:
    """Shows where a training is, and its other events as lines above; the display itself goes when the block ends.

    Args:
        console: a terminal.
        line: the line of an event, or None.
        clock: seconds.
    """

    live = True

    def __init__(
        self, console: Console, line: Callable[[Event], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._line, self._clock = console, line, clock
        self._begun = clock()
        self._doing = "starting the workers"
        self._place: dict[str, Any] | None = None
        self._rows_per_step = 0.0
        self._epoch_s: float | None = None
        self._fewer = ""
        self._live = Live(
            self,
            console=console,
            transient=True,
            refresh_per_second=4,
            # What others write to the same terminal goes above the display; a file that stderr was sent to keeps it.
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> LiveDisplay:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._note(event)
        text = self._line(event)
        if text is not None:
            # Soft: a path that is broken into lines cannot be copied.
            self._console.print(Text(text, _STYLES.get(event["kind"], "")), soft_wrap=True, highlight=False)

    def _note(self, event: Event) -> None:
        if not is_ours(event):
            return
        if is_place(event):
            self._place, self._doing = event, "validating" if event.get("validating") else ""
            return
        match event["kind"]:
            case "start":
                steps = event["steps"]
                self._doing = "preparing the first step"
                self._place = {
                    "epoch": event["epoch"],
                    "epochs": event["epochs"],
                    "step": max(0, event["step"] - event["epoch"] * steps),
                    "steps": steps,
                    "logs": {},
                    "rows_per_s": None,
                }
                self._rows_per_step = event["rows"] / steps
            case "epoch" if self._place is not None:
                self._epoch_s = event["seconds"]
                over = event["epoch"] + 1 == event["epochs"]
                self._doing = "saving the model" if over else ""
                place = {"epoch": event["epoch"], "step": self._place["steps"]}
                if not over:
                    place = {"epoch": event["epoch"] + 1, "step": 0}
                self._place = {**self._place, **place, "logs": event["logs"], "rows_per_s": event["rows_per_s"]}
            case "restart":
                self._place, self._doing = None, "starting the workers again"
                self._note_workers(event)
            case "world":
                self._note_workers(event)
            case "joined" if self._doing == _WAITING:
                self._doing = "starting the workers"
            case "waiting":
                self._place, self._doing = None, _WAITING

    def _note_workers(self, event: Event) -> None:
        few = event["workers"] < event["slots"]
        self._fewer = f"{event['workers']} of {event['slots']} workers" if few else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        elapsed = f"{clock_text(self._clock() - self._begun)} elapsed"
        place = self._place
        if place is None:
            yield _cut(Text.assemble(self._doing, "  ", (elapsed, "dim")), options.max_width)
            return
        head = f"epoch {place['epoch'] + 1}/{place['epochs']}"
        parts = [f"step {place['step']:,}/{place['steps']:,}"]
        if self._doing:
            parts.append(self._doing)
        elif place["rows_per_s"] is not None:
            parts.append(f"{place['rows_per_s']:,.0f} rows/s")
        if self._fewer:
            parts.append(self._fewer)
        left_s = self._left_s(place)
        times = elapsed if left_s is None else f"{elapsed}, {clock_text(left_s)} left"
        rest = "  ".join(parts)
        room = options.max_width - len(head) - len(rest) - len(times) - 6
        line = Text.assemble((head, "bold"), "  ")
        if room >= _NARROWEST_BAR:
            line.append_text(_bar(place["step"] / place["steps"], min(room, _WIDEST_BAR), console, options)).append(
                "  "
            )
        yield _cut(line.append(f"{rest}  ").append(times, "dim"), options.max_width)
        yield _cut(Text(numbers(place["logs"]), "cyan"), options.max_width)

    def _left_s(self, place: Mapping[str, Any]) -> float | None:
        """Seconds to the end of the last epoch, by this epoch's speed and the length of the one before."""
        if place["rows_per_s"] is None:
            return None
        epochs_after = place["epochs"] - place["epoch"] - 1
        step_s: float = self._rows_per_step / place["rows_per_s"]
        whole_s: float = self._epoch_s or step_s * place["steps"]
        here_s: float = whole_s if place["step"] == 0 else (place["steps"] - place["step"]) * step_s
        return float(here_s + epochs_after * whole_s)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _bar(share: float, width: int, console: Console, options: ConsoleOptions) -> Text:
    sign = "-" if options.ascii_only else "━"
    done = round(min(share, 1.0) * width)
    rest = " " if console.no_color or console.color_system is None else sign
    return Text.assemble((sign * done, "bar.complete"), (rest * (width - done), "bar.back"))
