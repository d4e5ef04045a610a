"""Can every worker reach every other one, under which address, before TensorFlow finds out in its own way?

Each supervisor opens a door on the port that TensorFlow will take, so that a firewall is met now. Who knocks is told,
by a proof that only this run can make, which rank is behind the door: an address may lead to another machine, as
127.0.1.1 does.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil

from tfdist.cluster import WorkerHello, join_address
from tfdist.errors import LaunchError
from tfdist.launch.ports import reserve_port

KNOCK_TIMEOUT_S = 5.0
_NONCE_BYTES = 32
_MOST_THREADS = 32
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_DOORS_TRIED = 8


@contextmanager
def open_door(rank: int, secret: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """Reserve a port for TensorFlow and answer on it who is there.

    Args:
        rank: of this worker.
        secret: of this run.

    Yields:
        The port, which stays reserved for the length of the block, and a function that closes the door.

    Raises:
        LaunchError: whatever port is reserved, somebody else listens on it.
    """
    for _ in range(_DOORS_TRIED):
        with reserve_port() as port:
            try:
                listener = _listen(port)
            except OSError:
                continue  # somebody was faster; another port
            answering = threading.Thread(target=_answer, args=(listener, rank, secret), daemon=True)
            answering.start()

            def close(listener: socket.socket = listener, answering: threading.Thread = answering) -> None:
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
                answering.join()
                listener.close()

            try:
                yield port, close
            finally:
                close()
            return
    raise LaunchError(
        f"rank {rank}: expected a free TCP port, and another process listened on each of {_DOORS_TRIED} just reserved"
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


def _answer(listener: socket.socket, rank: int, secret: str) -> None:
    while True:
        try:
            visitor, _ = listener.accept()
        except OSError:
            return
        with visitor, suppress(OSError):
            visitor.settimeout(1.0)
            visitor.sendall(_proof(secret, rank, visitor.recv(_NONCE_BYTES)))


def _proof(secret: str, rank: int, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), b"rank %d " % rank + nonce, hashlib.sha256).digest()


def knock(host: str, port: int, rank: int, secret: str, timeout_s: float = KNOCK_TIMEOUT_S) -> str | None:
    """Why ``rank`` is not reached at ``host``; None when it is."""
    nonce = secrets.token_hex(_NONCE_BYTES // 2).encode()
    try:
        with socket.create_connection((host, port), timeout_s) as line:
            line.settimeout(timeout_s)
            line.sendall(nonce)
            answer = line.recv(64)
    except OSError as error:
        return str(error)
    return None if hmac.compare_digest(answer, _proof(secret, rank, nonce)) else "somebody else answers there"


def meet(hello: WorkerHello, secret: str, all_gather: Callable[[str], Sequence[str]]) -> list[WorkerHello]:
    """Exchange greetings and try every pair of workers.

    A host that some peer does not reach is replaced by another address of that worker that all reach.

    Args:
        hello: of this worker, whose door is open.
        secret: of this run.
        all_gather: gives every worker's text to every worker, by rank.

    Returns:
        All greetings by rank, with hosts that all peers reach.

    Raises:
        LaunchError: some pairs cannot reach each other; it names all of them.
    """
    hellos = sorted((WorkerHello.from_json(t) for t in all_gather(hello.to_json())), key=lambda h: h.rank)
    if len(hellos) == 1:
        return hellos
    first = _exchange([(h, h.host) for h in hellos], hello.rank, secret, all_gather)
    unreached = {rank for failures in first for rank, _, _ in failures}
    if not unreached:
        return hellos
    others = [(h, host) for h in hellos if h.rank in unreached for host in h.other_hosts]
    second = _exchange(others, hello.rank, secret, all_gather)
    closed = {(rank, host) for failures in second for rank, host, _ in failures}
    found = []
    for h in hellos:
        usable = [host for host in h.other_hosts if (h.rank, host) not in closed]
        if h.rank in unreached and usable:
            unreached.discard(h.rank)
            h = replace(h, host=usable[0])
        found.append(h)
    if unreached:
        raise LaunchError(_unreachable(hellos, first, unreached))
    return found


_Failures = list[tuple[int, str, str]]  # rank, host, why


def _exchange(
    doors: Sequence[tuple[WorkerHello, str]], own: int, secret: str, all_gather: Callable[[str], Sequence[str]]
) -> list[_Failures]:
    """What each worker, by rank, did not reach of ``doors``."""
    foreign = [(h, host) for h, host in doors if h.rank != own]
    with ThreadPoolExecutor(max(1, min(_MOST_THREADS, len(foreign)))) as pool:
        answers = list(pool.map(lambda door: knock(door[1], door[0].port, door[0].rank, secret), foreign))
    mine = [(h.rank, host, why) for (h, host), why in zip(foreign, answers, strict=True) if why is not None]
    texts = all_gather(json.dumps([own, mine]))
    return [[(f[0], f[1], f[2]) for f in failures] for _, failures in sorted(json.loads(text) for text in texts)]


def _unreachable(hellos: Sequence[WorkerHello], failures: Sequence[_Failures], unreached: set[int]) -> str:
    pairs = [
        f"rank {own} on {hellos[own].host} does not reach rank {rank} at "
        f"{join_address(host, hellos[rank].port)} ({why})"
        for own, mine in enumerate(failures)
        for rank, host, why in mine
        if rank in unreached
    ]
    return (
        "handshake: expected every worker to reach every other one, but " + "; ".join(pairs) + ". Open the TCP ports "
        "between the executors' hosts, or let SPARK_LOCAL_IP on each host name the address that the others reach"
    )


def own_addresses(*, but: str) -> tuple[str, ...]:
    """Addresses of this host that another one may reach, except ``but``."""
    found = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or "%" in entry.address:
                continue
            address = ipaddress.ip_address(entry.address)
            if not address.is_loopback and not address.is_link_local and entry.address != but:
                found.append(entry.address)
    return tuple(found)


def past_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """The variable by which gRPC speaks to ``hosts`` directly, where ``environ`` would send it through a proxy."""
    if not any(environ.get(name) for name in _PROXIES):
        return {}
    already = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    return {"no_grpc_proxy": ",".join([*filter(None, already.split(",")), *dict.fromkeys(hosts)])}
