"""Launching, as far as it is pure: devices, preflight, failures, programs, the channel."""

from __future__ import annotations

import os
import pickle
import queue
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import WorkerContext, enter_training
from tfdist.errors import ConfigError, LaunchError, PreflightError, WorkerError
from tfdist.launch import preflight
from tfdist.launch.channel import ChannelAddress, connect, listen
from tfdist.launch.devices import first_devices, memory_growth, visible_devices
from tfdist.launch.failures import TrainingEndedError, cause, find_report, worker_error
from tfdist.launch.feed import Feed
from tfdist.launch.local import _devices as local_devices
from tfdist.launch.ports import reserve_port
from tfdist.launch.preflight import SparkFacts
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import Failure, LaunchPlan
from tfdist.launch.pulse import PULSE, Pulse, new_page, note


def test_gpu_indexes_count_into_the_existing_list() -> None:
    """Spark's addresses 0 and 1 under CUDA_VISIBLE_DEVICES=2,3 are devices 2 and 3; a UUID stands for itself."""
    assert visible_devices(["0", "1"], "2,3") == ("2", "3")
    assert visible_devices(["0", "1"], None) == ("0", "1")
    assert visible_devices(["MIG-7a", "GPU-b1"], "0,1") == ("GPU-b1", "MIG-7a")


def test_gpus_come_in_one_order() -> None:
    """However Spark orders the addresses of a task, indexes come by number and UUIDs as texts."""
    assert visible_devices(["10", "9", "0"], None) == ("0", "9", "10")
    assert visible_devices(["1", "0"], "GPU-z, GPU-a") == ("GPU-z", "GPU-a")
    assert visible_devices(["GPU-b", "GPU-a"], None) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize("existing", ["4,5", "4,5,-1,6", "", "-1"])
def test_a_gpu_index_beyond_the_list_is_refused(existing: str) -> None:
    """An address that CUDA_VISIBLE_DEVICES does not hold, or hides as CUDA does, is an error that names both."""
    with pytest.raises(LaunchError, match=rf"GPU address 2: .*CUDA_VISIBLE_DEVICES={existing}$"):
        visible_devices(["2"], existing)


def test_what_cuda_would_ignore_in_silence_is_refused() -> None:
    """Indexes beside UUIDs, a second MIG slice in one process, and fewer GPUs than a worker's share are errors."""
    with pytest.raises(LaunchError, match="either indexes or UUIDs"):
        visible_devices(["0", "GPU-a"], None)
    with pytest.raises(LaunchError, match="one MIG slice for each worker, got MIG-a, MIG-b"):
        first_devices(["MIG-a", "MIG-b"], 2)
    with pytest.raises(LaunchError, match="expected 2 GPUs, got 1: 0"):
        first_devices(["0"], 2)
    assert first_devices(["MIG-a", "MIG-b"], 1) == ("MIG-a",)
    assert first_devices(["0", "1", "2"], 2) == ("0", "1")


def test_memory_grows_where_gpus_are_shared_and_where_the_user_says_so() -> None:
    """The option goes first; without it a variable of the user's stays, and a shared GPU makes memory grow."""
    own = {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    assert memory_growth(None, False, {}) == memory_growth(None, True, own) == {}
    assert memory_growth(None, True, {}) == memory_growth(True, False, own) == {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert memory_growth(False, True, {}) == own


@pytest.mark.parametrize(("amount", "shared"), [("0.5", True), ("1", False), ("2", False), (None, False), ("x", False)])
def test_a_fraction_of_a_gpu_is_a_shared_one(amount: str | None, shared: bool) -> None:
    """Tasks share a GPU where each takes less than one."""
    conf = {} if amount is None else {"spark.task.resource.gpu.amount": amount}
    assert preflight.shares_gpus(conf, "gpu") is shared


def test_gpus_that_do_not_divide_evenly_are_refused_with_numbers_that_do() -> None:
    """TensorFlow's strategy takes the same number on each worker; 'mirrored' takes one worker."""
    assert preflight.uneven_devices(4, 2, "multi_worker_mirrored") == []
    assert preflight.uneven_devices(2, 1, "mirrored") == []
    (uneven,) = preflight.uneven_devices(5, 3, "multi_worker_mirrored")
    assert "use 3 or 6 slots" in uneven
    (apart,) = preflight.uneven_devices(4, 2, "mirrored")
    assert "those of 2 Spark tasks" in apart


def test_local_workers_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this host share what CUDA_VISIBLE_DEVICES lists, else what nvidia-smi does; too few are refused."""
    plan = LaunchPlan("run", 2, 3, "multi_worker_mirrored", use_gpu=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert local_devices(plan) == [("3", "5"), ("6",)]
    assert local_devices(replace(plan, gpus=("0", "1", "2"))) == [("0", "1"), ("2",)]
    assert local_devices(replace(plan, use_gpu=False)) == [(), ()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(PreflightError, match=r"expected 3 GPUs on this host, found 2 \(CUDA_VISIBLE_DEVICES=3,5\)"):
        local_devices(plan)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2; do echo "GPU $i: NVIDIA A (UUID: GPU-a$i)"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert local_devices(plan) == [("0", "1"), ("2",)]
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(PreflightError, match="found 0; use fewer slots"):
        local_devices(plan)


@pytest.mark.parametrize(
    ("slots", "amount", "tasks"), [(4, "1", 4), (4, "2", 2), (3, "2", 2), (4, "0.5", 4), (1, "4", 1)]
)
def test_gpu_slots_take_as_few_tasks_as_hold_them(slots: int, amount: str, tasks: int) -> None:
    """The number of tasks is the slots over the GPUs of a task, rounded up; a fraction is one GPU a task."""
    conf = {"spark.task.resource.gpu.amount": amount}
    assert preflight.tasks_for(slots, conf, use_gpu=True, gpu_resource_name="gpu") == (tasks, [])


def test_missing_gpu_configuration_names_the_settings() -> None:
    """GPU training without GPU scheduling says which keys to set."""
    _, problems = preflight.tasks_for(2, {}, use_gpu=True, gpu_resource_name="gpu")
    assert "spark.task.resource.gpu.amount" in problems[0]
    assert "spark.executor.resource.gpu.amount" in problems[0]


@pytest.mark.parametrize(
    ("master", "conf", "most"),
    [
        ("local", {}, 1),
        ("local[3]", {}, 3),
        ("local[*]", {}, 6),
        ("local[4,2]", {"spark.task.cpus": "2"}, 2),
        ("local-cluster[2,3,1024]", {"spark.task.cpus": "2"}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "2"}, 6),
        ("spark://host:7077", {"spark.executor.instances": "3", "spark.executor.cores": "2"}, None),
    ],
)
def test_a_clusters_size_is_read_from_its_configuration(master: str, conf: dict[str, str], most: int | None) -> None:
    """The number of concurrent tasks follows from the master URL and the executors, where they fix it."""
    assert preflight.most_tasks(SparkFacts(master, conf, cores=6)) == most


@pytest.mark.parametrize(("wanted", "ranks"), [("chief", [0]), ("all", [0, 1, 2]), ("none", []), (2, [2]), (0, [0])])
def test_a_plan_says_whose_output_is_shown(wanted: Any, ranks: list[int]) -> None:
    """The chief's lines, everybody's, nobody's or those of one rank go to the driver."""
    plan = LaunchPlan("run", 3, 3, "multi_worker_mirrored", show_output=wanted)
    assert [rank for rank in range(3) if plan.shows(rank)] == ranks


def test_all_preflight_problems_come_together() -> None:
    """Dynamic allocation and too few slots are reported in one go, with numbers and settings."""
    facts = SparkFacts("local-cluster[1,1,1024]", {"spark.dynamicAllocation.enabled": "true"})
    found = preflight.problems(facts, 4)
    assert len(found) == 2
    assert "spark.dynamicAllocation.enabled" in found[0]
    assert "4 tasks" in found[1]
    assert "runs 1 at most" in found[1]


def test_the_first_failure_that_is_no_consequence_is_the_cause() -> None:
    """A survivor's broken collective never hides the worker that broke it."""
    survivor = Failure(0, "a", "UnavailableError", "Socket closed", secondary=True)
    guilty = Failure(1, "b", "builtins.ValueError", "bad rate")
    assert cause([survivor, guilty]) is guilty
    assert cause([survivor]) is survivor


class OwnError(Exception):
    """An error that a train function could define."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def test_a_workers_error_keeps_its_type() -> None:
    """The driver's error is both a WorkerError and of the worker's type, with rank, host and traceback."""
    failure = Failure(1, "b", f"{__name__}.OwnError", "1, 2", "Traceback ...\nOwnError: 1, 2", ("line",))
    error = worker_error(failure)
    assert isinstance(error, OwnError)
    assert isinstance(error, WorkerError)
    assert (error.rank, error.host, error.error_type) == (1, "b", f"{__name__}.OwnError")
    assert "rank 1 on b" in str(error)
    assert "Traceback ..." in str(error)


class ReadOnlyRankError(Exception):
    """Has a property where a worker's error has an attribute."""

    @property
    def rank(self) -> int:
        return 7


class FrozenError(Exception):
    """Takes no attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_errors_with_properties_of_their_own_arrive() -> None:
    """TensorFlow's errors and a type with a read-only rank keep their type; one that takes no rank is told."""
    import tensorflow as tf

    for kind, keeps in ((tf.errors.ResourceExhaustedError, True), (ReadOnlyRankError, True), (FrozenError, False)):
        error = worker_error(Failure(1, "host", f"{kind.__module__}.{kind.__qualname__}", "all is full"))
        assert isinstance(error, kind) is keeps
        assert error.rank == 1
        assert "rank 1 on host" in str(error)
        assert "all is full" in str(error)


@pytest.mark.parametrize("name", ["no.such.module.Error", "builtins.len", "builtins.KeyboardInterrupt", "SIGKILL"])
def test_a_type_that_cannot_be_had_becomes_a_plain_worker_error(name: str) -> None:
    """What is no importable exception type is named in the text of a plain WorkerError."""
    error = worker_error(Failure(0, "a", name, "text"))
    assert type(error) is WorkerError
    assert name.removeprefix("builtins.") in str(error)


@given(st.text(), st.lists(st.text(), max_size=3))
def test_a_failure_survives_inside_sparks_error_text(message: str, lines: list[str]) -> None:
    """A failure is found again in the middle of a Spark traceback, whatever its text."""
    failure = Failure(1, "b", "builtins.ValueError", message, "trace\nback", tuple(lines))
    text = f"org.apache.spark.SparkException: Job aborted\n  x.Y: {TrainingEndedError(failure)}\n\tat org.apache"
    assert find_report(text) == failure
    assert find_report("something else") is None


def test_a_program_keeps_the_file_name_of_its_code() -> None:
    """A function of a file beside the script travels by value and its traceback still names the file."""

    def local(x: int) -> int:
        return x + 1

    program = pickle.loads(dump_program(lambda: local(1), "train_fn"))
    assert program() == 2
    assert program.__code__.co_filename == __file__


def test_a_program_that_cannot_be_sent_is_refused_with_advice() -> None:
    """A lock in a closure is an error that names the function and says what to do."""
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"train_fn: .*lock.*inside the function"):
        dump_program(lambda: lock, "train_fn")


def test_a_reserved_port_is_given_to_nobody_but_can_be_listened_on() -> None:
    """While a port is reserved nobody else is given it, and a server with SO_REUSEADDR can take it."""
    with reserve_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass


def test_events_arrive_in_order_and_a_closed_line_is_noticed() -> None:
    """Every event sent before the line closed has been received when the driver has waited for it."""
    received: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    with listen("127.0.0.1", "127.0.0.1", received.put) as channel:
        with connect(channel.address) as send:
            for step in range(100):
                send({"kind": "epoch", "rank": 0, "step": step})
        channel.wait_until_closed(10)
        assert [received.get_nowait()["step"] for _ in range(100)] == list(range(100))


def test_a_worker_notices_that_the_driver_ended_the_run() -> None:
    """When the driver stops listening, a line that is still open ends."""
    received: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    with ExitStack() as worker:
        with listen("127.0.0.1", "127.0.0.1", received.put) as channel:
            line = worker.enter_context(connect(channel.address))
            line({"kind": "epoch", "rank": 0})
            assert received.get(timeout=30)["kind"] == "epoch"
            assert select.select([line.fd], [], [], 0)[0] == []
        assert select.select([line.fd], [], [], 30)[0] == [line.fd]


def batches(count: int) -> Iterator[pa.RecordBatch]:
    return (pa.record_batch({"c0": np.arange(10_000) + 10_000 * i}) for i in range(count))


def test_a_feed_hands_all_rows_over() -> None:
    """What goes in comes out at the other end in order, then an end; without a batch the end comes at once."""
    for count in (0, 40):
        with closing(Feed(batches(count))) as feed, feed.theirs.dup() as process:
            feed.start(lambda: None)
            with process.makefile("rb") as stream:
                found = pa.ipc.open_stream(stream).read_all()["c0"].to_pylist() if stream.peek(1) else []
            assert found == list(range(10_000 * count))
            feed.stop()
            feed.check()


def test_a_feed_whose_process_wants_no_more_ends() -> None:
    """A process that ended, and one that does not read, hold nothing up: the rest of the rows is left where it is."""
    with closing(Feed(batches(10**9))) as feed:
        process = feed.theirs.dup()
        feed.start(lambda: None)
        process.recv(100)
        process.close()
        feed.stop()
        feed.check()
    with closing(Feed(batches(10**9))) as feed, feed.theirs.dup() as process:
        feed.start(lambda: None)
        process.recv(100)
        feed.stop()
        feed.check()


def test_rows_that_cannot_be_computed_end_the_process() -> None:
    """An error of the rows calls for the end of the process, before any end of the stream, and is raised."""

    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        raise OverflowError("of the rows")

    ended = threading.Event()
    with closing(Feed(failing())) as feed, feed.theirs.dup() as process:
        feed.start(ended.set)
        assert process.recv(8)
        assert ended.wait(30)
        with pytest.raises(OverflowError, match="of the rows"):
            feed.check()


def test_a_stranger_without_the_secret_is_not_heard() -> None:
    """A client that does not know the secret of the run is cut off and nothing it says arrives."""
    received: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    with listen("127.0.0.1", "127.0.0.1", received.put) as channel:
        host, port = channel.address.host, channel.address.port
        with socket.create_connection((host, port), timeout=30) as stranger:
            nonce = stranger.recv(100)
            stranger.sendall(nonce + b'{"kind": "epoch", "rank": 0}\n')
            with suppress(ConnectionResetError):  # what it has said is thrown away unread
                assert stranger.recv(100) == b""
        wrong = ChannelAddress(host, port, "guess")
        with connect(wrong) as send:
            send({"kind": "epoch", "rank": 0})
        channel.wait_until_closed(10)
        with connect(channel.address) as send:
            send({"kind": "after", "rank": 0})
        channel.wait_until_closed(10)
        assert received.get(timeout=10)["kind"] == "after"
        assert received.empty()


def test_the_channel_listens_only_where_it_is_bound_and_its_secret_is_not_shown() -> None:
    """Another address of the host is refused; the secret of a run is no part of what its address looks like."""
    with listen("127.0.0.1", "127.0.0.1", lambda _: None) as channel:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", channel.address.port)):
            pass
        assert channel.address.secret not in repr(channel.address)


def test_a_note_is_told_once_and_the_newest_counts(tmp_path: Path) -> None:
    """What a process leaves in its page comes once; what it takes back, and a note half written, does not come."""
    new_page(tmp_path)
    before = enter_training(WorkerContext(scratch_dir=tmp_path))
    pulse = Pulse(os.getpid(), tmp_path, None)
    try:
        assert pulse.noted() is None
        note("step", step=1)
        note("step", step=2, text="é" * 100)
        found = pulse.noted()
        assert found is not None
        assert (found["kind"], found["step"], found["text"]) == ("step", 2, "é" * 100)
        assert pulse.noted() is None
        note("step", step=3)
        note(None)
        assert pulse.noted() is None
        note("step", step=4)
        with open(tmp_path / PULSE, "r+b") as page:
            page.seek(60)
            page.write(b"#")
        assert pulse.noted() is None
        note("step", text="x" * (1 << 16))  # has no room
        assert pulse.noted() is None
        note("step", step=5)
        assert (pulse.noted() or {})["step"] == 5
        assert pulse.take().count == 0
    finally:
        pulse.close()
        enter_training(before)


def test_without_a_driver_to_reach_events_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that cannot reach the driver goes on and says so once."""
    with reserve_port() as port, connect(ChannelAddress("127.0.0.1", port, "s")) as send:
        send({"kind": "epoch", "rank": 0})
    assert "cannot be reached" in capfd.readouterr().err


def test_where_the_line_is_needed_a_worker_that_finds_no_driver_says_what_to_set() -> None:
    """Over Spark Connect a worker that cannot reach the client fails, naming the address and the variable."""
    with (
        reserve_port() as port,
        pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port} \(Connection refused\); set TFDIST_DRIVER_HOST"),
        connect(ChannelAddress("127.0.0.1", port, "s", needed=True)),
    ):
        pass
