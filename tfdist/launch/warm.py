"""The warm parent: a process that has imported TensorFlow, run nothing, and forks training processes on request.

Importing TensorFlow and Keras takes most of the seconds between a launch and its first step. One such parent per host,
application and start-up environment serves every launch of all executors there. It listens on a Unix socket in a folder
that only this user can enter, and ends when the last of its owners (the executors, or the driver of local processes)
has ended or when nobody asked for anything for a while.

One connection is one child: the client sends the order and the child's output and event pipes, with the socket of its
rows where it gets any; the server answers the pid and later the exit status. A closed connection kills the child, so
that a child never outlives its supervisor.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tfdist.launch.child import ChildOrder, die_with_parent, leave, run_order
from tfdist.launch.protocol import LATE_VARIABLES

IDLE_TIMEOUT_S = 600.0
_LENGTH = struct.Struct("!Q")
_MOST_FDS = 3
# Variables that change from call to call and that nothing reads while it is imported.
_VOLATILE = ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES")
_started: list[subprocess.Popen[bytes]] = []
_PRELOAD = ("tensorflow", "keras", "pyarrow.parquet", "cloudpickle")


@dataclass(frozen=True)
class WarmOwner:
    """On whose behalf a warm parent lives.

    Args:
        pid: the process whose end ends the claim: a Spark executor's, or the driver's for local processes.
        application: owners of one application on one host share a parent.
    """

    pid: int
    application: str


def identity(env: Mapping[str, str], application: str) -> str:
    """What children of one warm parent share: interpreter, application, container, modules, what imports read."""
    described = json.dumps(
        [sys.executable, application, _namespaces(), _module_path(), _read_early(env)], sort_keys=True
    )
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _namespaces() -> list[str]:
    """Containers may share the folder of the sockets and nothing else: a child must live where its supervisor does."""
    found = []
    for kind in ("mnt", "net", "pid"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/ns/{kind}"))
    return found


def _module_path() -> list[str]:
    """Where modules come from, without the working folder, which each executor has for itself."""
    return [path for path in sys.path if path and os.path.normpath(path) != os.getcwd()]  # Spark writes it a/./b too


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that may be read while modules are imported; Spark's own differ from task to task and are not."""
    return {
        name: value
        for name, value in env.items()
        if name not in LATE_VARIABLES and name not in _VOLATILE and not name.startswith(("SPARK_", "PYSPARK_"))
    }


def runtime_dir() -> Path:
    """This user's private folder for sockets; created with mode 0700 and refused when it is somebody else's."""
    path = Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
        raise PermissionError(f"{path}: expected a folder of this user with mode 0700; remove it or set TMPDIR")
    return path


@dataclass
class WarmChild:
    """A training process forked by a warm parent; ``fileno()`` is readable once it has ended."""

    pid: int
    connection: socket.socket
    ended: bool = False

    def fileno(self) -> int:
        return self.connection.fileno()

    def wait(self) -> int:
        """Block until the child has ended; returns its exit status, negative for a signal."""
        answer = _receive(self.connection)
        self.ended = True
        self.connection.close()
        if answer is None:
            return -signal.SIGKILL  # the warm parent went away, and the kernel ended its children with it
        return int(json.loads(answer)["status"])

    def kill(self) -> None:
        if not self.ended:  # afterwards the number may be another process'
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_child(order: ChildOrder, fds: Sequence[int], owner: WarmOwner) -> WarmChild:
    """Fork a training process from the warm parent of this host, starting that parent first where there is none.

    Args:
        order: what it runs.
        fds: its output, its events, and its rows where it gets any.
        owner: on whose behalf the parent lives.

    Raises:
        OSError: the warm parent cannot be started or reached.
    """
    address = runtime_dir() / f"{identity(order.env, owner.application)}.sock"
    connection = _connect(address, order.env, owner.pid)
    socket.send_fds(connection, [b"\0"], fds)
    _send(connection, str(owner.pid).encode())
    _send(connection, order.to_json().encode())
    answer = _receive(connection)
    if answer is None:
        connection.close()
        raise ConnectionResetError(f"{address}: the warm parent ended before it answered")
    return WarmChild(int(json.loads(answer)["pid"]), connection)


def _connect(address: Path, env: Mapping[str, str], owner: int) -> socket.socket:
    with open(address.with_suffix(".lock"), "w") as lock:
        flock(lock, LOCK_EX)  # two supervisors of one host start one parent, not two
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            _start_server(address, env, owner)
            connection.connect(str(address))
        return connection


def _start_server(address: Path, env: Mapping[str, str], owner: int) -> None:
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    address.chmod(0o600)  # the folder is private already
    listener.listen(64)  # clients may queue while TensorFlow is being imported
    with open(address.with_suffix(".log"), "wb") as log, listener:
        _started[:] = [server for server in _started if server.poll() is None]  # reaps those that ended
        server = subprocess.Popen(
            [sys.executable, "-m", "tfdist.launch.warm", str(listener.fileno()), str(address), str(owner)],
            env=_read_early(env) | {"PYTHONPATH": os.pathsep.join(_module_path())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # a Ctrl-C at the driver's terminal is the driver's to handle
        )
        _started.append(server)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> bytes | None:
    head = _receive_exactly(connection, _LENGTH.size)
    return None if head is None else _receive_exactly(connection, _LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        try:
            part = connection.recv(size - len(content))
        except ConnectionResetError:
            return None
        if not part:
            return None
        content += part
    return bytes(content)


class _Server:
    """The loop of the warm parent. Single-threaded: a fork copies the calling thread only."""

    def __init__(self, listener: socket.socket, address: Path) -> None:
        self.listener, self.address = listener, address
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, its client)
        self.abandoned: dict[int, Path] = {}  # pidfd -> the scratch folder that no supervisor will remove
        self.owners: dict[int, int] = {}  # pid -> pidfd
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        last_used = time.monotonic()
        while True:
            ready = self.selector.select(IDLE_TIMEOUT_S)
            if not ready and not self.children and time.monotonic() - last_used >= IDLE_TIMEOUT_S:
                self.stop()
            for key, _ in ready:
                last_used = time.monotonic()
                if key.fd in self.selector.get_map():  # an earlier callback of this round may have removed it
                    key.data(key.fd)

    def _accept(self, _fd: int) -> None:
        connection, _address = self.listener.accept()
        _, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
        owner, content = _receive(connection), _receive(connection)
        if owner is None or content is None or len(fds) < 2 or not self.claimed_by(int(owner)):
            for fd in fds:
                os.close(fd)
            connection.close()
            return
        order = ChildOrder.from_json(content.decode())
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(order, fds, parent)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, connection)
        self.selector.register(pidfd, selectors.EVENT_READ, self._reap)
        scratch = order.context.scratch_dir
        assert scratch is not None
        self.selector.register(connection, selectors.EVENT_READ, lambda _: self._client_left(pidfd, scratch))
        with suppress(OSError):
            _send(connection, json.dumps({"pid": pid}).encode())

    def claimed_by(self, pid: int) -> bool:
        """Note an owner; False for one that this process cannot watch, since it is gone or of another container."""
        if pid not in self.owners:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                return False
            self.owners[pid] = pidfd
            self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._owner_ended(pid))
        return True

    def _owner_ended(self, pid: int) -> None:
        pidfd = self.owners.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        if not self.owners:
            self.stop()

    def _become_child(self, order: ChildOrder, fds: Sequence[int], parent: int) -> NoReturn:
        status, (output_fd, *others) = 1, fds
        try:
            die_with_parent(parent)
            for fd in (self.listener.fileno(), *self.owners.values(), *self.children):
                os.close(fd)
            for _, client in self.children.values():
                os.close(client.fileno())
            self.selector.close()
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            os.close(output_fd)
            status = run_order(order, *others)
        finally:
            leave(status)
        raise AssertionError("unreachable")

    def _client_left(self, pidfd: int, scratch: Path) -> None:
        pid, connection = self.children[pidfd]
        self.selector.unregister(connection)
        self.abandoned[pidfd] = scratch
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _reap(self, pidfd: int) -> None:
        pid, connection = self.children.pop(pidfd)
        raw = os.waitpid(pid, 0)[1]
        self.selector.unregister(pidfd)
        os.close(pidfd)
        if pidfd in self.abandoned:  # its supervisor was killed and could not clean up
            shutil.rmtree(self.abandoned.pop(pidfd), ignore_errors=True)
        if connection.fileno() in self.selector.get_map():
            self.selector.unregister(connection)
        with suppress(OSError):
            _send(connection, json.dumps({"status": os.waitstatus_to_exitcode(raw)}).encode())
        connection.close()

    def stop(self) -> NoReturn:
        for suffix in (".sock", ".lock", ".log"):
            self.address.with_suffix(suffix).unlink(missing_ok=True)
        os._exit(0)  # the kernel ends the children with their parent


def main() -> None:
    """``python -m tfdist.launch.warm LISTENER_FD ADDRESS OWNER_PID``."""
    server = _Server(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
    # Before the seconds of importing: an owner that ends in them asks for nothing and is never heard of again.
    if not server.claimed_by(int(sys.argv[3])):
        server.stop()
    for name in _PRELOAD:
        import_module(name)
    server.serve()


if __name__ == "__main__":
    main()
