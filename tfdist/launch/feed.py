"""The rows of a Spark task on their way to its training process: an Arrow IPC stream over a socket, from a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO

import pyarrow as pa


class Feed:
    """Record batches for one training process.

    What the process has not read yet waits in the socket's buffer, then in Spark: memory stays bounded.

    Args:
        batches: the task's rows, as Spark hands them to it.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._ours, self.theirs = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, on_error: Callable[[], None]) -> None:
        """Begin to send, once the process holds its end.

        Args:
            on_error: ends the process when the rows cannot be computed; it would wait for them for ever.
        """
        self.theirs.close()  # so that a process that has ended is noticed
        self._thread = threading.Thread(target=self._run, args=(on_error,), name="tfdist-feed", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the rows, where one did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Send no more, and read no more from Spark: a task reads the end of its input itself."""
        self._ours.shutdown(socket.SHUT_RDWR)  # wakes a blocked writer
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Release the socket."""
        self.theirs.close()
        self._ours.close()

    def _run(self, on_error: Callable[[], None]) -> None:
        sink = self._ours.makefile("wb")
        try:
            self._send(sink)
            sink.close()
            self._ours.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended or wants no more; why is told by itself
        except BaseException as error:  # noqa: BLE001  raised again in the task's own thread
            self._error = error
            on_error()
        with suppress(OSError):
            sink.close()

    def _send(self, sink: IO[bytes]) -> None:
        writer: pa.RecordBatchStreamWriter | None = None
        for batch in self._batches:
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        # Without a batch there is nothing to read: an end at once.
        if writer is not None:
            writer.close()
