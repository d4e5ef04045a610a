"""Blocks of batches as a ``tf.data`` pipeline; the only part of the data layer that needs TensorFlow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import worker_context
from tfdist.data.reader import Block, Reading
from tfdist.data.schema import Column, Schema
from tfdist.data.shards import Share
from tfdist.errors import ConfigError

_AHEAD = 2  # batches; the reader works a round ahead by itself

# tf.distribute draws up to four batches ahead of use, by a thread of its own. In a shorter epoch an iteration that was
# stopped after one batch could look like a full one, on one worker and not on another.
_FEWEST_STEPS = 8


def element_spec(schema: Schema) -> Any:
    """The ``tf.TensorSpec`` of a batch: a dict of columns, or (dict, label); the first dimension is the rows."""
    specs = {t.name: tf.TensorSpec((None, *t.shape), t.dtype) for t in schema.inputs}
    if schema.label is None:
        return specs
    label = schema.column(schema.label)
    return specs, tf.TensorSpec((None, *label.shape), label.dtype)


def dataset(reading: Reading, epoch: int, repeat: bool) -> Any:
    """The batches of this worker.

    In the scope of a strategy over several workers, a distributed dataset that Keras takes as it is: Keras' own
    sharding of a ``tf.data.Dataset`` would divide the rows a second time. Otherwise a ``tf.data.Dataset``.

    Args:
        reading: what to read; its share is decided here.
        epoch: the first epoch's number.
        repeat: one endless stream of epochs, else each iteration is one epoch.
    """
    strategy = tf.distribute.get_strategy()
    if not getattr(strategy.extended, "_in_multi_worker_mode", bool)():
        context = worker_context()
        return _local(replace(reading, share=Share(context.rank, context.world_size)), epoch, repeat)

    world = strategy.num_replicas_in_sync
    steps = replace(reading, share=Share(0, world)).epoch(epoch).batches.steps
    if reading.shuffle and not repeat and steps < _FEWEST_STEPS:
        raise ConfigError(
            f"to_tf: over several workers expected epochs of at least {_FEWEST_STEPS} steps, got {steps}, which "
            "tf.distribute would take ahead of their use; say repeat=True and give model.fit "
            f"steps_per_epoch={steps}, or make global_batch smaller"
        )

    def make(context: Any) -> Any:
        each, rank = context.num_replicas_in_sync // context.num_input_pipelines, context.input_pipeline_id
        shares = [Share(rank * each + i, context.num_replicas_in_sync) for i in range(each)]
        return one_after_another([_local(replace(reading, share=share), epoch, repeat) for share in shares])

    return strategy.distribute_datasets_from_function(make)


def one_after_another(datasets: list[Any]) -> Any:
    """The elements of equally long datasets in turn: a replica each, as tf.distribute deals them out."""
    if len(datasets) == 1:
        return datasets[0]

    def in_turn(*elements: Any) -> Any:
        parts = [tf.data.Dataset.from_tensors(element) for element in elements]
        joined = parts[0]
        for part in parts[1:]:
            joined = joined.concatenate(part)
        return joined

    steps = int(datasets[0].cardinality())
    joined = tf.data.Dataset.zip(tuple(datasets)).flat_map(in_turn)
    return joined.apply(tf.data.experimental.assert_cardinality(steps * len(datasets) if steps > 0 else steps))


def _local(reading: Reading, epoch: int, repeat: bool) -> Any:
    steps = reading.epoch(epoch).batches.steps  # refuses impossible shares here, not in the middle of a training
    if repeat:
        made = _batches(reading.manifest.schema, lambda: reading.blocks(epoch)).prefetch(_AHEAD)
        steps = tf.data.INFINITE_CARDINALITY
    else:
        made = _epochs(reading, epoch)
    options = tf.data.Options()
    options.deterministic = True
    # An injected prefetch would take an epoch's last batch before the user does.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return made.apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)


def _epochs(reading: Reading, first: int) -> Any:
    """Each iteration one epoch; the next one's number goes up when the last batch is taken."""
    passes = _Passes(reading, first)
    schema = reading.manifest.schema

    def one(number: Any) -> Any:
        most = _batches(schema, passes.all_but_last, number).prefetch(_AHEAD)
        return most.concatenate(_batches(schema, passes.last, number))

    begin = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(passes.begin, [], tf.int64))
    return begin.flat_map(one)


class _Passes:
    """Iterations over one dataset: which epoch each of them reads.

    Keras takes one batch to look at and starts again: an iteration counts only when its last batch was taken.
    """

    def __init__(self, reading: Reading, first: int) -> None:
        self._reading = reading
        self._epoch = first
        self._count = 0
        self._last: dict[int, tuple[int, Block]] = {}
        self._epochs: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self) -> np.int64:
        """Number of a new iteration."""
        with self._lock:
            self._count += 1
            self._epochs[self._count] = self._epoch
            return np.int64(self._count)

    def all_but_last(self, number: Any) -> Iterator[Block]:
        """All batches of an iteration except the last."""
        number = int(number)
        epoch = self._epochs.pop(number)
        before: Block | None = None
        for block in self._reading.blocks(epoch, epoch):
            if before is not None:
                yield before
            before = block
        assert before is not None
        if _steps(before) > 1:
            yield _cut(before, 0, -1)
        self._last[number] = epoch, _cut(before, -1, None)

    def last(self, number: Any) -> Iterator[Block]:
        """The last batch of an iteration, with which its epoch ends."""
        epoch, block = self._last.pop(int(number))
        self._epoch = epoch + 1
        yield block


def _steps(block: Block) -> int:
    return max(part.ndim and len(part) for part in block[:1])


def _cut(block: Block, start: int, stop: int | None) -> Block:
    # Distinct values of texts are for all steps.
    return [part if part.dtype == object else part[start:stop] for part in block]


def _batches(schema: Schema, blocks: Any, *arguments: Any) -> Any:
    """Blocks of arrays to batches.

    Args:
        schema: of the rows.
        blocks: function of ``arguments`` that returns an iterator over blocks.
    """
    signature: list[Any] = []
    for column in schema.columns:
        for tensor in column.tensors:
            text = tensor.dtype == "string"
            signature.append(tf.TensorSpec((None, None, *tensor.shape), "int32" if text else tensor.dtype))
            if text:
                signature.append(tf.TensorSpec((None,), "string"))

    def as_tuples(*values: Any) -> Iterator[tuple[np.ndarray, ...]]:
        return map(tuple, blocks(*values))

    made = tf.data.Dataset.from_generator(as_tuples, args=arguments or None, output_signature=tuple(signature))
    return made.map(lambda *parts: _structured(schema, list(parts))).unbatch()


def _structured(schema: Schema, parts: list[Any]) -> Any:
    features: dict[str, Any] = {}
    label = None
    for column in schema.columns:
        for name, values in _tensors(column, parts):
            if column.name == schema.label:
                label = values
            else:
                features[name] = values
    return features if label is None else (features, label)


def _tensors(column: Column, parts: list[Any]) -> Iterator[tuple[str, Any]]:
    for tensor in column.tensors:
        values = parts.pop(0)
        yield tensor.name, tf.gather(parts.pop(0), values) if tensor.dtype == "string" else values
