"""The rules that compare a training with the Spark configuration, each with one that passes and one that does not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tfdist.launch.preflight import (
    CLEAR_TEXT,
    DISCOVERY_SCRIPT,
    SparkFacts,
    most_tasks,
    not_enough_now,
    notes,
    problems,
    tasks_for,
)

CLUSTER = "local-cluster[2,2,1024]"
GPUS = {"spark.task.resource.gpu.amount": "1", "spark.executor.resource.gpu.amount": "1"}


@pytest.mark.parametrize(
    ("master", "good", "bad", "named"),
    [
        (CLUSTER, {}, {"spark.dynamicAllocation.enabled": "true"}, "spark.dynamicAllocation.enabled"),
        ("local[4]", {"spark.dynamicAllocation.enabled": "true"}, {"spark.task.cpus": "5"}, "spark.task.cpus"),
        (CLUSTER, {"spark.task.cpus": "1"}, {"spark.task.cpus": "3"}, "spark.task.cpus"),
        (
            "yarn",
            {"spark.executor.cores": "4", "spark.executor.instances": "2", "spark.task.cpus": "2"},
            {"spark.executor.cores": "4", "spark.executor.instances": "2", "spark.task.cpus": "8"},
            "spark.task.cpus",
        ),
        (
            CLUSTER,
            {"spark.driver.maxResultSize": "8m"},
            {"spark.driver.maxResultSize": "1m"},
            "spark.driver.maxResultSize",
        ),
        (
            CLUSTER,
            {"spark.driver.maxResultSize": "0"},
            {"spark.driver.maxResultSize": "4096"},
            "spark.driver.maxResultSize",
        ),
        (CLUSTER, {"spark.ssl.enabled": "false"}, {"spark.ssl.enabled": "true"}, "spark.ssl.enabled"),
        (CLUSTER, {}, {"spark.network.crypto.enabled": "True"}, "spark.network.crypto.enabled"),
        (CLUSTER, {}, {"spark.authenticate": "true"}, "spark.authenticate"),
        (CLUSTER, {"spark.executor.resource.gpu.amount": "1"}, GPUS, "compute.slots"),
        (
            "spark://host:7077",
            {"spark.executor.cores": "4", "spark.task.cpus": "4"},
            {"spark.executor.cores": "4", "spark.task.cpus": "5"},
            "spark.task.cpus",
        ),
    ],
)
def test_each_rule_passes_what_is_right_and_names_what_is_not(
    master: str, good: dict[str, str], bad: dict[str, str], named: str
) -> None:
    """A configuration for four tasks has no problem; a wrong one has one only, which begins with its setting."""
    assert problems(SparkFacts(master, good), 4) == []
    (problem,) = problems(SparkFacts(master, bad), 4)
    assert problem.startswith(f"{named}: expected " if named.startswith("spark") else f"{named}: ")


def test_too_few_slots_come_with_the_arithmetic() -> None:
    """The text has executors, cores, spark.task.cpus and what bounds the tasks besides, and how many slots would do."""
    (problem,) = problems(SparkFacts("local-cluster[1,1,1024]", {}), 4)
    assert problem.startswith("compute.slots: 4 tasks must run at the same time")
    assert "(1 executors x 1 cores / spark.task.cpus=1)" in problem
    assert "use at most 1 slots" in problem
    (problem,) = problems(SparkFacts(CLUSTER, GPUS), 4)
    assert "(2 executors x 2 cores / spark.task.cpus=1, spark.task.resource.gpu=1); use at most 2 slots" in problem


def test_an_elastic_training_needs_its_least_slots_only() -> None:
    """With ``min_slots`` fewer tasks than slots are no problem; fewer than that are, by that setting's name."""
    facts = SparkFacts("local-cluster[2,1,1024]", {}, concurrent_tasks=1)
    assert problems(facts, 4, 2) == []
    (problem,) = problems(facts, 4, 3)
    assert problem.startswith("compute.min_slots: 3 tasks must run at the same time")
    assert not_enough_now(facts, 4, 9.0, 2).startswith("compute.min_slots: 2 tasks must run at the same time")
    assert not_enough_now(facts, 4, 9.0).startswith("compute.slots: 4 tasks must run at the same time")


@pytest.mark.parametrize(("held", "amount", "most"), [("2", "1", 4), ("2", "0.5", 8), ("4", "2", 4), ("1", "2", 0)])
def test_gpus_bound_the_tasks_of_an_executor(held: str, amount: str, most: int) -> None:
    """An executor runs as many tasks as its GPUs are enough for, a fraction being a share of one GPU."""
    conf = {"spark.task.resource.gpu.amount": amount, "spark.executor.resource.gpu.amount": held}
    assert most_tasks(SparkFacts("local-cluster[2,16,1024]", conf)) == most


def test_clear_text_is_accepted_by_the_key_of_the_old_distributor() -> None:
    """Each setting of Spark's encryption is a problem, unless ``tensorflow.spark.distributor.ignoreSsl`` is true."""
    conf = {"spark.ssl.enabled": "true", "spark.network.crypto.enabled": "true", "spark.authenticate": "true"}
    found = problems(SparkFacts(CLUSTER, conf), 4)
    assert [problem.partition(":")[0] for problem in found] == list(conf)
    assert all("tensorflow.spark.distributor.ignoreSsl=true" in problem for problem in found)
    assert problems(SparkFacts(CLUSTER, {**conf, CLEAR_TEXT: "true"}), 4) == []


def test_all_problems_come_together() -> None:
    """Each wrong setting has its own line, in one go."""
    conf = {
        "spark.ssl.enabled": "true",
        "spark.driver.maxResultSize": "64k",
        "spark.dynamicAllocation.enabled": "true",
    }
    found = [problem.partition(":")[0] for problem in problems(SparkFacts(CLUSTER, conf), 5)]
    assert found == [*conf, "compute.slots"]


def test_speculation_is_noted_and_refuses_nothing() -> None:
    """Spark starts no second copy of a barrier task: speculation is told, and keeps nothing from running."""
    facts = SparkFacts(CLUSTER, {"spark.speculation": "true"})
    assert problems(facts, 4) == []
    assert "spark.speculation" in notes(facts)[0]
    assert notes(SparkFacts(CLUSTER, {})) == []


def test_missing_gpu_scheduling_gives_the_lines_to_set() -> None:
    """The three settings are given with a discovery script that exists and can be run."""
    _, (problem,) = tasks_for(2, {}, use_gpu=True, gpu_resource_name="gpu")
    assert "spark.task.resource.gpu.amount=1" in problem
    assert "spark.executor.resource.gpu.amount=" in problem
    assert f"spark.executor.resource.gpu.discoveryScript={DISCOVERY_SCRIPT}" in problem
    assert os.access(DISCOVERY_SCRIPT, os.X_OK)
    assert tasks_for(2, GPUS, use_gpu=True, gpu_resource_name="gpu") == (2, [])


@pytest.mark.parametrize(
    ("listed", "addresses"),
    [
        ("GPU 0: NVIDIA A (UUID: GPU-aa)\nGPU 1: NVIDIA A (UUID: GPU-bb)\n", ["0", "1"]),
        (
            """GPU 0: NVIDIA A (UUID: GPU-aa)
  MIG 1g.10gb     Device  0: (UUID: MIG-11)
  MIG 1g.10gb     Device  1: (UUID: MIG-22)
GPU 1: NVIDIA A (UUID: GPU-bb)
""",
            ["MIG-11", "MIG-22", "GPU-bb"],
        ),
    ],
)
def test_the_discovery_script_lists_gpus_and_slices(tmp_path: Path, listed: str, addresses: list[str]) -> None:
    """The script prints Spark's JSON: indexes of whole GPUs, and UUIDs as soon as one is cut in slices."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run([DISCOVERY_SCRIPT], env=environ, capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == {"name": "gpu", "addresses": addresses}
