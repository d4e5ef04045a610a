"""What every launcher must do, on real processes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tfdist.errors import TfdistError, WorkerError
from tfdist.launch.local import LocalLauncher
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import Event, LaunchPlan, emit, new_run_id
from tfdist.launch.warm import _start_server, _started, identity, runtime_dir

Run = Callable[..., list[Any]]


@pytest.fixture(params=["local", "spark"])
def run(request: pytest.FixtureRequest) -> Run:
    """Launches a function on two workers and returns what each returned."""
    if request.param == "local":
        launcher: Any = LocalLauncher()
    else:
        from tfdist.launch.spark import SparkLauncher

        launcher = SparkLauncher(request.getfixturevalue("spark"))

    def call(function: Callable[[], Any], on_event: Callable[[Event], None] = lambda _: None, **plan: Any) -> list[Any]:
        launch_plan = LaunchPlan(new_run_id(), 2, 2, "multi_worker_mirrored", **{"results": "all", **plan})
        program = dump_program(lambda: json.dumps(function()).encode(), "function")
        return [json.loads(value) for value in launcher.launch(program, launch_plan, on_event)]

    return call


def who() -> dict[str, Any]:
    from tfdist.cluster import worker_context

    context = worker_context()
    assert context.scratch_dir is not None
    config = json.loads(os.environ["TF_CONFIG"])
    return {
        "rank": context.rank,
        "world": context.world_size,
        "chief": context.is_chief,
        "same": tuple(config["cluster"]["worker"]) == context.addresses and config["task"]["index"] == context.rank,
        "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        "scratch": str(context.scratch_dir),
        "pid": os.getpid(),
    }


def test_every_rank_knows_who_it_is_and_leaves_nothing(run: Run) -> None:
    """Ranks, TF_CONFIG and context agree; afterwards neither the processes nor their scratch folders exist."""
    workers = run(who)
    assert [w["rank"] for w in workers] == [0, 1]
    assert [w["chief"] for w in workers] == [True, False]
    assert all(w["same"] and w["world"] == 2 and w["devices"] == "" for w in workers)
    assert not any(Path(w["scratch"]).exists() for w in workers)
    assert not any(psutil.pid_exists(w["pid"]) for w in workers)


def test_only_the_chiefs_value_returns_when_no_more_is_asked(run: Run) -> None:
    """With results="chief" one value comes back, that of rank 0."""
    assert [w["rank"] for w in run(who, results="chief")] == [0]


def all_reduce_many_times() -> float:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def replica(value: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", value * tf.ones([]))

    @tf.function
    def step(value: Any) -> Any:
        return strategy.run(replica, args=(value,))

    total = 0.0
    for i in range(20):
        total += float(step(tf.constant(float(i))))
    return total


def test_workers_reach_each_other_again_and_again(run: Run) -> None:
    """Four launches in a row meet in real collectives and all ranks get the same sums."""
    for _ in range(4):
        assert run(all_reduce_many_times) == [380.0, 380.0]


def leave_at_once_or_late() -> float:
    import tensorflow as tf

    from tfdist.cluster import worker_context

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    reduced = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])))
    if worker_context().rank == 0:
        time.sleep(2)
    return float(reduced)


def test_a_quick_worker_waits_for_a_slow_one(run: Run) -> None:
    """A rank that is done two seconds before its peer does not break it."""
    assert run(leave_at_once_or_late) == [2.0, 2.0]


def send_events() -> None:
    from tfdist.cluster import worker_context

    for step in range(50):
        emit("step", step=step)
        print(f"line {step} of {worker_context().rank}")


def test_events_and_lines_arrive_in_order_per_rank(run: Run) -> None:
    """Every event and every line of every rank arrives, in its order, before the launch returns."""
    events: list[Event] = []
    run(send_events, events.append, show_output="all")
    for rank in (0, 1):
        assert [e["step"] for e in events if e["kind"] == "step" and e["rank"] == rank] == list(range(50))
        lines = [e["text"] for e in events if e["kind"] == "line" and e["rank"] == rank]
        assert [x for x in lines if x.startswith("line ")] == [f"line {i} of {rank}" for i in range(50)]


def end_rank_1(how: Callable[[], Any]) -> Callable[[], None]:
    def function() -> None:
        from tfdist.cluster import worker_context

        if worker_context().rank == 1:
            print("last words", flush=True)
            how()
        time.sleep(600)

    return function


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (os.abort, "SIGABRT"),
        (lambda: ctypes.string_at(0), "SIGSEGV"),
        (lambda: os._exit(3), "SystemExit"),
    ],
    ids=["kill", "abort", "segfault", "exit"],
)
def test_a_process_that_dies_is_named_with_its_last_words(run: Run, how: Callable[[], Any], name: str) -> None:
    """A native crash or a kill of rank 1 is an error with rank, signal and last output; the other rank is ended."""
    with pytest.raises(WorkerError) as caught:
        run(end_rank_1(how))
    assert caught.value.rank == 1
    assert caught.value.error_type == name
    assert "last words" in caught.value.last_output
    assert run(who)[1]["rank"] == 1


def fail_after_a_survivor() -> None:
    import tensorflow as tf

    from tfdist.cluster import worker_context

    rank = worker_context().rank
    for i in range(150):
        print(f"rank {rank} line {i}")
    if rank == 0:  # what a survivor says when its collective is broken
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    time.sleep(1)
    print("rank 1 ends", flush=True)
    os._exit(3)


def test_the_last_lines_are_those_of_the_guilty_rank_though_a_survivor_reports_first(run: Run) -> None:
    """A broken collective that is reported a second before its cause hides neither that rank nor its last 100 lines."""
    events: list[Event] = []
    with pytest.raises(WorkerError) as caught:
        run(fail_after_a_survivor, events.append, show_output="none")
    assert (caught.value.rank, caught.value.error_type) == (1, "SystemExit")
    assert list(caught.value.last_output) == [*(f"rank 1 line {i}" for i in range(51, 150)), "rank 1 ends"]
    assert not [e for e in events if e["kind"] == "line"]


def return_a_lock() -> Any:
    import threading

    return threading.Lock()


def test_a_value_that_cannot_travel_is_an_error_on_its_rank(run: Run) -> None:
    """A result that cannot be encoded fails the launch with the encoder's own error."""
    with pytest.raises(TypeError, match="lock"):
        run(return_a_lock)


def seen_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("TFDIST_TEST", "PYTHON_WORKER_FACTORY_SECRET")}


def test_env_reaches_the_process_and_sparks_secret_does_not(run: Run) -> None:
    """Variables of the plan are set in the process; the secret of the Spark Python worker is not passed on."""
    assert run(seen_variables, env={"TFDIST_TEST": "1"})[0] == {
        "TFDIST_TEST": "1",
        "PYTHON_WORKER_FACTORY_SECRET": None,
    }


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_cold_start_is_the_same_as_a_warm_one(run: Run, warm: bool) -> None:
    """Workers started as new interpreters and workers forked from a warm parent behave alike."""
    workers = run(who, warm=warm)
    assert [w["rank"] for w in workers] == [0, 1]
    assert run(all_reduce_many_times, warm=warm) == [380.0, 380.0]


def parent_name() -> str:
    return " ".join(psutil.Process(os.getppid()).cmdline())


def test_warm_children_share_one_parent_and_a_changed_environment_gets_another(run: Run) -> None:
    """Two launches fork from the same warm parent on a host; another start-up environment has its own."""

    def parents(**plan: Any) -> set[int]:
        return set(run(lambda: os.getppid(), **plan))

    assert "tfdist.launch.warm" in run(parent_name)[0]
    first = parents()
    assert len(first) == 1
    assert parents() == first
    assert not parents(env={"TFDIST_TEST": "1"}) & first


def test_a_warm_parent_ends_whose_first_owner_ended_while_it_imported(tmp_path: Path) -> None:
    """A launch that is killed in its first seconds leaves no process that waits for it."""
    owner = subprocess.Popen(["sleep", "60"])
    _start_server(tmp_path / "warm.sock", dict(os.environ), owner.pid)
    owner.kill()
    owner.wait()
    assert _started[-1].wait(timeout=60) == 0
    assert not (tmp_path / "warm.sock").exists()


def test_a_late_variable_does_not_change_the_warm_parent() -> None:
    """TF_CONFIG and devices are read after import and are no part of a warm parent's identity; others are."""
    base = {"PATH": "/bin", "TF_CONFIG": "a"}
    assert identity(base, "app-1") == identity({**base, "TF_CONFIG": "b", "CUDA_VISIBLE_DEVICES": "0"}, "app-1")
    assert identity(base, "app-1") != identity({**base, "KERAS_BACKEND": "jax"}, "app-1")
    assert identity(base, "app-1") != identity(base, "app-2")


def test_a_socket_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime folder that others may enter is refused rather than used."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = runtime_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        runtime_dir()


def test_an_error_of_the_event_callback_ends_the_run(run: Run) -> None:
    """When the caller's own callback fails, the training ends and that error is raised."""

    def refuse(event: Event) -> None:
        if event["kind"] == "step":
            raise ZeroDivisionError("callback")

    with pytest.raises(ZeroDivisionError, match="callback"):
        run(lambda: (emit("step"), time.sleep(600))[1], refuse)
    assert run(who)[0]["rank"] == 0


def test_a_failed_launch_is_an_error_of_ours(run: Run) -> None:
    """Whatever goes wrong on a worker derives from TfdistError too."""

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(TfdistError):
        run(fail)
