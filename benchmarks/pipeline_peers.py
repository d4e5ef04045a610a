"""Rows per second of the data pipeline against other ways to feed TensorFlow from the same table.

    ./run exec benchmarks/make_peers.sh .peers
    ./run bench pipeline_peers [--rows 1000000] [--turns 7] [--peers .peers] [--only NAME ...]

Every contender reads all rows of 20 float32 columns and one int64 column, in batches of 4096, and TensorFlow's own loop
draws the batches. The clock starts before the reader is made. Each contender is a process that has done its imports;
they take turns, and the first turn does not count. contenders.py says what each of them does.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from contenders import BATCH, CONTENDERS, Contender

HERE = Path(__file__).resolve().parent
SAMPLE_SECONDS = 0.1
HEADINGS = ("", "rows/s", "range", "CPU ns/row", "MiB", "of raw scan", "tfdist in order", "tfdist shuffled")

Turn = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What a contender's process is started with.

    Attributes:
        python: the interpreter of its environment.
        environ: variables of the process.
        folder: of the data.
    """

    python: Path
    environ: dict[str, str]
    folder: Path

    def command(self, action: str, name: str) -> list[str]:
        return [str(self.python), str(HERE / "contenders.py"), action, name, str(self.folder)]


def place(contender: Contender, peers: Path, folder: Path) -> Place | None:
    """Where the contender runs, or None when its environment is not there."""
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    if not contender.environment:
        return Place(Path(sys.executable), environ, folder)
    python = peers.absolute() / contender.environment / "bin" / "python"
    environ.pop("PYTHONPATH", None)
    return Place(python, environ, folder) if python.exists() else None


def prepare(name: str, where: Place) -> float:
    """Seconds of making the files that the contender reads."""
    start = time.perf_counter()
    subprocess.run(where.command("prepare", name), env=where.environ, check=True, capture_output=True)
    return time.perf_counter() - start


class Worker:
    """A contender's process."""

    def __init__(self, name: str, where: Place, log: Any) -> None:
        self.name = name
        self._log = log
        self._process = subprocess.Popen(
            where.command("serve", name),
            env=where.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def first_turn(self) -> tuple[Turn, float]:
        """The turn that does not count, and the most memory its child processes had in MiB."""
        self._ask()
        children = 0.0
        while not select.select([self._process.stdout], [], [], SAMPLE_SECONDS)[0]:
            children = max(children, children_mib(self._process.pid))
        return self._answer(), children

    def turn(self) -> Turn:
        self._ask()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _ask(self) -> None:
        with suppress(BrokenPipeError):  # it has ended, which its answer will show
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def _answer(self) -> Turn:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name}: its process ended without an answer:\n{self._log.read()[-4000:]}")
        return json.loads(line)


def children_mib(pid: int) -> float:
    """Memory that only the child processes hold."""
    total = 0
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total / 2**20


@contextmanager
def workers(places: dict[str, Place]) -> Iterator[dict[str, Worker]]:
    with ExitStack() as stack:
        started = {}
        for name, where in places.items():
            worker = Worker(name, where, stack.enter_context(tempfile.TemporaryFile("w+")))
            stack.callback(worker.close)
            started[name] = worker
        yield started


def take_turns(contenders: dict[str, Worker], turns: int, rows: int) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Every contender's turns that count, and its peak memory in MiB, children included."""
    taken: dict[str, list[Turn]] = {name: [] for name in contenders}
    children = dict.fromkeys(contenders, 0.0)
    for number in range(turns + 1):
        for name, worker in contenders.items():
            if number:
                turn = worker.turn()
                taken[name].append(turn)
            else:
                turn, children[name] = worker.first_turn()
            expected = rows * (turn["passes"] if number else 1)
            assert turn["rows"] == expected, f"{name}: expected {expected} rows, got {turn['rows']}"
    return taken, {name: taken[name][-1]["memory_mib"] + children[name] for name in contenders}


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """Our rows per second over theirs, turn by turn; the median."""
    speeds = [[turn["rows"] / turn["wall"] for turn in turns] for turns in (ours, theirs)]
    return statistics.median(one / other for one, other in zip(*speeds, strict=True))


def cells(title: str, turns: Sequence[Turn], memory: float, taken: dict[str, list[Turn]]) -> list[str]:
    """One row of the table."""
    speeds = [turn["rows"] / turn["wall"] for turn in turns]
    cpu = statistics.median(turn["cpu"] / turn["rows"] for turn in turns) * 1e9
    figures = [f"{statistics.median(speeds):,.0f}", f"{min(speeds):,.0f} - {max(speeds):,.0f}", f"{cpu:,.0f}"]
    figures.append(f"{memory:,.0f}")
    figures.append(f"{ratio(turns, taken['raw']):.3f}" if "raw" in taken else "")
    figures += [f"{ratio(taken[us], turns):,.2f}x" if us in taken else "" for us in ("tfdist", "tfdist-shuffled")]
    return [title, *figures]


def print_markdown(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        first, *others = zip(row, widths, strict=True)
        print("| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |")
        if number == 0:
            print("|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|")


def print_notes(taken: dict[str, list[Turn]], prepared: dict[str, float]) -> None:
    print("\nEach cell is the median of the turns; ratios are of rows/s, turn by turn. CPU time is of all threads and")
    print("child processes. MiB: the most that the process held, over what it held after its imports; pages of mapped")
    print("files count, as does what is loaded before the clock starts. A pass begins with the making of the reader,")
    print("which costs the same for few rows as for many; a later epoch of tfdist has its reader.")
    for name, turns in taken.items():
        turn = turns[-1]
        notes = [", ".join(f"{package} {release}" for package, release in turn["versions"].items())]
        notes += [", ".join(f"{key}={value}" for key, value in turn["setting"].items())] if turn["setting"] else []
        notes += [f"files made beforehand in {prepared[name]:.1f} s"] if name in prepared else []
        notes.append(f"{turn['passes']} passes a turn" if turn["passes"] > 1 else "1 pass a turn")
        print(f"- {CONTENDERS[name].title}: {'; '.join(notes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of make_peers.sh")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    arguments = parser.parse_args()
    from pipeline import TABLES, write

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "table").mkdir()
        write(folder / "table", TABLES["narrow"], arguments.rows)
        found = {name: place(CONTENDERS[name], arguments.peers, folder) for name in arguments.only}
        places = {name: where for name, where in found.items() if where is not None}
        prepared = {name: prepare(name, where) for name, where in places.items() if CONTENDERS[name].prepare}
        with workers(places) as started:
            taken, memory = take_turns(started, arguments.turns, arguments.rows)
    print(f"{arguments.rows:,} rows, batch {BATCH:,}, {os.cpu_count()} cores, median of {arguments.turns} turns\n")
    table = [list(HEADINGS)]
    for name in arguments.only:
        contender = CONTENDERS[name]
        if name in taken:
            table.append(cells(contender.title, taken[name], memory[name], taken))
        else:
            build = f"not installed: ./run exec benchmarks/make_peers.sh {arguments.peers} {contender.environment}"
            table.append([contender.title, build, *[""] * (len(HEADINGS) - 2)])
    print_markdown(table)
    print_notes(taken, prepared)


if __name__ == "__main__":
    main()
