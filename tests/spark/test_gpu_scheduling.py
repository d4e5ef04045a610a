"""Spark's GPU scheduling on a standalone cluster whose Workers have GPUs by their word only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.standalone import standalone_cluster


def discovery_script(folder: Path, resource: str, addresses: list[str]) -> Path:
    """What a Worker asks for its GPUs."""
    script = folder / f"discover_{resource}.sh"
    script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': resource, 'addresses': addresses})}'\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver of ``gpu_sessions.py`` found on two Workers of two cores."""
    folder = tmp_path_factory.mktemp("gpus")
    held = {"gpu": ["0", "1"], "pair": ["3", "2", "1", "0"], "half": ["2"], "mig": ["MIG-b2", "MIG-a1"]}
    scripts = {name: discovery_script(folder, name, addresses) for name, addresses in held.items()}
    options = [
        f"-Dspark.worker.resource.{name}.{key}={value}"
        for name, script in scripts.items()
        for key, value in (("amount", len(held[name])), ("discoveryScript", script))
    ]
    driver = Path(__file__).with_name("gpu_sessions.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        with standalone_cluster(folder, cores=2, SPARK_WORKER_OPTS=" ".join(options)) as master:
            command = [sys.executable, driver, master, scripts["gpu"], folder / "data"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def by_executor(reports: list[Any]) -> list[list[str]]:
    """The devices of the ranks on each executor, in their order."""
    assert [report[0] for report in reports] == list(range(len(reports)))
    devices: dict[str, list[str]] = defaultdict(list)
    for _rank, executor, visible, _growth in reports:
        devices[executor].append(visible)
    return [sorted(each) for each in devices.values()]


def test_each_task_sees_a_gpu_of_the_executors_own_list(found: dict[str, Any]) -> None:
    """An amount of 1 under CUDA_VISIBLE_DEVICES=7,4,6,5: four slots are four tasks, on each host those of 7 and 4."""
    assert by_executor(found["one each"]) == [["4", "7"], ["4", "7"]]
    assert all(growth is None for *_, growth in found["one each"])


def test_a_task_of_two_gpus_sees_both_in_their_order(found: dict[str, Any]) -> None:
    """An amount of 2: eight slots are four tasks, in tfdist.fit too; no GPU is given twice; indexes come in order."""
    pairs = [report[2].split(",") for report in found["two each"]]
    assert sorted(device for pair in pairs for device in pair) == sorted("76547654")
    order = "7465"  # of the addresses 0 to 3
    assert all(order.index(first) < order.index(second) for first, second in pairs)
    assert [len(devices) for devices in found["fit"]] == [2, 2]


def test_an_odd_gpu_goes_to_the_first_rank(found: dict[str, Any]) -> None:
    """Three slots of two a task are shares of 2 and 1 for a strategy of the user's, and refused for TensorFlow's."""
    assert [len(report[2].split(",")) for report in found["uneven"]] == [2, 1]
    assert "expected as many GPUs for each worker, got 3 over 2 Spark tasks" in found["uneven in a strategy"]
    assert "use 2 or 4 slots" in found["uneven in a strategy"]


def test_tasks_that_share_a_gpu_take_its_memory_step_by_step(found: dict[str, Any]) -> None:
    """An amount of 0.5: two tasks see one GPU, whose memory grows without a word."""
    assert by_executor(found["shared"]) == [["6", "6"], ["6", "6"]]
    assert {growth for *_, growth in found["shared"]} == {"true"}


def test_slices_are_named_by_their_uuids(found: dict[str, Any]) -> None:
    """UUIDs of MIG slices reach the processes as they are, whatever the executor's own list is."""
    assert by_executor(found["slices"]) == [["MIG-a1", "MIG-b2"], ["MIG-a1", "MIG-b2"]]


def test_a_training_on_the_cpu_sees_no_gpu(found: dict[str, Any]) -> None:
    """On a cluster with GPUs use_gpu=False hides them all."""
    assert [report[2] for report in found["on the CPU"]] == ["", ""]


def test_local_mode_takes_the_drivers_gpus(found: dict[str, Any]) -> None:
    """One process sees the GPUs that Spark gave the driver, and more slots than those are refused."""
    assert [report[2] for report in found["local"]] == ["0,1"]
    assert "expected 3 GPUs on this host, found 2" in found["too many local"]
