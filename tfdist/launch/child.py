"""The training process: runs one program and leaves its result, or why there is none, in the scratch folder."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from tfdist import environ
from tfdist.cluster import WorkerContext, enter_training
from tfdist.launch.protocol import emit
from tfdist.launch.pulse import show_stack_on_request

PROGRAM, RESULT, FAILURE = "program.pkl", "result.pkl", "failure.json"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class ChildOrder:
    """What a training process needs in order to start.

    Args:
        context: who the worker is; its ``scratch_dir`` holds the program and receives the result.
        env: the whole environment of the process.
        sys_path: where it finds modules; the supervisor's own path, so that user code imports alike.
        cwd: its working folder.
    """

    context: WorkerContext
    env: Mapping[str, str] = field(repr=False)
    sys_path: tuple[str, ...]
    cwd: str

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "context": self.context.to_json()})

    @staticmethod
    def from_json(text: str) -> ChildOrder:
        raw = json.loads(text)
        context = WorkerContext.from_json(raw["context"])
        return ChildOrder(context, raw["env"], tuple(raw["sys_path"]), raw["cwd"])


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call above
        os._exit(1)


def run_order(order: ChildOrder, event_fd: int, rows_fd: int | None = None) -> int:
    """Run the program of ``order`` in this process; returns the exit status, or waits to be ended after a success."""
    faulthandler.enable(all_threads=False)
    removed: dict[str, str | None] = dict.fromkeys(set(os.environ) - set(order.env))
    pipes = {"TFDIST_EVENT_FD": str(event_fd), environ.ROWS_FD: None if rows_fd is None else str(rows_fd)}
    environ.adopt(removed | dict(order.env) | pipes)
    known = set(sys.path)
    sys.path.extend(p for p in order.sys_path if p not in known)
    os.chdir(order.cwd)
    assert order.context.scratch_dir is not None
    enter_training(order.context)
    show_stack_on_request(order.context.scratch_dir)
    try:
        program = pickle.loads((order.context.scratch_dir / PROGRAM).read_bytes())
        result = program()
    except BaseException as error:  # noqa: BLE001  everything that ends the program is reported to the driver
        return _fail(order.context, error)
    finally:
        _remove_generated_sources()
    _write_atomically(order.context.scratch_dir / RESULT, result)
    return stay_for_peers()


def _fail(context: WorkerContext, error: BaseException) -> int:
    assert context.scratch_dir is not None
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)  # noqa: T201  the worker's own output shows it too
    report = {
        "error_type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "traceback": text,
        "secondary": _is_broken_collective(error),
    }
    _write_atomically(context.scratch_dir / FAILURE, json.dumps(report).encode())
    return 1


def _is_broken_collective(error: BaseException) -> bool:
    """Whether ``error`` is what TensorFlow raises on the survivors when a peer is gone."""
    errors = sys.modules.get("tensorflow.python.framework.errors_impl")
    if errors is None:
        return False
    gone = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    return isinstance(error, gone) or (isinstance(error, errors.OpError) and "ollective" in str(error))


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _remove_generated_sources() -> None:
    # AutoGraph removes the files that it generates when the interpreter exits, and this process is ended before.
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file") and module.__file__:
            Path(module.__file__).unlink(missing_ok=True)


def stay_for_peers() -> NoReturn:
    """Report that the result is there and wait to be ended.

    A worker that exits breaks the collectives that a slower peer is still in; so all stay until all are done, and
    their supervisors end them.
    """
    emit("done")
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()


def leave(status: int) -> NoReturn:
    """End this process at once with ``status``.

    Interpreter shutdown under running collectives was seen to hang in TensorFlow's destructors; there is nothing
    left to clean: results are on disk, and the supervisor removes the scratch folder.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """``python -m tfdist.launch.child PARENT_PID EVENT_FD [ROWS_FD]``, the order as JSON on standard input."""
    parent_pid, *fds = map(int, sys.argv[1:])
    die_with_parent(parent_pid)
    order = ChildOrder.from_json(sys.stdin.read())
    leave(run_order(order, *fds))


if __name__ == "__main__":
    main()
