"""Doors on real sockets: who reaches whom, and under which address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tfdist.cluster import WorkerHello
from tfdist.errors import LaunchError, PortTakenError
from tfdist.launch.ports import with_other_ports
from tfdist.launch.reach import knock, meet, open_door, own_addresses, past_proxies

SECRET = "of this run"


class Gatherer:
    """An all-gather between threads."""

    def __init__(self, count: int) -> None:
        self.texts: list[str] = [""] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def of(self, rank: int) -> Callable[[str], Sequence[str]]:
        def all_gather(text: str) -> Sequence[str]:
            self.texts[rank] = text
            self.barrier.wait()
            found = list(self.texts)
            self.barrier.wait()
            return found

        return all_gather


def meet_all(hellos: Sequence[WorkerHello]) -> list[Any]:
    """What ``meet`` returns or raises on each of several workers at the same time."""
    gatherer, found = Gatherer(len(hellos)), [None] * len(hellos)

    def take_part(hello: WorkerHello) -> None:
        try:
            found[hello.rank] = meet(hello, SECRET, gatherer.of(hello.rank))  # type: ignore[call-overload]
        except LaunchError as error:
            found[hello.rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=take_part, args=(hello,)) for hello in hellos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_door_says_which_rank_is_behind_it_and_can_be_closed_for_tensorflow() -> None:
    """The right rank with the right secret is reached, no other; afterwards the reserved port can be listened on."""
    with open_door(3, SECRET) as (port, close):
        assert knock("127.0.0.1", port, 3, SECRET) is None
        assert knock("127.0.0.1", port, 2, SECRET) == "somebody else answers there"
        assert knock("127.0.0.1", port, 3, "guess") == "somebody else answers there"
        close()
        assert "refused" in (knock("127.0.0.1", port, 3, SECRET) or "")
        with socket.create_server(("", port)):
            pass


def test_workers_that_reach_each_other_keep_their_addresses() -> None:
    """When every pair meets, the greetings come back as they were, by rank."""
    with ExitStack() as doors:
        ports = [doors.enter_context(open_door(rank, SECRET))[0] for rank in range(3)]
        hellos = [WorkerHello(rank, "127.0.0.1", port) for rank, port in enumerate(ports)]
        assert meet_all(hellos) == [hellos] * 3


@pytest.fixture
def two_doors() -> Any:
    """Rank 1's name leads to another process, as a name that resolves to 127.0.1.1 does on its peers."""
    with open_door(0, SECRET) as (first, _), open_door(1, SECRET) as (second, _), open_door(7, SECRET) as (wrong, _):
        yield WorkerHello(0, "127.0.0.1", first), WorkerHello(1, "127.0.0.1", second), wrong


def test_an_address_that_leads_elsewhere_is_replaced_by_one_that_all_reach(two_doors: Any) -> None:
    """A worker whose advertised host is not reached is known by another of its addresses, on all workers."""
    zero, one, _ = two_doors
    hello = replace(one, host="no-such-host.invalid", other_hosts=("192.0.2.1.invalid", "127.0.0.1"))
    assert [[h.host for h in found] for found in meet_all([zero, hello])] == [["127.0.0.1", "127.0.0.1"]] * 2


def test_a_pair_that_cannot_reach_each_other_is_named_on_all_workers(two_doors: Any) -> None:
    """Without any usable address the error names who does not reach whom, where, and why."""
    zero, one, wrong = two_doors
    for error in meet_all([zero, replace(one, port=wrong)]):
        assert isinstance(error, LaunchError)
        assert f"rank 0 on 127.0.0.1 does not reach rank 1 at 127.0.0.1:{wrong} (somebody else answers there)" in str(
            error
        )
        assert "rank 1 on" not in str(error)


def test_addresses_of_this_host_can_be_reached_from_elsewhere() -> None:
    """Neither loopback nor link-local addresses are offered to peers, nor the one that is offered already."""
    found = own_addresses(but="")
    assert not any(a.startswith(("127.", "169.254.", "fe80")) or a == "::1" for a in found)
    for address in found:
        assert address not in own_addresses(but=address)


def test_peers_are_reached_past_a_proxy() -> None:
    """With a proxy in the environment gRPC is told the peers' hosts; the user's own exceptions stay; else nothing."""
    assert past_proxies({"no_proxy": "a"}, ["h1"]) == {}
    assert past_proxies({"https_proxy": "http://p:1"}, ["h1", "h2", "h1"]) == {"no_grpc_proxy": "h1,h2"}
    assert past_proxies({"http_proxy": "p", "no_proxy": "a,b"}, ["h1"]) == {"no_grpc_proxy": "a,b,h1"}


def test_a_taken_port_begins_the_launch_anew_some_times() -> None:
    """Two taken ports are not noticed; when every launch meets one, the error is raised."""
    launches: list[int] = []

    def launch(until: int) -> int:
        launches.append(1)
        if len(launches) <= until:
            raise PortTakenError("taken")
        return len(launches)

    assert with_other_ports(lambda: launch(2)) == 3
    launches.clear()
    with pytest.raises(PortTakenError):
        with_other_ports(lambda: launch(100))
    assert len(launches) == 4
