"""A training across hosts of their own: three network namespaces with addresses, cables and a switch between them.

    python benchmarks/hosts.py [--family 4|6 ...] [--json FILE]        (as root)

A Spark Master and the driver run on ``head`` (.1), a Worker on ``one`` (.2) and one on ``two`` (.3). Two workers train
to the weights of one process. Then the cable of ``two`` is pulled in the middle of a training: the table tells when the
driver's call had ended, what its error says, and when the last training process had ended, also on the host that nobody
reaches. With ``max_restarts=1`` the cable is put back ten seconds later, and the training has to end as an undisturbed
one. With ``--family 6`` the hosts have IPv6 addresses only.

All of it lives in namespaces of its own, the processes too: they end with this program, however that ends, and nothing
of this machine's network is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from standalone import MASTER, WORKER, daemon, daemon_environ

from tfdist.environ import adopt

_INSIDE = "TFDIST_HOSTS_INSIDE"
_APART = ("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
SWITCH, HOSTS = "switch", ("head", "one", "two")


def missing_rights() -> str:
    """Why hosts cannot be made here; empty when they can."""
    try:
        make = "mount -t tmpfs tmpfs /run && ip link add name b type bridge && ip link add name v type veth peer name w"
        done = subprocess.run([*_APART, "sh", "-c", make], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def on_host(name: str) -> tuple[str, ...]:
    """The beginning of a command that runs on host ``name``."""
    return ("ip", "netns", "exec", name)


def address(number: int, family: int) -> str:
    return f"10.77.0.{number}" if family == 4 else f"fd77::{number}"


@contextmanager
def network(family: int) -> Iterator[None]:
    """The hosts, each with a loopback, one address and a cable to the switch; this process is on none of them."""
    ip("netns", "add", SWITCH)
    ip("-n", SWITCH, "link", "add", "name", "bridge0", "type", "bridge")
    ip("-n", SWITCH, "link", "set", "bridge0", "up")
    for number, name in enumerate(HOSTS, 1):
        ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "name", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", SWITCH, "link", "set", f"to-{name}", "master", "bridge0", "up")
        given = (f"{address(number, 4)}/24",) if family == 4 else (f"{address(number, 6)}/64", "nodad")
        ip("-n", name, "addr", "add", *given[:1], "dev", "eth0", *given[1:])
        for link in ("lo", "eth0"):
            ip("-n", name, "link", "set", link, "up")
    try:
        yield
    finally:
        for name in (*HOSTS, SWITCH):
            ip("netns", "del", name)


def spark_environ(number: int, family: int) -> dict[str, str]:
    """What makes Spark's processes on host ``number`` take its address."""
    own = address(number, family)
    if family == 4:
        return {"SPARK_LOCAL_IP": own}
    # Spark writes IPv6 addresses in brackets; Java asks for IPv4 first unless it is told.
    java = "-Djava.net.preferIPv6Addresses=true"
    return {"SPARK_LOCAL_HOSTNAME": f"[{own}]", "SPARK_PREFER_IPV6": "True", "SPARK_DAEMON_JAVA_OPTS": java}


def try_family(family: int, folder: Path) -> dict[str, Any]:
    """Start Spark across the hosts, and the driver on the first; gives what the driver found."""
    with network(family), ExitStack() as cluster:

        def start(kind: str, number: int, *given: str | Path, ready: str) -> str:
            own = address(number, family)
            host = ("--host", own if family == 4 else f"[{own}]", "--port", "0", "--webui-port", "0")
            environ = daemon_environ(**spark_environ(number, family))
            inside = on_host(HOSTS[number - 1])
            return cluster.enter_context(daemon(kind, *host, *given, ready=ready, environ=environ, inside=inside))

        master = start(MASTER, 1, ready=r"spark://[^\s,]+:\d+")
        for number in (2, 3):
            files = ("--cores", "1", "--memory", "2g", "--work-dir", folder / HOSTS[number - 1])
            start(WORKER, number, *files, master, ready="Successfully registered with master")
        driver = Path(__file__).with_name("hosts_driver.py")
        command = [*on_host("head"), sys.executable, driver, master, address(1, family), folder]
        environ = {**daemon_environ(**spark_environ(1, family)), "PYSPARK_PYTHON": sys.executable}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"the driver ended with {done.returncode}: {done.stdout}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(found: dict[str, dict[str, Any]]) -> Table:
    shown = Table("", *(f"IPv{family}" for family in found), show_lines=True)
    for name in next(iter(found.values())):
        shown.add_row(name, *(str(one[name]) for one in found.values()))
    return shown


def move_in(arguments: Sequence[str]) -> int:
    """Run this program in namespaces of its own, which end with it."""
    command = [*_APART, sys.executable, __file__, *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", type=int, choices=(4, 6), default=[4, 6])
    parser.add_argument("--json", type=Path, help="write what was found to this file instead of a table")
    arguments = parser.parse_args()
    if _INSIDE not in os.environ:
        why = missing_rights()
        if why:
            parser.error(f"hosts cannot be made here: {why}; root may, on a machine with iproute2 and util-linux")
        return move_in(sys.argv[1:])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # where ip keeps the names of namespaces
    ip("link", "set", "lo", "up")
    adopt({"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    found = {}
    for family in arguments.family:
        with tempfile.TemporaryDirectory(prefix="tfdist-hosts-") as folder:
            found[str(family)] = try_family(family, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    else:
        Console().print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
