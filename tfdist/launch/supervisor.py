"""What runs in each Spark barrier task: handshake, one training process, its result; without TensorFlow."""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata

import pyarrow as pa
from pyspark import BarrierTaskContext

from tfdist.cluster import Roster, WorkerContext, WorkerHello, share_devices, split_address, tf_config
from tfdist.errors import LaunchError
from tfdist.launch.channel import ChannelAddress, connect
from tfdist.launch.devices import first_devices, memory_growth, visible_devices
from tfdist.launch.failures import SECONDARY_GRACE_S, TrainingEndedError
from tfdist.launch.feed import Feed
from tfdist.launch.protocol import Failure, LaunchPlan
from tfdist.launch.reach import meet, open_door, own_addresses, past_proxies
from tfdist.launch.warm import WarmOwner
from tfdist.launch.watch import Watch, scratch_dir

_MUST_AGREE = ("tfdist", "tensorflow", "tensorflow-cpu", "keras", "numpy")


def supervise_with_rows(
    plan: LaunchPlan, program: bytes, channel: ChannelAddress, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Take part in one training as a Spark barrier task whose rows go to its training process; for ``mapInArrow``.

    Yields:
        On the chief one row for each result, in the column ``result``.

    Raises:
        LaunchError: the workers could not meet.
        TrainingEndedError: the training process ended without a result.
    """
    with closing(Feed(batches)) as feed:
        yield from _in_arrow(supervise(plan, program, channel, feed))


def supervise_alone(
    plan: LaunchPlan, program: bytes, channel: ChannelAddress, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Likewise for a frame whose rows only stand for the tasks."""
    for _ in batches:  # a task whose rows were not read costs Spark the Python worker
        pass
    yield from _in_arrow(supervise(plan, program, channel, batches))


def _in_arrow(outcome: Iterator[list[bytes] | None]) -> Iterator[pa.RecordBatch]:
    for results in outcome:
        if results is not None:
            yield pa.record_batch({"result": pa.array(results, pa.binary())})


def supervise(
    plan: LaunchPlan, program: bytes, channel: ChannelAddress, rows: Feed | Iterator[object]
) -> Iterator[list[bytes] | None]:
    """Take part in one training as a Spark barrier task.

    Args:
        plan: how the training is launched.
        program: the pickled callable to run.
        channel: where the driver listens.
        rows: what the training process gets of the task's rows; other rows than a feed are those of an RDD that only
            stands for the tasks.

    Yields:
        On the chief the bytes that the program returned, of the ranks that ``plan.results`` asks for; None elsewhere.

    Raises:
        LaunchError: the workers could not meet.
        TrainingEndedError: the training process ended without a result.
    """
    feed = rows if isinstance(rows, Feed) else None
    task = BarrierTaskContext.get()
    rank = task.partitionId()
    if len(task.getTaskInfos()) != plan.tasks:
        raise LaunchError(
            f"handshake: expected {plan.tasks} tasks, Spark started {len(task.getTaskInfos())}, one for each partition "
            "of the rows, which were counted before; cache() the frame, so that its partitions stay the same"
        )
    hosts = [split_address(info.address)[0] for info in task.getTaskInfos()]
    host = hosts[rank]
    with (
        open_door(rank, channel.secret) as (port, close_door),
        connect(channel) as send,
        scratch_dir(plan.run_id, rank) as scratch,
    ):
        send({"kind": "arrived", "rank": rank, "hosts": hosts})
        hello = WorkerHello(rank, host, port, _versions(), _devices(task, plan, rank), own_addresses(but=host))
        roster = Roster.gather(meet(hello, channel.secret, task.allGather))
        close_door()
        send({"kind": "joined", "rank": rank, "host": host, "pid": os.getpid(), "devices": list(hello.devices)})
        context = WorkerContext(rank, plan.tasks, roster.addresses, scratch, plan.run_id, plan.strategy)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(hello.devices)}
        if plan.use_gpu:
            env |= memory_growth(plan.gpu_memory_growth, plan.gpus_shared, {**os.environ, **plan.env})
        if plan.tasks > 1:
            env["TF_CONFIG"] = tf_config(roster, rank)
            env |= past_proxies({**os.environ, **plan.env}, [w.host for w in roster.workers])
        # The parent of a Spark Python worker is the daemon (or executor) that lives as long as the executor.
        owner = WarmOwner(os.getppid(), plan.application) if plan.warm else None
        watch = Watch(plan, program, context, hello, env, owner, None if feed is None else feed.theirs)
        with closing(watch):
            if feed is not None:
                feed.start(watch.child.kill)
            outcome = watch.until_done(send, send.fd)
            if feed is not None:
                feed.check()
            if isinstance(outcome, Failure):
                send({"kind": "failed", "rank": rank, "failure": outcome.to_json()})
                if outcome.secondary:
                    threading.Event().wait(SECONDARY_GRACE_S)  # the first to raise is what Spark shows
                raise TrainingEndedError(outcome)
            # Nobody leaves before all are done; see child.stay_for_peers.
            shared = outcome if plan.results == "all" else b""
            gathered = task.allGather(base64.b64encode(shared).decode())
            if feed is not None:
                feed.stop()
    if rank == 0:
        yield [base64.b64decode(text) for text in gathered] if plan.results == "all" else [outcome]
    else:
        yield None


def _versions() -> dict[str, str]:
    found = {}
    for name in _MUST_AGREE:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not {"tensorflow", "tensorflow-cpu"} & set(found):
        raise LaunchError("the executors' Python has no TensorFlow; install tensorflow or tensorflow-cpu there")
    return found


def _devices(task: BarrierTaskContext, plan: LaunchPlan, rank: int) -> tuple[str, ...]:
    if not plan.use_gpu:
        return ()
    resource = task.resources().get(plan.gpu_resource_name)
    if resource is None:
        raise LaunchError(
            f"rank {rank}: expected Spark to assign the resource {plan.gpu_resource_name!r}, got none; "
            f"set spark.task.resource.{plan.gpu_resource_name}.amount"
        )
    try:
        mine = visible_devices(resource.addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return first_devices(mine, share_devices(plan.slots, plan.tasks)[rank])
    except LaunchError as error:
        raise LaunchError(f"rank {rank} on {socket.gethostname()}: {error}") from error
