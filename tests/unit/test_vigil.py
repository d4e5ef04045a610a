"""Who came, who goes on, and whose fault it is: the rules over what supervisors report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import ConfigError, LaunchError, StallError
from tfdist.launch import pulse
from tfdist.launch.failures import worker_error
from tfdist.launch.pulse import At, Sign
from tfdist.launch.vigil import Vigil, alive_event

IN_COLLECTIVE = 'Stack:\n  File "/lib/tensorflow/python/eager/execute.py", line 53 in quick_execute'
IN_PIPELINE = 'Stack:\n  File "/lib/tensorflow/python/ops/gen_dataset_ops.py", line 3 in iterator_get_next'
STILL = Sign(count=9, step=4, at=At.STEP, still_s=61.0, limit_s=60.0, stack=IN_COLLECTIVE)


def test_the_main_thread_is_shown_first_and_the_others_in_short() -> None:
    """Of a dump of all threads the main one comes whole, without our own machinery, and of each other the top."""
    dump = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in wait\n  File "a.py", line 2 in b\n'
        '  File "a.py", line 3 in c\n  File "a.py", line 4 in d\n\n'
        'Current thread 0x2 (most recent call first):\n  File "m.py", line 5 in step\n'
        f'  File "{Path(pulse.__file__).with_name("child.py")}", line 6 in run\n'
    )
    assert pulse.shown_stack(dump).splitlines() == [
        "Current thread 0x2 (most recent call first):",
        '  File "m.py", line 5 in step',
        "",
        "Other threads:",
        '  File "a.py", line 1 in wait',
        '  File "a.py", line 2 in b',
        '  File "a.py", line 3 in c',
    ]


def gang(*signs: Sign, at: float = 100.0) -> Vigil:
    vigil = Vigil(len(signs), 60.0, 120.0)
    for rank, sign in enumerate(signs):
        vigil.note({"kind": "joined", "rank": rank, "host": f"h{rank}"}, 0.0)
        vigil.note(alive_event(rank, sign, ["a word"]), at)
    return vigil


def change(**values: Any) -> Sign:
    return dataclasses.replace(STILL, **values)


@pytest.mark.parametrize(
    ("guilty", "text"),
    [
        (change(count=8), "rank 1 on h1: no step for 61 s, last step 4"),
        (change(stack=IN_PIPELINE), "rank 1 on h1: no step for 61 s, last step 4"),
        (
            change(stopped=True, stack=""),
            "rank 1 on h1: no step for 61 s: its process is suspended (SIGSTOP), last step 4",
        ),
        (change(count=8, step=0), "rank 1 on h1: no step for 61 s, before the first step"),
        (change(count=0, at=At.UNMARKED, stack="x"), "rank 1 on h1: no sign of progress for 61 s"),
    ],
    ids=["behind", "in its pipeline", "suspended", "first step", "without marks"],
)
def test_the_rank_that_the_others_wait_for_is_named(guilty: Sign, text: str) -> None:
    """Of a gang that stands still the rank that is behind, suspended, or not in a collective is the cause."""
    failure = gang(STILL, guilty, STILL).stall(100.0)
    assert failure is not None
    error = worker_error(failure)
    assert isinstance(error, StallError)
    assert (error.rank, error.host) == (1, "h1")
    assert str(error).splitlines()[0] == text
    assert error.last_output == ("a word",)


def test_a_gang_of_which_one_goes_on_has_not_stalled() -> None:
    """A worker that waits for a peer at work is still and no error; nor is one that waits after its end."""
    assert gang(STILL, change(still_s=1.0)).stall(100.0) is None
    assert gang(Sign(at=At.DONE), change(still_s=1.0)).stall(100.0) is None
    found = gang(Sign(at=At.DONE), STILL).stall(100.0)
    assert found is not None
    assert found.rank == 1


def test_a_rank_that_no_longer_answers_is_the_cause() -> None:
    """When a supervisor is silent and the others stand still, the silent rank is named with its last step."""
    vigil = gang(STILL, change(still_s=0.0))
    assert vigil.stall(110.0) is None
    vigil.note(alive_event(0, change(still_s=100.0), ()), 165.0)
    found = vigil.stall(165.0)
    assert found is not None
    assert "rank 1 on h1: no longer answers, for 65 s" in found.message
    assert found.message.endswith("last step 4")


def test_a_worker_that_imports_tensorflow_for_longer_than_the_limit_is_waited_for() -> None:
    """Until its training process is there a worker has the startup timeout; one that never starts is named then."""
    vigil = Vigil(2, 5.0, 120.0)
    for rank in range(2):
        vigil.note({"kind": "joined", "rank": rank, "host": f"h{rank}"}, 0.0)
    assert vigil.stall(60.0) is None
    vigil.note(alive_event(0, change(limit_s=5.0), ()), 119.0)
    assert vigil.stall(119.0) is None
    found = vigil.stall(120.0)
    assert found is not None
    assert found.message.startswith("rank 1 on h1: no longer answers, for 120 s")


def test_survivors_of_a_suspended_or_silent_rank_are_not_blamed() -> None:
    """After a broken collective the rank that is suspended or silent is the cause, if there is one."""
    assert gang(STILL, STILL).blame(101.0) is None
    found = gang(change(still_s=1.0), change(still_s=7.0, stopped=True)).blame(101.0)
    assert found is not None
    assert found.rank == 1
    vigil = gang(STILL, STILL)
    vigil.note(alive_event(0, STILL, ()), 107.0)
    silent = vigil.blame(107.0)
    assert silent is not None
    assert silent.rank == 1


def test_a_strategy_that_waits_for_a_worker_tells_who_is_missing() -> None:
    """Workers that wait in the strategy for one that never comes: the error counts who came."""
    waits, late = change(count=1, step=0, at=At.MEETING), change(count=0, step=0, at=At.UNMARKED, stack="x")
    found = gang(waits, late, waits).stall(100.0)
    assert found is not None
    assert found.message.endswith("2 of 3 workers came to the strategy, where all meet; missing: rank 1 of h1")


def test_a_rendezvous_without_all_ends_with_a_list_of_who_is_missing() -> None:
    """Counted from the first arrival; without an arrival, or after the handshake, nobody is missing."""
    vigil = Vigil(3, None, 60.0)
    vigil.check_arrivals(1000.0)
    for rank in (0, 2):
        vigil.note({"kind": "arrived", "rank": rank, "hosts": ["a", "b", "c"]}, 1000.0 + rank)
    vigil.check_arrivals(1059.0)
    with pytest.raises(LaunchError, match=r"2 of 3 workers came in 60 s .*; missing: rank 1 of b\. "):
        vigil.check_arrivals(1060.0)
    vigil.note({"kind": "joined", "rank": 0, "host": "a"}, 1059.5)
    vigil.check_arrivals(1060.0)


def test_a_stall_timeout_must_be_positive() -> None:
    """Zero seconds are refused; None turns the search for stalls off."""
    from tfdist import ComputeConfig

    with pytest.raises(ConfigError, match=r"compute\.stall_timeout_s: expected seconds above 0 or None, got 0"):
        ComputeConfig(stall_timeout_s=0)
    assert ComputeConfig(stall_timeout_s=None).stall_timeout_s is None
