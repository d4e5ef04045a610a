"""A TCP port that stays reserved until TensorFlow has taken it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tfdist.errors import PortTakenError

_LAUNCHES = 4
_T = TypeVar("_T")


@contextmanager
def reserve_port() -> Iterator[int]:
    """Hold a free TCP port for the length of the block, in a way that TensorFlow's server can still bind it.

    The socket is bound with SO_REUSEADDR and never listens. Linux lets a second socket with SO_REUSEADDR (gRPC sets
    it) bind and listen beside it, while the kernel gives the port to nobody who asks for any free one. It is bound for
    IPv4 and IPv6, as TensorFlow's server will be.
    """
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM) as holder:
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def with_other_ports(launch: Callable[[], _T]) -> _T:
    """What ``launch`` returns, begun anew when another process takes a worker's port before TensorFlow does.

    Raises:
        PortTakenError: that happened four times.
    """
    for _ in range(_LAUNCHES - 1):
        try:
            return launch()
        except PortTakenError:
            continue
    return launch()
