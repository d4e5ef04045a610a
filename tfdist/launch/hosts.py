"""What executors say of themselves, and pure rules over it: differences that matter, folders that are not shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import LaunchError
from tfdist.launch.devices import visible_devices

# Code, models and arrays travel between the driver and the workers, by reference to these packages.
MUST_AGREE = ("tfdist", "tensorflow", "keras", "numpy")
MUST_BE_THERE = (*MUST_AGREE, "pyarrow")
# A session that a script makes takes the variable only; spark-submit turns its setting into the variable.
INTERPRETER_REMEDY = (
    "start the session with PYSPARK_PYTHON (or spark-submit with spark.pyspark.python) set to an interpreter with the "
    "driver's packages that every executor has"
)


@dataclass(frozen=True)
class Look:
    """What a process found in a folder of the job's.

    Args:
        seen: it found what the driver had written there.
        write_error: why it could not write there; empty when it could.
        shared: it found what the first executor had written there; None when that could not write.
    """

    seen: bool
    write_error: str = ""
    shared: bool | None = True


@dataclass(frozen=True)
class HostFacts:
    """What the driver, or the task in one slot, says of its host and of its Python.

    Args:
        rank: number of the task; -1 for the driver.
        host: the host's own name.
        address: name or address by which peers reach it.
        user: who the process runs as.
        interpreter: path of Python.
        python: its version.
        versions: package to version, None for one that is not installed; the builds of TensorFlow count as one.
        devices: addresses that Spark gave the task, by resource.
        cuda_visible_devices: that variable, None when it is not set.
        cores: that the process may use.
        free_memory: bytes.
        local_dir: where workers keep their temporary files.
        free_disk: bytes free there.
        proxies: names of the variables that are set.
        folders: setting to what was found in its folder.
    """

    rank: int
    host: str
    address: str
    user: str
    interpreter: str
    python: str
    versions: Mapping[str, str | None]
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cuda_visible_devices: str | None = None
    cores: int = 1
    free_memory: int = 0
    local_dir: str = ""
    free_disk: int = 0
    proxies: tuple[str, ...] = ()
    folders: Mapping[str, Look] = field(default_factory=dict)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> HostFacts:
        changed = {
            "devices": {name: tuple(addresses) for name, addresses in raw["devices"].items()},
            "proxies": tuple(raw["proxies"]),
            "folders": {setting: Look(*found) for setting, found in raw["folders"].items()},
        }
        return HostFacts(**{**raw, **changed})


def problems(driver: HostFacts, hosts: Sequence[HostFacts], folders: Mapping[str, str]) -> list[str]:
    """Everything that would stop a training, each with what to change.

    Args:
        driver: the driver.
        hosts: the tasks, in the order of their ranks.
        folders: setting to path, of the folders that they looked into.
    """
    found = _environments(driver, hosts)
    for setting, path in folders.items():
        found += _folder(setting, path, driver, hosts)
    return found


def device_problems(hosts: Sequence[HostFacts], resource: str) -> list[str]:
    """GPUs that a worker would not find, although Spark gave them to it."""
    found = []
    for one in _first_of_each(hosts, lambda h: (h.host, h.devices.get(resource), h.cuda_visible_devices)):
        addresses = one.devices.get(resource, ())
        try:
            visible_devices(addresses, one.cuda_visible_devices)
        except LaunchError as error:
            found.append(f"spark.executor.resource.{resource}: on {one.host}: {error}; correct either of them there")
        if not addresses:
            found.append(
                f"spark.task.resource.{resource}.amount: expected addresses of GPUs for each task, Spark gave none on "
                f"{one.host}; does the discovery script list them there?"
            )
    return found


def notes(hosts: Sequence[HostFacts], resource: str) -> list[str]:
    """What a user may wonder about and what does no harm."""
    found = []
    proxies = sorted({name for host in hosts for name in host.proxies})
    if proxies:
        found.append(f"{', '.join(proxies)} set on executors; workers reach each other past proxies")
    times = Counter((host.host, device) for host in hosts for device in host.devices.get(resource, ()))
    found += [f"{n} tasks share the GPU {device} on {host}" for (host, device), n in times.items() if n > 1]
    return found


def _environments(driver: HostFacts, hosts: Sequence[HostFacts]) -> list[str]:
    """Packages that differ or are not there; one text for each interpreter, since one setting mends them all."""
    found = []
    wanted = {name: driver.versions.get(name) or hosts[0].versions.get(name) for name in MUST_AGREE}
    for one in _first_of_each(hosts, lambda h: (h.interpreter, sorted(h.versions.items()))):
        differences = _differences(wanted, one)
        alike = [h.host for h in hosts if (h.interpreter, h.versions) == (one.interpreter, one.versions)]
        where = _listed(alike)
        if differences and one.interpreter != driver.interpreter:
            found.append(
                "PYSPARK_PYTHON: expected the driver's packages on the executors; the driver runs "
                f"{driver.interpreter} (Python {driver.python}), {where} runs {one.interpreter} (Python {one.python}) "
                f"with {'; '.join(differences.values())}; {INTERPRETER_REMEDY}"
            )
        else:
            found += [
                f"{name}: expected {wanted.get(name) or 'it'} on all executors, as elsewhere, but {where} "
                f"({one.interpreter}) has {text}; install the same there"
                for name, text in differences.items()
            ]
    return found


def _differences(wanted: Mapping[str, str | None], one: HostFacts) -> dict[str, str]:
    found = {}
    for package in MUST_BE_THERE:
        there = one.versions.get(package)
        if there is None:
            found[package] = f"no {package}"
        elif wanted.get(package) and there != wanted[package]:
            found[package] = f"{package} {there}, not {wanted[package]}"
    return found


def _folder(setting: str, path: str, driver: HostFacts, hosts: Sequence[HostFacts]) -> list[str]:
    """At most one text for a folder: that it is not shared explains why it cannot be written to."""
    shared = f"{setting}: expected a folder that the driver and all executors share, got {path}, where"
    writable, remedy = f"{setting}: expected a folder that all can write to, got {path}", "name another folder"
    looks = [(host, host.folders[setting]) for host in hosts]
    blind = [host.host for host, look in looks if not look.seen]
    refused = {
        host.host: f"{host.user} on {host.host} ({look.write_error})" for host, look in looks if look.write_error
    }
    apart = [host.host for host, look in looks if look.shared is False]
    why = driver.folders[setting].write_error
    if why:
        return [f"{writable}, refused to {driver.user} on the driver ({why}); change its permissions, or {remedy}"]
    if blind:
        wrote = f"what the driver ({driver.host}) wrote"
        return [f"{shared} {_listed(blind)} does not find {wrote}; name a folder of a shared file system"]
    if refused:
        return [f"{writable}, refused to {_listed(refused.values())}; change its permissions, or {remedy}"]
    if apart:
        return [f"{shared} {_listed(apart)} does not find what {hosts[0].host} wrote; name one of a shared file system"]
    return []


def _listed(names: Iterable[str]) -> str:
    """Each name once; of a hundred hosts the first ones do."""
    each = list(dict.fromkeys(names))
    return ", ".join(each[:5]) + (f" and {len(each) - 5} more" if len(each) > 5 else "")


def _first_of_each(hosts: Sequence[HostFacts], key: Callable[[HostFacts], object]) -> list[HostFacts]:
    found: dict[str, HostFacts] = {}
    for host in hosts:
        found.setdefault(repr(key(host)), host)
    return list(found.values())
