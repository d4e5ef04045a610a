"""What the README and the pages of docs/ show is what happens."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
FILE = re.compile(r"\b(?:jobs|tests|docs|benchmarks)/[\w./-]+")


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


def command_lines() -> list[str]:
    return [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python blocks of a page run one after the other in a session, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path / "cache"))
    names = {"__name__": "__main__", "spark": spark}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_every_shown_command_exists() -> None:
    """Commands of ``./run`` and ``tfdist`` are real ones, and the files that they name are there."""
    usage = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True).stdout
    shown = command_lines()
    assert "./run demo" in shown
    for line in shown:
        match line.split():
            case ["./run", command, *rest]:
                assert re.search(rf"^  {command}\b", usage, re.M), line
                if command == "bench":
                    assert (ROOT / "benchmarks" / f"{rest[0]}.py").exists(), line
            case ["tfdist", command, *_]:
                assert command in ("run", "check"), line
            case [program, *_]:
                assert program == "spark-submit", f"a command of a kind that no test covers: {line}"
        for path in FILE.findall(line):
            assert (ROOT / path).exists(), line


def test_links_lead_to_files() -> None:
    """Links between the pages and to files of the project lead somewhere."""
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
