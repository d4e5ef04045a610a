"""The rules over what executors say of themselves, each with what passes and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tfdist.launch.hosts import HostFacts, Look, device_problems, notes, problems

VERSIONS = {"tfdist": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "pyarrow": "25.0.1"}
FOLDER = {"output_dir": "/shared/output"}


def host(rank: int, **changes: Any) -> HostFacts:
    facts = HostFacts(
        rank,
        f"node-{rank}",
        f"10.0.0.{rank + 2}",
        "spark",
        "/env/bin/python",
        "3.11.7",
        VERSIONS,
        folders={"output_dir": Look(seen=True)},
    )
    return replace(facts, **changes)


DRIVER = host(-1, host="edge")


def of(*hosts: HostFacts, driver: HostFacts = DRIVER) -> list[str]:
    return problems(driver, hosts, FOLDER)


def test_equal_hosts_have_no_problem() -> None:
    """Same packages and a shared folder are fine, and so is another interpreter with the same packages."""
    assert of(host(0), host(1)) == []
    assert of(host(0, interpreter="/other/python"), host(1), driver=replace(DRIVER, python="3.11.9")) == []


def test_another_interpreter_is_named_with_the_setting() -> None:
    """Packages that an executor lacks come as one problem: both interpreters, the hosts, and what to set."""
    bare = dict.fromkeys(VERSIONS)
    other = {"interpreter": "/usr/bin/python3", "versions": bare}
    (problem,) = of(host(0, **other), host(1, **other))
    assert problem.startswith("PYSPARK_PYTHON: ")
    for text in ("/env/bin/python (", "node-0, node-1 runs /usr/bin/python3 (", "no keras", "spark.pyspark.python"):
        assert text in problem


@pytest.mark.parametrize("package", ["tfdist", "tensorflow", "keras", "numpy"])
def test_a_version_that_differs_is_named_with_its_host(package: str) -> None:
    """One host with another version of what travels between processes is a problem of that package."""
    (problem,) = of(host(0), host(1, versions={**VERSIONS, package: "1.0"}))
    assert problem.startswith(f"{package}: expected {VERSIONS[package]} on all executors")
    assert "node-1 (/env/bin/python)" in problem
    assert "node-0" not in problem


def test_versions_that_do_not_matter_are_no_problem() -> None:
    """Another pyarrow reads the same files, and a driver needs no TensorFlow; but executors must agree on theirs."""
    assert of(host(0), host(1, versions={**VERSIONS, "pyarrow": "20.0.0"})) == []
    without = replace(DRIVER, versions={**VERSIONS, "tensorflow": None, "keras": None})
    assert of(host(0), host(1), driver=without) == []
    (problem,) = of(host(0), host(1, versions={**VERSIONS, "keras": "3.12.0"}), driver=without)
    assert problem.startswith("keras: expected 3.15.1 on all executors")


@pytest.mark.parametrize(
    ("driver", "first", "second", "expected"),
    [
        (Look(seen=False, write_error="Permission denied"), Look(seen=False), Look(seen=False), "on the driver (Perm"),
        (Look(seen=True), Look(seen=True), Look(seen=False), "where node-1 does not find what the driver (edge) wrote"),
        (Look(seen=True), Look(seen=True), Look(True, "Read-only file system"), "spark on node-1 (Read-only file"),
        (Look(seen=True), Look(seen=True), Look(seen=True, shared=False), "node-1 does not find what node-0 wrote"),
    ],
)
def test_a_folder_that_is_not_shared_is_one_problem(driver: Look, first: Look, second: Look, expected: str) -> None:
    """That the driver or a host cannot write, a host is blind, or hosts see different files: each is told in words."""
    hosts = [host(rank, folders={"output_dir": look}) for rank, look in enumerate((first, second))]
    (problem,) = of(*hosts, driver=replace(DRIVER, folders={"output_dir": driver}))
    assert problem.startswith("output_dir: expected a folder that ")
    assert "/shared/output" in problem
    assert expected in problem


def test_gpus_that_a_worker_would_not_find_are_problems() -> None:
    """An address beyond CUDA_VISIBLE_DEVICES, or none at all, is named with its host; UUIDs stand for themselves."""
    fine = host(0, devices={"gpu": ("1",)}, cuda_visible_devices="2,3")
    assert device_problems([fine, host(1, devices={"gpu": ("MIG-1",)}, cuda_visible_devices="0")], "gpu") == []
    beyond, nothing = device_problems([fine, replace(fine, host="b", devices={"gpu": ("2",)}), host(2)], "gpu")
    assert "on b: GPU address 2: expected an index into CUDA_VISIBLE_DEVICES=2,3" in beyond
    assert "gave none on node-2" in nothing


def test_what_does_no_harm_is_only_noted() -> None:
    """Proxies and a GPU that two tasks share are told, and are no problems."""
    shared = {"host": "a", "devices": {"gpu": ("0",)}, "proxies": ("https_proxy",)}
    hosts = [host(0, **shared), host(1, **shared)]
    assert of(*hosts) == []
    proxies, gpu = notes(hosts, "gpu")
    assert "https_proxy" in proxies
    assert "2 tasks share the GPU 0 on a" in gpu
    assert notes([host(0), host(1)], "gpu") == []
