"""The line from the workers to the driver while a training runs: authenticated, one JSON object a line.

The driver listens on the address that executors reach it under anyway. A client proves that it knows the secret of the
run by answering a nonce with its HMAC; the secret itself travels with the Spark task. What arrives is parsed as JSON
only. A worker that cannot reach the driver trains on without a line: results return through Spark. The driver closes
all lines when a run is over, by which a worker learns it whose task Spark has forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tfdist.cluster import join_address
from tfdist.errors import LaunchError
from tfdist.launch.protocol import Event

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class ChannelAddress:
    """Where the driver listens, and the secret of the run; ``needed`` where a worker must not train without it."""

    host: str
    port: int
    secret: str = field(repr=False)
    needed: bool = False


class Channel:
    """The driver's end."""

    def __init__(self, address: ChannelAddress) -> None:
        self.address = address
        self._open: set[socket.socket] = set()
        self._closed = False
        self._changed = threading.Condition()

    def wait_until_closed(self, timeout_s: float) -> None:
        """Wait until every worker has closed its line, so that all that was sent has been received."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        """Close the lines that are still open, and those that come late."""
        with self._changed:
            self._closed = True
            for line in self._open:
                _shut(line)

    @contextmanager
    def _counted(self, line: socket.socket) -> Iterator[None]:
        with self._changed:
            self._open.add(line)
            if self._closed:
                _shut(line)
        try:
            yield
        finally:
            with self._changed:
                self._open.discard(line)
                self._changed.notify_all()


def _shut(line: socket.socket) -> None:
    with suppress(OSError):  # the other end was faster
        line.shutdown(socket.SHUT_RDWR)


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


@contextmanager
def listen(host: str, bind: str, receive: Callable[[Event], None], *, needed: bool = False) -> Iterator[Channel]:
    """Accept events while the block runs.

    Args:
        host: under which executors reach this process.
        bind: the address to listen on.
        receive: called for each event, from threads of the channel.
        needed: a worker that does not reach this process fails.
    """
    secret = secrets.token_hex(32)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            # Counted before the worker hears of it: it may have sent all and gone before its proof is read here.
            with channel._counted(self.connection):
                nonce = secrets.token_hex(16)
                self.connection.settimeout(_CONNECT_TIMEOUT_S)
                self.wfile.write(f"{nonce}\n".encode())
                answer = self.rfile.readline(_LONGEST_LINE).decode(errors="replace").strip()
                if not hmac.compare_digest(answer, _proof(secret, nonce)):
                    return
                self.connection.settimeout(None)
                for line in iter(lambda: self.rfile.readline(_LONGEST_LINE), b""):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        receive(event)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that breaks off mid-line is no matter of the driver's

    with Server((bind, 0), Handler) as server:
        channel = Channel(ChannelAddress(host, server.server_address[1], secret, needed))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="tfdist-events", daemon=True)
        thread.start()
        try:
            yield channel
        finally:
            server.shutdown()
            thread.join()
            channel.close()


@dataclass(frozen=True)
class Line:
    """A worker's end: called with an event, it sends it.

    Args:
        send: sends an event, or drops it where the driver cannot be reached.
        fd: becomes readable when the driver has closed the line; None where there is none.
    """

    send: Callable[[Event], None]
    fd: int | None = None

    def __call__(self, event: Event) -> None:
        self.send(event)


@contextmanager
def connect(address: ChannelAddress) -> Iterator[Line]:
    """A line to the driver.

    Raises:
        LaunchError: the driver cannot be reached, and must be.
    """
    try:
        line = socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
        stream = line.makefile("rwb")
        nonce = stream.readline(_LONGEST_LINE).decode().strip()
        stream.write(f"{_proof(address.secret, nonce)}\n".encode())
        stream.flush()
    except OSError as error:
        if address.needed:
            raise LaunchError(
                f"{socket.gethostname()} does not reach the process that started the training at "
                f"{join_address(address.host, address.port)} ({error.strerror or error}); set TFDIST_DRIVER_HOST there "
                "to an address of its machine that executors reach, or open its ports to them"
            ) from error
        print(f"tfdist: no live output, the driver cannot be reached: {error}", file=sys.stderr)  # noqa: T201
        yield Line(lambda _event: None)
        return
    alive = True

    def send(event: Event) -> None:
        nonlocal alive
        if not alive:
            return
        try:
            stream.write(json.dumps(event).encode() + b"\n")
            stream.flush()
        except OSError:
            alive = False

    with line, stream:
        yield Line(send, line.fileno())
