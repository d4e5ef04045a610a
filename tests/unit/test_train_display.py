"""What a training shows: live on a terminal, as lines elsewhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tfdist.train.console import PlainLines, describe, readable, shown, workers_text
from tfdist.train.live import LiveDisplay, clock_text

START = {"kind": "start", "rank": 0, "epochs": 3, "rows": 1200, "steps": 120, "epoch": 0, "step": 0}
EPOCH = {
    "kind": "epoch",
    "rank": 0,
    "epoch": 0,
    "epochs": 3,
    "logs": {"loss": 0.5},
    "rows_per_s": 60.0,
    "seconds": 24.0,
}
RESTART = {
    "kind": "restart",
    "rank": 1,
    "attempt": 1,
    "of": 2,
    "epoch": 1,
    "step": 150,
    "cause": "rank 1 on b: SIGKILL",
    "workers": 3,
    "workers_before": 3,
    "slots": 3,
}


def step(number: int, epoch: int = 0, **values: Any) -> dict[str, Any]:
    logs = {"loss": 0.4321, "accuracy": 0.9}
    place = {"epoch": epoch, "epochs": 3, "step": number, "steps": 120, "logs": logs, "rows_per_s": 50.0}
    return {"kind": "step", "rank": 0, **place, "seconds": 1.0, **values}


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False, **options)


def picture(display: LiveDisplay, width: int = 100) -> list[str]:
    """The lines of a display as they stand now."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, _environ={})
    console.print(display)
    text = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_the_display_says_where_a_training_is() -> None:
    """Epoch, step, speed, metrics, elapsed and remaining time follow the events."""
    clock = Clock()
    display = LiveDisplay(terminal(), describe, clock)
    assert picture(display) == ["starting the workers  0:00 elapsed"]
    clock.now = 5.0
    display(START)
    assert re.match(r"epoch 1/3 +step 0/120  preparing the first step  0:05 elapsed$", picture(display)[0])
    clock.now = 20.0
    display(step(60))
    first, second = picture(display)
    # 60 + 120 + 120 steps of 10 rows at 50 rows/s are left.
    assert re.match(r"epoch 1/3  ━+ +step 60/120  50 rows/s  0:20 elapsed, 1:00 left$", first)
    assert first.count("━") == 20
    assert second == "loss 0.4321  accuracy 0.9000"
    display(step(120, validating=True))
    assert "step 120/120  validating" in picture(display)[0]
    display(EPOCH)
    # Two epochs as long as the first.
    assert re.match(r"epoch 2/3 +step 0/120  60 rows/s  0:20 elapsed, 0:48 left$", picture(display)[0])
    display(RESTART)
    assert picture(display) == ["starting the workers again  0:20 elapsed"]
    display({**START, "epoch": 1, "step": 150})
    assert picture(display)[0].startswith("epoch 2/3")
    assert "step 30/120" in picture(display)[0]
    display({**EPOCH, "epoch": 2})
    assert "epoch 3/3" in picture(display)[0]
    assert "step 120/120  saving the model" in picture(display)[0]


def test_an_elastic_training_says_with_how_many_workers_it_goes_on() -> None:
    """Waiting, fewer workers at the start and after a restart, and all of them again: as lines and on the display."""
    display = LiveDisplay(terminal(), describe, Clock())
    waiting = {"kind": "waiting", "rank": 0, "ready": 2, "wanted": 3}
    fewer = {**RESTART, "workers": 2}
    more = {**fewer, "workers_before": 2, "workers": 3}
    assert describe({"kind": "world", "rank": 0, "workers": 2, "slots": 3}) == "training on 2 of 3 workers"
    assert describe({**waiting, "cause": "rank 1 on b: SIGKILL"}) == (
        "waiting for the cluster: 2/3 slots, since rank 1 on b: SIGKILL"
    )
    assert describe(fewer) == "restart 1 of 2 from epoch 2, step 150, with 2 of 3 workers: rank 1 on b: SIGKILL"
    assert describe(more) == "restart 1 of 2 from epoch 2, step 150, with 3 of 3 workers: rank 1 on b: SIGKILL"
    assert describe(RESTART) == "restart 1 of 2 from epoch 2, step 150: rank 1 on b: SIGKILL"
    display(waiting)
    assert picture(display) == ["waiting for slots  0:00 elapsed"]
    display({"kind": "joined", "rank": 0, "host": "a"})
    assert picture(display) == ["starting the workers  0:00 elapsed"]
    for event, told in ((fewer, True), (more, False)):
        display(event)
        display(START)
        display(step(60))
        assert ("50 rows/s  2 of 3 workers  0:00 elapsed" in picture(display)[0]) is told
    assert workers_text((3, 3, 2, 3)) == "3, then 2, then 3 workers"


def test_a_narrow_terminal_gets_lines_that_fit() -> None:
    """On 40 columns nothing is wrapped: the bar goes first, then lines end in an ellipsis."""
    display = LiveDisplay(terminal(40), describe, Clock())
    display(START)
    display(step(60, logs={f"metric_{i}": 1.0 for i in range(20)}))
    lines = picture(display, 40)
    assert len(lines) == 2
    assert all(len(line) <= 40 and line.endswith("…") for line in lines)


def test_what_happens_is_shown_above_the_display_and_stays() -> None:
    """Lines of workers, epochs and restarts are whole lines; when the block ends the display is gone, they are not."""
    console = terminal(no_color=True)
    with shown(console) as display:
        assert display.live
        for event in (
            {"kind": "waiting", "rank": 0, "ready": 1, "wanted": 2},
            START,
            step(60),
            {"kind": "line", "rank": 0, "text": "half\r\x1b[1mwhole\x1b[0m " + "long " * 30},
            EPOCH,
            RESTART,
        ):
            display(event)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.replace("\r\n", "\n").splitlines()]
    kept = [
        "waiting for the cluster: 1/2 slots",
        "[0] whole " + ("long " * 30).rstrip(),
        "epoch 1/3  loss 0.5000  60 rows/s  24.0 s",
        "restart 1 of 2 from epoch 2, step 150: rank 1 on b: SIGKILL",
    ]
    assert [line for line in lines if line in kept] == kept
    assert written.rstrip().endswith("\x1b[2K")  # the last thing that is done is to erase the display


def test_without_a_terminal_there_are_lines_only() -> None:
    """A pipe and a notebook get one line an epoch and no control character."""
    for options in ({}, {"force_jupyter": True}):
        console = Console(file=io.StringIO(), width=100, **options)  # type: ignore[arg-type]
        with shown(console, indent="  ", workers=True) as display:
            assert not display.live
            display({"kind": "joined", "rank": 0, "host": "a"})
            display(START)
            display(step(60))
            display({"kind": "line", "rank": 0, "text": "1/2 \x1b[32m━━\x1b[0m\r2/2 ━━\b\b"})
            display(EPOCH)
        assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
            "  worker 0 on a",
            "  [0] 2/2 ━━",
            "  epoch 1/3  loss 0.5000  60 rows/s  24.0 s",
        ]


def test_a_long_epoch_says_its_step_every_half_minute() -> None:
    """Steps are told 30 s after the last line of the training at the earliest, and not in short epochs."""
    clock, console = Clock(), Console(file=io.StringIO(), width=40)
    display = PlainLines(console, describe, clock=clock)
    display(START)
    for second in range(1, 71):
        clock.now = float(second)
        display(step(second))
    display(EPOCH)
    clock.now = 95.0
    display(step(10, epoch=1))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "epoch 1/3  step 30/120  loss 0.4321  accuracy 0.9000  50 rows/s",
        "epoch 1/3  step 60/120  loss 0.4321  accuracy 0.9000  50 rows/s",
        "epoch 1/3  loss 0.5000  60 rows/s  24.0 s",
    ]


def test_events_of_the_users_own_are_not_shown() -> None:
    """A train function may send an event of any name with anything in it, which harms no display."""
    display = LiveDisplay(terminal(), describe, Clock())
    for kind in ("start", "step", "epoch", "restart", "line", "waiting", "progress"):
        display({"kind": kind, "rank": 0, "mine": 1})
    assert picture(display) == ["starting the workers  0:00 elapsed"]
    console = Console(file=io.StringIO())
    PlainLines(console, describe, clock=iter([0.0, 99.0]).__next__)({"kind": "step", "rank": 1})
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")])
def test_times_are_short(seconds: float, text: str) -> None:
    """Minutes and seconds, with hours where there are some."""
    assert clock_text(seconds) == text


def test_small_metrics_keep_their_digits_and_none_is_lost() -> None:
    """A learning rate of 1e-5 is not 0.0000, and what is no number is said as it is."""
    logs = {"lr": 1e-5, "loss": float("nan"), "zero": 0.0, "big": 12345.678}
    assert describe({**EPOCH, "logs": logs}) == (
        "epoch 1/3  lr 1.000e-05  loss nan  zero 0.0000  big 12345.6780  60 rows/s  24.0 s"
    )


def test_cursor_movements_and_titles_of_a_worker_are_left_out() -> None:
    """What would move the cursor of the driver's terminal, or set its title, does not come through."""
    assert readable("\x1b]0;title\x07a\x1b[2Kb\x1b[1;31mc\x1b[0m\x1b[3Ad\te\x07\r") == "abcd\te"
