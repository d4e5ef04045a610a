"""Pools of a stream's rows as a ``tf.data`` pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import worker_context
from tfdist.data.dealt import Dealt, Order
from tfdist.data.failures import noted
from tfdist.data.handle import Shuffle
from tfdist.data.heap import keep_freed_memory
from tfdist.data.pipeline import mapped
from tfdist.data.sources import Block
from tfdist.data.spool import TRANSFORMED_TOGETHER, Spool
from tfdist.data.tensors import flat, flat_specs, structured
from tfdist.errors import ConfigError

_AHEAD = 1  # pools that are made before they are needed


def dataset(dealt: Dealt, steps: int, shuffle: Shuffle, seed: int) -> Any:
    """The batches of this worker in all epochs; inside a strategy over several workers as a distributed dataset.

    Args:
        dealt: the stream.
        steps: of an epoch.
        shuffle: how rows are mixed.
        seed: of the order.
    """
    keep_freed_memory()
    worker, strategy = worker_context(), tf.distribute.get_strategy()
    if len(dealt.shares) != worker.world_size:
        raise ConfigError(f"{dealt.name}: expected {len(dealt.shares)} workers, got {worker.world_size}")

    def make(context: Any) -> Any:
        # tf.distribute deals the elements of a worker out to its replicas in turn: each step is one of each.
        each = context.num_replicas_in_sync // context.num_input_pipelines
        if min(dealt.shares) < steps * each:
            raise ConfigError(
                f"{dealt.name}: expected a row for each of {each} devices of a worker in each of {steps} steps, got "
                f"{min(dealt.shares)} rows; make global_batch larger"
            )
        rows = dealt.shares[worker.rank]
        batches = _local(Spool(dealt, Order(rows, steps * each, dealt.row_bytes, worker.rank, seed, shuffle)))
        return mapped(batches, dealt.schema, dealt.transform, TRANSFORMED_TOGETHER)

    if getattr(strategy.extended, "_in_multi_worker_mode", bool)():
        return strategy.distribute_datasets_from_function(make)
    return make(tf.distribute.InputContext())


def _local(spool: Spool) -> Any:
    schema = spool.dealt.schema
    kinds = schema.tensors
    signature = [spec for tensor in kinds for spec in flat_specs(tensor)]

    def arrays_of(iteration: Any, number: Any) -> list[np.ndarray]:
        bounds, tensors = spool.pool(iteration, number)
        return [bounds, *flat(Block(1, int(bounds[-1]), tensors), kinds)]

    def pool(iteration: Any, number: Any) -> Any:
        types = [tf.int64, *(spec.dtype for spec in signature)]
        bounds, *arrays = tf.numpy_function(noted(arrays_of), [iteration, number], types)
        arrays = [tf.ensure_shape(a, spec.shape) for a, spec in zip(arrays, signature, strict=True)]
        rows = tf.nest.map_structure(lambda block: block[0], structured(schema, arrays))
        return tf.ensure_shape(bounds, [None]), rows

    def cut(bounds: Any, rows: Any) -> Any:
        def step(k: Any) -> Any:
            return tf.nest.map_structure(lambda values: values[bounds[k] : bounds[k + 1]], rows)

        return tf.data.Dataset.range(tf.shape(bounds, tf.int64)[0] - 1).map(step)

    def one(iteration: Any) -> Any:
        numbers = tf.data.Dataset.range(spool.pools)
        return numbers.map(lambda number: pool(iteration, number)).prefetch(_AHEAD).flat_map(cut)

    begin = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(spool.begin, [], tf.int64))
    options = tf.data.Options()
    options.deterministic = True
    # The spool must know how far an iteration runs ahead.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    steps = spool.order.steps * spool.dealt.epochs
    return begin.flat_map(one).apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)
