"""Signs of life of a training process: what it marks itself, what the kernel counts, and for how long it was still.

The process marks its place in a page of memory that it shares with its supervisor through a file: a mark costs a
microsecond, is never late, and can still be read when the process is stopped.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any
from zlib import crc32

from tfdist.cluster import worker_context

PULSE, STACK = "pulse", "stack.txt"
PATIENCE = 3
"""A process that works on something other than a step has so many times the limit."""

# Waiting for a peer takes a live TensorFlow process less than 1 % of a core and no file access.
_WORKING_CPU = 0.04
_WORKING_BYTES_PER_S = 1 << 16
_FRAMES_OF_OTHERS = 3
_STACK_SIGNAL = signal.SIGRTMAX - 1
_COUNT, _STEP, _AT, _NOTE_SIZE, _NOTE_SUM = range(5)
_NOTE_FROM = 5 * 8
_SIZE = 1 << 16
_MACHINERY = f'  File "{Path(__file__).with_name("child.py")}"'


class At(IntEnum):
    """What a process is doing, as far as it says so."""

    UNMARKED = 0  # code that marks nothing: any work is a sign of life
    MEETING = 1  # its strategy is being made, which takes all workers
    WORKING = 2  # tracing, a first epoch, validation for the first time, callbacks, saving: work counts, not for ever
    STEP = 3  # a step like those before it: only its end counts
    DONE = 4  # its program has returned and it waits for its peers


class _Page:
    """What both processes see: three numbers, and a note with its size and checksum."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.cells = memoryview(self._map).cast("q")

    def write(self, note: bytes) -> None:
        if _NOTE_FROM + len(note) > _SIZE:
            return  # a thousand metrics: the event of the epoch has them
        self._map[_NOTE_FROM : _NOTE_FROM + len(note)] = note
        self.cells[_NOTE_SIZE], self.cells[_NOTE_SUM] = len(note), crc32(note)

    def read(self) -> bytes | None:
        """The note, or None when it is just being written."""
        size, checksum = self.cells[_NOTE_SIZE], self.cells[_NOTE_SUM]
        note = self._map[_NOTE_FROM : _NOTE_FROM + size]
        return note if crc32(note) == checksum else None

    def close(self) -> None:
        self.cells.release()
        self._map.close()


_page: tuple[Path, _Page] | None = None


def mark(at: At, step: int | None = None) -> None:
    """Note in this training process what it does now, which is a sign of progress; elsewhere this does nothing.

    Args:
        at: what it does from now on.
        step: training steps done since the first epoch, where that has changed.
    """
    page = _own_page()
    if page is None:
        return
    if step is not None:
        page.cells[_STEP] = step
    page.cells[_AT] = at
    page.cells[_COUNT] += 1


def note(kind: str | None, **values: Any) -> None:
    """Leave an event in this training process' page, from where its supervisor sends the latest once a second.

    Unlike :func:`tfdist.launch.protocol.emit` this never waits for a reader, and only the newest counts. It is no sign
    of progress. Elsewhere it does nothing.

    Args:
        kind: what happens, for example ``step``; None takes back what was not sent yet.
        **values: JSON values.
    """
    page = _own_page()
    if page is not None:
        page.write(b"" if kind is None else json.dumps({"kind": kind, "time": time.time(), **values}).encode())


def _own_page() -> _Page | None:
    global _page
    folder = worker_context().scratch_dir
    if folder is None:
        return None
    if _page is None or _page[0] is not folder:
        if not (folder / PULSE).exists():
            return None
        _page = (folder, _Page(folder / PULSE))
    return _page[1]


def show_stack_on_request(folder: Path) -> None:
    """In a training process: let its supervisor ask what it is doing. Python's frames are written without the GIL."""
    file = open(folder / STACK, "wb")  # noqa: SIM115  kept open for the life of the process
    faulthandler.register(_STACK_SIGNAL, file, all_threads=True)


def shown_stack(dump: str) -> str:
    """What a person needs of the frames of all threads: those of the main thread, then where each other one is.

    Args:
        dump: as ``faulthandler`` writes it.
    """
    threads = [thread.splitlines() for thread in dump.strip().split("\n\n") if thread]
    mine = next((t for t in threads if t[0].startswith("Current thread")), [])
    own = "\n".join(mine).partition(_MACHINERY)[0]  # from where the program is called on it is our own machinery
    others = [line for t in threads if t is not mine for line in [*t[1 : 1 + _FRAMES_OF_OTHERS], ""]]
    return "\n".join([own.rstrip(), *(["", "Other threads:", *others] if others else [])]).rstrip()


@dataclass(frozen=True)
class Sign:
    """What a supervisor knows of its process at one moment.

    Args:
        count: marks made so far. All workers of a ``tfdist.fit`` make the same ones, so the one with fewer is behind.
        step: training steps done.
        at: what it does.
        still_s: seconds without a sign of progress.
        limit_s: how many make a stall: the plan's, or ``PATIENCE`` times that for a process that works; None: never.
        stopped: it is suspended (SIGSTOP, a debugger).
        stack: Python's frames of its main thread, the innermost first, and those of others, once it has stalled.
    """

    count: int = 0
    step: int = 0
    at: int = At.UNMARKED
    still_s: float = 0.0
    limit_s: float | None = None
    stopped: bool = False
    stack: str = ""

    @property
    def stalled(self) -> bool:
        return self.limit_s is not None and self.still_s >= self.limit_s


class Pulse:
    """Follows one training process from its supervisor.

    Args:
        pid: the process.
        folder: its scratch folder.
        limit_s: seconds without a sign of progress that are a stall; None: there is none.
    """

    def __init__(self, pid: int, folder: Path, limit_s: float | None) -> None:
        self._pid, self._folder, self._limit_s = pid, folder, limit_s
        self._page = _Page(folder / PULSE)
        self._count, self._noted = -1, b""
        self._marked = self._worked = self._looked = time.monotonic()
        self._used = self._usage()
        self._asked = False

    def heard(self) -> None:
        """Note an event or a line of output."""
        self._worked = time.monotonic()

    def take(self) -> Sign:
        """Look at the process; to be called about once a second."""
        now = time.monotonic()
        count, step, at = self._page.cells[: _AT + 1]
        if count != self._count:
            self._count, self._marked = count, now
        if self._has_worked(now):
            self._worked = now
        still_s, limit_s = now - max(self._marked, self._worked), self._limit_s
        if at == At.STEP:
            still_s = now - self._marked
        elif at in (At.MEETING, At.WORKING) and limit_s is not None and now - self._marked >= PATIENCE * limit_s:
            still_s, limit_s = now - self._marked, PATIENCE * limit_s
        sign = Sign(count, step, at, still_s, limit_s, self._state() in "Tt")
        return Sign(**{**vars(sign), "stack": self._stack()}) if sign.stalled else self._forget_stack(sign)

    def noted(self) -> dict[str, Any] | None:
        """The event that the process has left since the last look, or None."""
        note = self._page.read()
        if note is None or note == self._noted:
            return None
        self._noted = note
        return json.loads(note) if note else None

    def close(self) -> None:
        """Release the shared page."""
        self._page.close()

    def _forget_stack(self, sign: Sign) -> Sign:
        self._asked = False
        return sign

    def _stack(self) -> str:
        """The frames asked for when the last look was taken; a stopped process answers nothing."""
        file = self._folder / STACK
        if not self._asked:
            if not file.exists():  # it has not come to its handler, and the signal would end it
                return ""
            file.write_bytes(b"")
            self._asked = True
            with suppress(ProcessLookupError):
                os.kill(self._pid, _STACK_SIGNAL)
            time.sleep(0.05)
        return shown_stack(file.read_bytes().lstrip(b"\0").decode(errors="replace"))

    def _has_worked(self, now: float) -> bool:
        used, passed = self._usage(), max(now - self._looked, 0.1)
        cpu_s, moved = used[0] - self._used[0], used[1] - self._used[1]
        self._used, self._looked = used, now
        return cpu_s >= _WORKING_CPU * passed or moved >= _WORKING_BYTES_PER_S * passed

    def _usage(self) -> tuple[float, int]:
        """CPU seconds, and bytes that went through read() and write()."""
        try:
            fields = self._fields()
            moved = Path(f"/proc/{self._pid}/io").read_text().split()
        except OSError:
            return self._used if hasattr(self, "_used") else (0.0, 0)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(moved[1]) + int(moved[3])

    def _state(self) -> str:
        try:
            return self._fields()[0]
        except OSError:
            return "X"

    def _fields(self) -> list[str]:
        # The name of the process, in brackets, may hold spaces; see proc(5).
        return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()


def new_page(folder: Path) -> None:
    """Make the shared page of a process that is about to be started."""
    (folder / PULSE).write_bytes(bytes(_SIZE))
