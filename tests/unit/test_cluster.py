"""Who takes part: handshake, addresses, shares of devices."""

from __future__ import annotations

import ipaddress
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import (
    Roster,
    WorkerContext,
    WorkerHello,
    join_address,
    share_devices,
    split_address,
    tf_config,
    worker_context,
)
from tfdist.errors import LaunchError

hosts = st.one_of(
    st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)
)
ports = st.integers(1, 65535)


@given(hosts, ports)
def test_addresses_split_as_they_were_joined(host: str, port: int) -> None:
    """Any host, IPv6 too, comes back from host:port."""
    assert split_address(join_address(host, port)) == (host, port)


@given(st.ip_addresses(v=6), ports)
def test_sparks_way_to_write_an_ipv6_address_is_understood(host: ipaddress.IPv6Address, port: int) -> None:
    """Spark gives a barrier task's address as eight groups without brackets, then the port."""
    groups = ":".join(f"{int(group, 16):x}" for group in host.exploded.split(":"))
    assert split_address(f"{groups}:{port}") == (str(host), port)


@given(hosts)
def test_a_host_without_a_port_stays_whole(host: str) -> None:
    """A bare host or a bare IPv6 address has no port."""
    assert split_address(host) == (host, None)


@given(st.integers(1, 64), st.integers(1, 64))
def test_device_shares_sum_and_differ_by_at_most_one(slots: int, tasks: int) -> None:
    """Shares of devices sum to the slots and differ by one at most; fewer devices than tasks are refused."""
    if slots < tasks:
        with pytest.raises(ValueError, match="at least one device"):
            share_devices(slots, tasks)
        return
    shares = share_devices(slots, tasks)
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1


def _introduce(addresses: list[str]) -> list[WorkerHello]:
    pairs = [split_address(address) for address in addresses]
    return [WorkerHello(rank, host, port or 0, {"keras": "3.15.1"}) for rank, (host, port) in enumerate(pairs)]


hellos = st.lists(st.builds(join_address, hosts, ports), min_size=1, max_size=8, unique=True).map(_introduce)


@given(hellos, st.data())
def test_every_rank_gets_the_same_cluster_and_its_own_index(workers: list[WorkerHello], data: st.DataObject) -> None:
    """Whatever the order of the greetings, TF_CONFIG lists all addresses by rank and gives each rank its index."""
    shuffled = [WorkerHello.from_json(w.to_json()) for w in data.draw(st.permutations(workers))]
    roster = Roster.gather(shuffled)
    assert roster.workers == tuple(workers)
    for rank in range(len(workers)):
        config = json.loads(tf_config(roster, rank))
        assert config["task"] == {"type": "worker", "index": rank}
        assert [split_address(a) for a in config["cluster"]["worker"]] == [(w.host, w.port) for w in workers]


def test_a_missing_rank_is_refused() -> None:
    """A handshake without one of the ranks is an error that lists who came."""
    with pytest.raises(LaunchError, match=r"ranks \[0, 2\]"):
        Roster.gather([WorkerHello(0, "a", 1), WorkerHello(2, "b", 1)])


def test_two_workers_at_one_address_are_refused() -> None:
    """Two ranks that advertise the same address are named."""
    with pytest.raises(LaunchError, match="rank 0 and rank 1 both advertise a:1"):
        Roster.gather([WorkerHello(0, "a", 1), WorkerHello(1, "a", 1)])


def test_different_versions_are_named_with_rank_and_host() -> None:
    """Workers with different libraries are refused, naming rank, host, package and both versions."""
    with pytest.raises(LaunchError, match=r"rank 1 on b has keras 3\.12\.0, rank 0 on a has 3\.15\.1"):
        Roster.gather([WorkerHello(0, "a", 1, {"keras": "3.15.1"}), WorkerHello(1, "b", 1, {"keras": "3.12.0"})])


def test_outside_a_training_there_is_one_worker() -> None:
    """On the driver the context is that of a single chief."""
    context = worker_context()
    assert (context.rank, context.world_size, context.is_chief) == (0, 1, True)


@given(st.integers(0, 5), st.integers(1, 6), st.lists(st.text(max_size=5), max_size=3))
def test_a_context_survives_json(rank: int, world: int, addresses: list[str]) -> None:
    """A worker's context is the same after it travelled as JSON."""
    context = WorkerContext(rank, world, tuple(addresses), None, "r", "single")
    assert WorkerContext.from_json(context.to_json()) == context
