"""The rules of the project that a reader relies on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

import tfdist

ROOT = Path(__file__).parents[2]
TESTS = sorted(ROOT.glob("tests/**/test_*.py"))
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def normal(name: str) -> str:
    """A package's name as PyPI compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_says_in_a_sentence_what_holds(path: Path) -> None:
    """Each test's docstring starts with one line that ends in a full stop."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    tests = {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}
    assert tests, "a test file without a test"
    assert [name for name, doc in tests.items() if not doc.partition("\n\n")[0].rstrip().endswith(".")] == []


def test_every_line_of_the_data_contract_names_tests_that_exist() -> None:
    """Each line of the tables of docs/data-contract.md ends with names of tests, and each test that is named exists."""
    page = (ROOT / "docs" / "data-contract.md").read_text()
    known = {name for path in TESTS for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    rows = re.findall(r"^\|(?!---).*\|$", page, re.M)
    assert [row for row in rows if "`test_" not in row and "shown by" not in row] == []
    assert sorted(set(re.findall(r"`(test_\w+)`", page)) - known) == []


def test_the_package_is_imported_without_tensorflow_spark_or_mlflow() -> None:
    """``import tfdist`` loads none of the large libraries, so that a driver can ask for its version in no time."""
    code = "import sys, tfdist; print(*{'tensorflow', 'keras', 'pyspark', 'mlflow', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_is_there() -> None:
    """Each name of ``tfdist.__all__`` can be had, and what is not there is an AttributeError that names it."""
    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None
    assert set(tfdist.__all__) <= set(dir(tfdist))
    with pytest.raises(AttributeError, match="'tfdist' has no attribute 'train_everything'"):
        tfdist.train_everything  # noqa: B018


def test_every_package_is_distributed() -> None:
    """The list of packages in pyproject.toml names every folder with an ``__init__.py``."""
    setup = PYPROJECT["tool"]["setuptools"]
    folders = {name: ROOT / folder for name, folder in setup["package-dir"].items()}
    found = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in folders.items()
        for file in folder.rglob("__init__.py")
    }
    assert found == set(setup["packages"])


def test_one_place_writes_the_environment() -> None:
    """Only ``tfdist.environ`` assigns to os.environ, in the library and in the jobs layer."""
    writes = re.compile(r"os\.environ\[[^\]]*\]\s*=[^=]|os\.(putenv|unsetenv)|os\.environ\.(update|setdefault|pop)")
    sources = [*ROOT.glob("tfdist/**/*.py"), *ROOT.glob("jobs/**/*.py")]
    found = [str(path.relative_to(ROOT)) for path in sources if writes.search(path.read_text())]
    assert found == ["tfdist/environ.py"]


def test_the_pinned_list_is_complete() -> None:
    """What the project and each pinned package require is pinned too, at releases that fit them."""
    installed = {normal(d.metadata["Name"]): d for d in metadata.distributions()}
    lines = [*PROJECT["dependencies"], *(line for group in PROJECT["optional-dependencies"].values() for line in group)]
    for name in PINNED.keys() & installed.keys():
        lines += installed[name].requires or []
    wanted = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate({"extra": ""})]
    unmet = [str(r) for r in wanted if not r.specifier.contains(PINNED.get(normal(r.name), "0"), prereleases=True)]
    assert unmet == ["tensorflow>=2.20"]  # met by tensorflow-cpu, the same without GPU code
    assert {n: d.version for n, d in installed.items() if n in PINNED and d.version != PINNED[n]} == {}


def test_the_script_tells_how_to_call_it(tmp_path: Path) -> None:
    """``./run`` without a command prints its commands and fails, from any folder, without setting anything up."""
    done = subprocess.run([ROOT / "run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for command in ("setup", "demo", "test", "bench"):
        assert re.search(rf"^  {command}\b", done.stdout, re.M)


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    """Where there is no fitting Python, one sentence says which one is needed and how to name it."""
    for name in ("run", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho jdk.incubator.vector@17.0.1\n")
    java.chmod(0o755)
    environ = {**os.environ, "JAVA_HOME": str(java.parents[1]), "PYTHON": "/bin/false"}
    done = subprocess.run(["bash", tmp_path / "run", "setup"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"run: Python 3\.11 is needed .*PYTHON=/path/to/python3\.11 \./run\n", done.stderr)
