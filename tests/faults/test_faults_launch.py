"""Faults in the middle of a training on two Spark workers: real processes, killed for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Those that `./run faults` shows besides differ little from these.
EXPECTED = {
    "raise": ("LookupError", "rank 1 on 127.0.0.1: LookupError: no such column 'x'"),
    "kill -9 of a training process": ("WorkerError", "SIGKILL; the kernel does this when memory runs out"),
    "segmentation fault": ("WorkerError", "rank 1 on 127.0.0.1: SIGSEGV: the process was ended by SIGSEGV"),
    "sleep": ("StallError", "rank 1 on 127.0.0.1: no step for "),
    "SIGSTOP of a training process": ("StallError", "its process is suspended (SIGSTOP), last step 12"),
    "kill -9 of a Spark Python worker": ("WorkerError", "the Spark Python worker of its task ended"),
    "kill -9 of an executor's JVM": ("WorkerError", "that is SIGKILL. Raise spark.executor.memoryOverhead"),
}
RECOVERED = ("kill -9 of a training process", "kill -9 of a Spark Python worker")
UNSEEN = ("a port is taken", "two runs at once")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each fault led to, by name, in one session in a process of its own; and what was left after its end."""
    file = tmp_path_factory.mktemp("faults") / "outcomes.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    command = [sys.executable, "benchmarks/faults.py", *UNSEEN, *EXPECTED, "--recover", *RECOVERED, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    content = json.loads(file.read_text())
    return {"left": content["left"], **{outcome["name"]: outcome for outcome in content["outcomes"]}}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_ends_the_run_with_rank_host_and_cause(found: dict[str, Any], name: str) -> None:
    """Whatever ends or stops rank 1, the driver's error names it, its host and the cause, and has a fitting type."""
    outcome, (error_type, text) = found[name], EXPECTED[name]
    assert outcome["error_type"] == error_type, outcome
    assert text in outcome["message"]
    assert (outcome["rank"], outcome["host"]) == (1, "127.0.0.1"), outcome
    if error_type == "StallError":
        assert "last step 12" in outcome["message"].splitlines()[0]


@pytest.mark.parametrize("name", RECOVERED)
def test_a_training_that_is_launched_again_ends_exactly_as_undisturbed(found: dict[str, Any], name: str) -> None:
    """A process or Python worker that is killed costs a restart, and no digit of the weights."""
    assert found[name]["recovered_s"] is not None
    assert found[name]["exact"] is True


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_no_fault_of_the_user_is_not_seen(found: dict[str, Any], name: str) -> None:
    """A port that somebody else takes first, and two runs at the same time, end well."""
    assert found[name]["error_type"] == "", found[name]["message"]


def test_after_each_fault_the_session_is_as_before(found: dict[str, Any]) -> None:
    """No training process is left, a pandas UDF sees nothing of ours, and Spark's Python daemons live on."""
    for name in (*EXPECTED, *UNSEEN):
        assert found[name]["left"] == [], name
        assert found[name]["seen"] == [], name
        assert bool(found[name]["daemons_lost"]) == ("JVM" in name), name
    assert found["left"] == []


def test_what_a_stalled_rank_did_is_shown(found: dict[str, Any]) -> None:
    """The error of a rank that sleeps shows the line of the user's code where it does."""
    assert "in on_train_batch_end" in found["sleep"]["message"]
