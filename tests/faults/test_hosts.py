"""Workers on hosts of their own, one of which is cut off: network namespaces, real Spark, real cables of veth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a benchmark that is started by its path

from hosts import missing_rights  # noqa: E402

WHY = missing_rights()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"network namespaces cannot be made here: {WHY}")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the benchmark found over IPv4; ``./run bench hosts`` does the same over IPv6."""
    file = tmp_path_factory.mktemp("hosts") / "found.json"
    command = [sys.executable, "benchmarks/hosts.py", "--family", "4", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return dict(json.loads(file.read_text())["4"])


def test_two_hosts_train_to_the_weights_of_one_process(found: dict[str, Any]) -> None:
    """Workers on two hosts, with the driver on a third, end with the weights of a process alone."""
    assert sorted(found["hosts"]) == ["10.77.0.2", "10.77.0.3"]
    assert found["difference to one process"] < 1e-6


def test_a_host_that_is_cut_off_is_named_and_nothing_goes_on(found: dict[str, Any]) -> None:
    """The error names the host that no longer answers, and while it is cut off its training process ends too."""
    assert found["pulled: error"].startswith("StallError: rank ")
    assert "on 10.77.0.3: no longer answers" in found["pulled: error"]
    assert found["pulled: host"] == "10.77.0.3"
    assert found["pulled: processes left"] == 0


def test_a_training_goes_on_when_the_host_is_back(found: dict[str, Any]) -> None:
    """With max_restarts=1 the cable's return is enough: the weights are exactly those of an undisturbed training."""
    assert "10.77.0.3" in found["back: what was noticed"]
    assert found["back: restarts"] == 1
    assert found["back: difference to the undisturbed training"] == 0


def test_hosts_that_share_a_folder_of_sockets_have_warm_parents_of_their_own() -> None:
    """Training processes are forked on their supervisor's host, though another has the same folders and settings."""
    ask = [sys.executable, "-c", "from tfdist.launch.warm import identity; print(identity({}, 'application'))"]
    here, again, apart = (
        subprocess.run([*inside, *ask], capture_output=True, text=True, check=True).stdout
        for inside in ((), (), ("unshare", "--net"))
    )
    assert here == again != apart
