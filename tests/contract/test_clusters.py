"""The contract of the launchers on other clusters, each in a Python of its own: a process has one kind of session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCHERS = "tests/contract/test_launchers.py"
# What differs between classic clusters is how tasks start, meet and end; processes are the same on all.
DIFFERS = "every_rank or again_and_again or in_order_per_rank or segfault or event_callback or cannot_travel"
# Ways to die and to begin that are the same to a session as those that stay.
ALIKE = "kill or abort or exit or cold_start"


@pytest.mark.timeout(1200)  # of all the tests inside, on a busy machine
@pytest.mark.parametrize(
    ("cluster", "chosen", "files"),
    [
        ("local[2]", f"not [local and ({DIFFERS})", [LAUNCHERS]),
        ("standalone", f"not [local and ({DIFFERS})", [LAUNCHERS]),
        ("connect", f"not [local and not ({ALIKE})", [LAUNCHERS, "tests/spark/connect_cases.py"]),
    ],
    ids=["local", "standalone", "connect"],
)
def test_the_contract_holds_on_every_cluster(cluster: str, chosen: str, files: list[str]) -> None:
    """One process, a Master with two Workers, and a Spark Connect server start, watch and end trainings alike."""
    environ = {**os.environ, "TFDIST_TEST_CLUSTER": cluster}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]
