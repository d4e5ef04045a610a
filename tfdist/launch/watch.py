"""Starts one training process and stays with it to its end: relays output, events and samples, returns the result."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from tfdist.cluster import WorkerContext, WorkerHello
from tfdist.launch.child import FAILURE, PROGRAM, RESULT, ChildOrder
from tfdist.launch.protocol import Event, Failure, LaunchPlan
from tfdist.launch.pulse import At, Pulse, Sign, new_page
from tfdist.launch.signals import describe_end
from tfdist.launch.vigil import OF_OURS, alive_event
from tfdist.launch.warm import WarmOwner, fork_child

KEPT_LINES = 100
_LONGEST_KEPT = 500
_LOOK_EVERY_S = 1.0
# Of the Spark task itself; a training process has no use for them, and two of them are secrets.
_NOT_FOR_CHILDREN = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SOCK_PATH")


class Child(Protocol):
    """A running training process; ``fileno()`` becomes readable when it has ended."""

    @property
    def pid(self) -> int: ...
    def fileno(self) -> int: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


@dataclass
class ColdChild:
    """A training process started as a new interpreter."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def fileno(self) -> int:
        return self.pidfd

    def wait(self) -> int:
        status = self.process.wait()
        os.close(self.pidfd)
        return status

    def kill(self) -> None:
        self.process.kill()  # does nothing to a process that has been waited for


def start_child(order: ChildOrder, output_fd: int, fds: Sequence[int], *, warm_owner: WarmOwner | None) -> Child:
    """Start the training process of ``order``: forked from the warm parent of ``warm_owner``, or cold for None.

    It gets ``fds``: the pipe of its events, then the socket of its rows where there is one.

    The result does not depend on which; only the seconds do. Where the warm parent cannot be had it starts cold.
    """
    if warm_owner is not None:
        try:
            return fork_child(order, [output_fd, *fds], warm_owner)
        except OSError as error:
            print(f"tfdist: no warm start ({error}); starting cold", file=sys.stderr)  # noqa: T201
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch.child", str(os.getpid()), *map(str, fds)],
        env={**order.env, "PYTHONPATH": os.pathsep.join(p for p in order.sys_path if p)},
        stdin=subprocess.PIPE,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=fds,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it may die at once; its exit status tells
        stdin.write(order.to_json().encode())
    return ColdChild(process, os.pidfd_open(process.pid))


@contextmanager
def scratch_dir(run_id: str, rank: int) -> Iterator[Path]:
    """A private folder of one worker, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix=f"tfdist-{run_id}-{rank}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def child_env(plan: LaunchPlan, changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training process: this one's, the user's ``env``, and ``changes`` over both."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    return quiet | inherited | dict(plan.env) | dict(changes)


class Watch:
    """One training process from start to end.

    Args:
        plan: how the training is launched.
        program: the pickled callable to run.
        context: who the worker is, with its scratch folder.
        hello: how the worker introduced itself; its rank and host name the failures.
        env: variables that are this worker's alone (TF_CONFIG, devices).
        warm_owner: on whose behalf a warm parent lives; None starts cold.
        rows: the socket on which it gets rows, or None.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        program: bytes,
        context: WorkerContext,
        hello: WorkerHello,
        env: Mapping[str, str],
        warm_owner: WarmOwner | None,
        rows: socket.socket | None = None,
    ) -> None:
        assert context.scratch_dir is not None
        self.plan, self.context, self.hello = plan, context, hello
        self.scratch = context.scratch_dir
        (self.scratch / PROGRAM).write_bytes(program)
        new_page(self.scratch)
        order = ChildOrder(
            context,
            child_env(plan, {**env, "TFDIST_CONTEXT": context.to_json()}),
            tuple(sys.path),
            os.getcwd(),
        )
        self.output, output_w = os.pipe()
        self.events, events_w = os.pipe()
        fds = [events_w, *([] if rows is None else [rows.fileno()])]
        try:
            self.child = start_child(order, output_w, fds, warm_owner=warm_owner)
        finally:
            os.close(output_w)
            os.close(events_w)
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.status: int | None = None
        self.rss_mib: float | None = None

    def until_done(self, send: Callable[[Event], None], driver_fd: int | None = None) -> bytes | Failure:
        """Relay until the program has returned or its process has ended.

        After a success the process stays: its peers may still be in a collective with it. ``close()`` ends it.

        Args:
            send: receives the events.
            driver_fd: becomes readable when the driver has ended the run, which ends the process.

        Returns:
            The bytes that the program returned, or why there are none.
        """
        self._relay(send, driver_fd)
        result = self.scratch / RESULT
        return result.read_bytes() if result.exists() else self._failure(self.close())

    def close(self) -> int:
        """End the process if it still runs, and release its pipes; returns its exit status."""
        if self.status is None:
            self.child.kill()
            self.status = self.child.wait()
            os.close(self.output)
            os.close(self.events)
        return self.status

    def _relay(self, send: Callable[[Event], None], driver_fd: int | None) -> None:
        sampler, pulse = _Sampler(self.child.pid), Pulse(self.child.pid, self.scratch, self.plan.stall_timeout_s)
        next_look = time.monotonic() + _LOOK_EVERY_S
        next_sample = time.monotonic() + self.plan.sample_every_s
        lines, events = _LineReader(self.output), _LineReader(self.events)

        selector = selectors.DefaultSelector()

        def drain(reader: _LineReader, handle: Callable[[str], None]) -> None:
            for line in reader.read():
                handle(line)
            if not reader.open and reader.fd in selector.get_map():
                selector.unregister(reader.fd)  # at its end a pipe is readable for ever

        def on_line(line: str) -> None:
            pulse.heard()
            if not line.startswith("Extension modules: "):  # faulthandler's list of a hundred names
                self.last_lines.append(line[:_LONGEST_KEPT])
            if self.plan.shows(self.context.rank):
                send({"kind": "line", "rank": self.context.rank, "text": line})

        done = False

        def on_event(line: str) -> None:
            nonlocal done
            pulse.heard()
            event = {**json.loads(line), "rank": self.context.rank}
            if event["kind"] == "done":
                done = True
            elif event["kind"] not in OF_OURS:
                send(event)

        def on_driver_gone() -> None:
            assert driver_fd is not None
            selector.unregister(driver_fd)
            self.child.kill()

        with closing(pulse), selector:
            if driver_fd is not None:
                selector.register(driver_fd, selectors.EVENT_READ, on_driver_gone)
            selector.register(self.output, selectors.EVENT_READ, lambda: drain(lines, on_line))
            selector.register(self.events, selectors.EVENT_READ, lambda: drain(events, on_event))
            selector.register(self.child.fileno(), selectors.EVENT_READ, None)
            while not done:
                for key, _ in selector.select(max(0.0, min(next_sample, next_look) - time.monotonic())):
                    if key.data is None:
                        done = True
                    else:
                        key.data()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _LOOK_EVERY_S
                    send(alive_event(self.context.rank, pulse.take(), tuple(self.last_lines)))
                    noted = pulse.noted()
                    if noted is not None:
                        send({**noted, "rank": self.context.rank})
                if time.monotonic() >= next_sample:
                    next_sample += self.plan.sample_every_s
                    sample = sampler.take()
                    if sample is not None:
                        self.rss_mib = sample["rss_mib"]
                        send({"kind": "sample", "rank": self.context.rank, **sample})
            # Its last words may still be in the pipes. A grandchild may hold them open, so nobody waits for their end.
            drain(lines, on_line)
            drain(events, on_event)
        send(alive_event(self.context.rank, Sign(at=At.DONE), ()))
        if lines.rest:
            on_line(lines.rest.decode(errors="replace"))

    def _failure(self, status: int) -> Failure:
        report = self.scratch / FAILURE
        tail = tuple(self.last_lines)
        if report.exists():
            return Failure(self.hello.rank, self.hello.host, last_output=tail, **json.loads(report.read_text()))
        # Only the Spark launcher knows an application.
        name, message = describe_end(status, tail, on_spark=bool(self.plan.application), rss_mib=self.rss_mib)
        return Failure(self.hello.rank, self.hello.host, name, message, "", tail)


class _LineReader:
    """Complete lines out of a pipe, without blocking."""

    def __init__(self, fd: int) -> None:
        self.fd, self.rest, self.open = fd, b"", True
        os.set_blocking(fd, False)

    def read(self) -> list[str]:
        content = b""
        with suppress(BlockingIOError):
            while self.open and len(content) < 1 << 20:
                part = os.read(self.fd, 1 << 16)
                self.open = bool(part)
                content += part
        *lines, self.rest = (self.rest + content).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


class _Sampler:
    """CPU and memory of one process and its host, as psutil counts them."""

    def __init__(self, pid: int) -> None:
        self.process: psutil.Process | None = None
        with suppress(psutil.Error):
            self.process = psutil.Process(pid)
            self.process.cpu_percent()  # the first call only sets the mark that later calls count from
        psutil.cpu_percent()

    def take(self) -> dict[str, Any] | None:
        if self.process is None:
            return None
        try:
            with self.process.oneshot():
                cpu, rss = self.process.cpu_percent(), self.process.memory_info().rss
        except psutil.Error:
            return None
        memory = psutil.virtual_memory()
        return {
            "time": time.time(),
            "cpu_percent": cpu,
            "rss_mib": rss / 2**20,
            "system_cpu_percent": psutil.cpu_percent(),
            "system_memory_percent": memory.percent,
        }
