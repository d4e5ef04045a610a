"""What a terminal shows while Spark writes a data set."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import inheritable_thread_target
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tfdist.data.manifest import Manifest
from tfdist.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

_POLL_S = 0.2
_WORTH_A_LINE_S = 2.0
_CANCEL_TIMEOUT_S = 30.0
_ONE_BAR = threading.Lock()  # a terminal has room for one; further writers are silent


class WriteProgress:
    """Shows the Spark tasks of the jobs that :meth:`run` starts; ends them when it is left by an error.

    Jobs are told from others by a tag of their own; a job group of the user's stays as it is. With Spark Connect, which
    tells of no other thread's tasks, or a Spark whose tracker knows no tags, there is no bar.

    Args:
        df: a frame of the session.
        name: of the data set.
        progress: True shows, False does not, None shows when standard output and standard error are terminals. The
            bar needs a terminal in any case; elsewhere True means the line at the end.
    """

    def __init__(self, df: DataFrame, name: str, progress: bool | None) -> None:
        self._session = df.sparkSession
        self._context: Any = df.sparkSession.sparkContext if hasattr(df, "_jdf") else None
        self._name = name
        self._tag = f"tfdist-{uuid.uuid4().hex}"
        self._shown = progress if progress is not None else _is_terminal(sys.stdout) and _is_terminal(sys.stderr)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = 0.0

    def __enter__(self) -> WriteProgress:
        self._started = time.monotonic()
        console = Console(stderr=True)
        if self._shown and self._context is not None and console.is_terminal:
            self._thread = threading.Thread(target=self._show, args=(console,), name="tfdist-progress", daemon=True)
            self._thread.start()
        return self

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, whose Spark jobs are shown and, when this thread is interrupted, ended.

        It runs in a thread of its own. A thread that is interrupted inside a call to the JVM loses its connection, and
        with it its active session, while the call goes on and may start jobs that nobody ends.
        """
        outcome: Future[T] = Future()
        add_tag = self._session.addTag if self._context is None else self._context.addJobTag

        def call() -> None:
            try:
                add_tag(self._tag)
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
                outcome.set_exception(error)

        thread = threading.Thread(
            target=inheritable_thread_target(self._session)(call), name="tfdist-write", daemon=True
        )
        thread.start()
        try:
            wait([outcome])
        except BaseException:
            self._end_jobs(thread)
            raise
        thread.join()
        return outcome.result()

    def done(self, manifest: Manifest) -> None:
        """Say what was written, where it took some time."""
        self._stop()
        took_s = time.monotonic() - self._started
        if self._shown and took_s > _WORTH_A_LINE_S:
            size = decimal(sum(f.size_bytes for f in manifest.fragments))
            line = f"{self._name}: {manifest.rows:,} rows, {size} in {took_s:.1f} s"
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        # Spark Connect does not tell of tasks that go on; what they still write has no manifest and is swept later.
        if kind is not None and self._context is not None:
            self._settle()

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end_jobs(self, thread: threading.Thread) -> None:
        """Cancel until the call has come back: it may start further jobs after the first was cancelled."""
        give_up_at = time.monotonic() + _CANCEL_TIMEOUT_S
        end = self._session.interruptTag if self._context is None else self._context.cancelJobsWithTag
        while thread.is_alive() and time.monotonic() < give_up_at:
            with suppress(Exception):  # the session may be gone
                end(self._tag)
            thread.join(_POLL_S)

    def _settle(self) -> None:
        """Wait for tasks, which go on for a moment when their job has ended: they would write to a deleted folder."""
        give_up_at = time.monotonic() + _CANCEL_TIMEOUT_S
        with suppress(Exception):  # the session may be gone, or older; the error that led here is the one to tell
            while any(stage.numActiveTasks for stage in self._stages()) and time.monotonic() < give_up_at:
                time.sleep(_POLL_S)

    def _show(self, console: Console) -> None:
        if not _ONE_BAR.acquire(blocking=False):
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        try:
            with Progress(
                *columns,
                TextColumn("tasks"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                redirect_stdout=False,
            ) as bar:
                task = bar.add_task(f"writing {self._name}", total=None)
                while not self._end.wait(_POLL_S):
                    done, total = self._tasks()
                    bar.update(task, completed=done, total=total or None)
        except Exception:  # noqa: BLE001  a bar is no reason to fail: the session was stopped, or its tracker knows no tags
            return
        finally:
            _ONE_BAR.release()

    def _tasks(self) -> tuple[int, int]:
        """Tasks that are done, and all that are known."""
        stages = self._stages()
        return sum(s.numCompletedTasks for s in stages), sum(s.numTasks for s in stages)

    def _stages(self) -> list[Any]:
        """What Spark says of the stages of the jobs that were started inside."""
        numbers = self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)
        tracker = self._context.statusTracker()
        jobs = [info for number in numbers if (info := tracker.getJobInfo(number)) is not None]
        stages = {stage for info in jobs for stage in info.stageIds}
        return [info for stage in stages if (info := tracker.getStageInfo(stage)) is not None]


def check_progress(progress: Any) -> None:
    """Raise ConfigError where the value says neither to show nor to be silent."""
    if progress is not None and not isinstance(progress, bool):
        raise ConfigError(f"progress: expected True, False or None (only on a terminal), got {progress!r}")


def _is_terminal(stream: Any) -> bool:
    return stream is not None and bool(stream.isatty())
