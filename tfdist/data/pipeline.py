"""Blocks of batches as a ``tf.data`` pipeline; the only part of the data layer that needs TensorFlow."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import worker_context
from tfdist.data.batches import ALONE, Share
from tfdist.data.column import Tensor
from tfdist.data.failures import noted
from tfdist.data.heap import keep_freed_memory
from tfdist.data.reader import Blocks, Reading
from tfdist.data.schema import Schema
from tfdist.data.sparse import Sparse
from tfdist.data.tensors import flat, flat_specs, structured, with_sparse
from tfdist.data.values import Ragged, Values
from tfdist.errors import ConfigError

_OPEN_ITERATIONS = 4  # over one dataset at the same time; each holds the row groups of two rounds

# tf.distribute draws up to four batches ahead of use, by a thread of its own. In a shorter epoch an iteration that was
# stopped after one batch could look like a full one, on one worker and not on another.
_FEWEST_STEPS = 8


def element_spec(schema: Schema) -> Any:
    """The ``tf.TensorSpec`` of a batch: a dict of columns, or (dict, label); the first dimension is the rows."""
    specs = schema.model_batch({t.name: batch_spec(t) for t in schema.model_inputs})
    return specs if schema.label is None else (specs, batch_spec(schema.column(schema.label).tensors[0]))


def batch_spec(tensor: Tensor) -> Any:
    """The ``tf.TensorSpec``, ``tf.RaggedTensorSpec`` or ``tf.SparseTensorSpec`` of a tensor of a batch."""
    if tensor.sparse:
        return tf.SparseTensorSpec((None, *tensor.shape), tensor.dtype)
    if None in tensor.shape:
        return tf.RaggedTensorSpec((None, *tensor.shape), tensor.dtype, len(tensor.shape), tf.int64)
    return tf.TensorSpec((None, *tensor.shape), tensor.dtype)


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of :meth:`Schema.as_batch` with the values of :func:`tfdist.data.batch_from_arrow` as a model takes it.

    Returns:
        The same dicts with a ``tf.Tensor``, ``tf.RaggedTensor`` or ``tf.SparseTensor`` for each value.
    """
    return {name: as_tensors(v) if isinstance(v, Mapping) else _as_tensor(v) for name, v in batch.items()}


def _as_tensor(values: Values | Sparse) -> Any:
    if isinstance(values, Sparse):
        return tf.SparseTensor(*values)
    if isinstance(values, Ragged):
        return tf.RaggedTensor.from_row_splits(_as_tensor(values.values), values.splits, validate=False)
    return tf.convert_to_tensor(values)


def dataset(
    reading: Reading, epoch: int, start_step: int, repeat: bool, transform: Callable[[Any], Any] | None = None
) -> Any:
    """The batches of this worker.

    In the scope of a strategy over several workers, a distributed dataset that Keras takes as it is: Keras' own
    sharding of a ``tf.data.Dataset`` would divide the rows a second time. Otherwise a ``tf.data.Dataset``.

    Args:
        reading: what to read; its share is decided here.
        epoch: the first epoch's number.
        start_step: the step of the first epoch to begin with.
        repeat: one endless stream of epochs, else each iteration is one epoch.
        transform: applied to the features of each batch.
    """
    keep_freed_memory()
    # A parallel map draws ahead, and drawing the last batch of an iteration ends its epoch.
    together = tf.data.AUTOTUNE if repeat else None
    strategy = tf.distribute.get_strategy()
    if not getattr(strategy.extended, "_in_multi_worker_mode", bool)():
        context = worker_context()
        own = replace(reading, share=Share(context.rank, context.world_size))
        return mapped(_local(own, epoch, start_step, repeat), reading.manifest.schema, transform, together)

    world = strategy.num_replicas_in_sync
    steps = replace(reading, share=Share(0, world)).epoch(epoch).batches.steps
    if reading.mixing != "none" and not repeat and steps < _FEWEST_STEPS:
        raise ConfigError(
            f"to_tf: over several workers expected epochs of at least {_FEWEST_STEPS} steps, got {steps}, which "
            "tf.distribute would take ahead of their use; say repeat=True and give model.fit "
            f"steps_per_epoch={steps}, or make global_batch smaller"
        )

    def make(context: Any) -> Any:
        each, rank = context.num_replicas_in_sync // context.num_input_pipelines, context.input_pipeline_id
        shares = [Share(rank * each + i, context.num_replicas_in_sync) for i in range(each)]
        own = one_after_another([_local(replace(reading, share=share), epoch, start_step, repeat) for share in shares])
        return mapped(own, reading.manifest.schema, transform, together)

    return strategy.distribute_datasets_from_function(make)


def mapped(batches: Any, schema: Schema, transform: Callable[[Any], Any] | None, together: int | None) -> Any:
    """Batches after a transform of their features, so many of which are drawn at the same time."""
    transform = with_sparse(schema, transform)
    if transform is None:
        return batches
    if schema.label is None:
        return batches.map(transform, num_parallel_calls=together)
    return batches.map(lambda features, label: (transform(features), label), num_parallel_calls=together)


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


def _local(reading: Reading, epoch: int, start_step: int, repeat: bool) -> Any:
    low, high = reading.share.of(reading.manifest.rows)
    if low == high and reading.mixing == "none" and reading.manifest.rows:
        # The one batch has fewer rows than there are workers. TensorFlow cuts no empty batches out of a block.
        whole = _local(replace(reading, share=ALONE), epoch, start_step, repeat)
        return whole.map(lambda *batch: tf.nest.map_structure(lambda values: values[:0], _unpacked(batch)))
    steps = reading.epoch(epoch).batches.steps  # refuses impossible shares here, not in the middle of a training
    if start_step >= steps:
        raise ConfigError(f"start_step: expected a step of an epoch of {steps}, got {start_step}")
    iterations = _Iterations(reading, epoch, start_step, repeat)
    made = _batches(iterations)
    options = tf.data.Options()
    options.deterministic = True
    # An injected prefetch would take an epoch's last batch before the user does.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if repeat:
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    elif not start_step:
        made = made.apply(tf.data.experimental.assert_cardinality(steps))
    made = made.with_options(options)
    made.tfdist_iterations = iterations  # datasets made of this one, and iterators, hold it: see _batches
    return made


def _unpacked(batch: tuple[Any, ...]) -> Any:
    return batch[0] if len(batch) == 1 else batch


class _Iterations:
    """Iterations over one dataset: which epoch each of them reads, and how far it is.

    Keras takes one batch to look at and starts again: an iteration counts only when its last batch was taken.

    A generator's state would have to be ended with its iteration, which ``Dataset.from_generator`` does, but it also
    makes the whole process give memory back at once, which halves the speed. Blocks are found by their number instead:
    an iteration that was forgotten, because newer ones came, goes on where it was.
    """

    def __init__(self, reading: Reading, first: int, start_step: int, endless: bool) -> None:
        self.schema = reading.manifest.schema
        self.endless = endless
        self._tensors = self.schema.tensors
        self._reading = reading
        self._epoch = first
        self._start_step = start_step
        self._started: list[tuple[int, int]] = []
        self._ended: set[int] = set()
        self._open: OrderedDict[int, Blocks] = OrderedDict()
        first_epoch = reading.epoch(first)
        # A block of one batch is handed over as it is, without the copy that cuts batches out of a larger one.
        self.single = first_epoch.steps_per_block == 1 and (endless or not start_step)
        self._cache = reading.cache(first_epoch) if reading.cached else None
        self._lock = threading.Lock()
        # Of an epoch: the last step has a block of its own.
        self.most_blocks = first_epoch.blocks + (0 if self.single else 1)
        self._none = [
            np.empty([n or 0 for n in spec.shape], spec.dtype.as_numpy_dtype)
            for tensor in self._tensors
            for spec in flat_specs(tensor, self.single)
        ]

    def block(self, number: Any, index: Any) -> list[np.ndarray]:
        """A block of an iteration.

        Args:
            number: of the iteration; -1 begins a new one.
            index: of the block. One past the end of the epoch is without a step.

        Returns:
            The number of the iteration, and the arrays of the block.
        """
        number, index = int(number), int(index)
        if number < 0:
            number = self._begin()
        return [np.asarray(number, np.int64), *self._arrays(number, index)]

    def _begin(self) -> int:
        with self._lock:
            self._started.append((self._epoch, self._start_step))
            return len(self._started) - 1

    def _arrays(self, number: int, index: int) -> list[np.ndarray]:
        if number in self._ended:
            return self._none
        blocks = self._blocks(number)
        if self.endless or index + 1 < len(blocks):
            return flat(blocks[index], self._tensors, self.single)
        if index + 1 == len(blocks):
            block = blocks[index]
            if self.single:
                self._end(number)
                return flat(block, self._tensors, single=True)
            return flat(block.cut(0, block.steps - 1), self._tensors)
        block = blocks[index - 1]
        self._end(number)
        return flat(block.cut(block.steps - 1, block.steps), self._tensors)

    def _end(self, number: int) -> None:
        """The last batch of an iteration is taken: the next iteration is the next epoch."""
        with self._lock:
            self._epoch, self._start_step = self._started[number][0] + 1, 0
            self._ended.add(number)
            if done := self._open.pop(number, None):  # a newer iteration may just have closed it
                done.close()

    def _blocks(self, number: int) -> Blocks:
        with self._lock:
            if number not in self._open:
                self._open[number] = Blocks(self._reading, *self._started[number], self.endless, self._cache)
                if len(self._open) > _OPEN_ITERATIONS:
                    self._open.popitem(last=False)[1].close()
            self._open.move_to_end(number)
            return self._open[number]


def _batches(iterations: _Iterations) -> Any:
    """The batches of an iteration.

    Few functions with few operations: TensorFlow traces each of them, and optimises it anew for every iteration. The
    number of the iteration, which its first block gives, is the state of a scan. Nothing is made ahead here, since
    making the last block ends the epoch; the reader works ahead.

    TensorFlow never lets go of a Python function in a dataset. This one refers weakly to the iterations, with their
    threads, files and memory, and the dataset owns them.
    """
    schema = iterations.schema
    signature = [spec for tensor in schema.tensors for spec in flat_specs(tensor, iterations.single)]
    made = weakref.WeakMethod(iterations.block)

    def arrays_of(number: Any, index: Any) -> list[np.ndarray]:
        owned = made()
        if owned is None:
            raise ConfigError(
                "to_tf: the dataset was deleted while it was read; keep a reference to it, and call to_tf outside of "
                "functions that TensorFlow traces"
            )
        return owned(number, index)

    def block(number: Any, index: Any) -> Any:
        types = [tf.int64, *(spec.dtype for spec in signature)]
        number, *arrays = tf.numpy_function(noted(arrays_of), [number, index], types)
        for array, shape in zip([number, *arrays], [(), *(spec.shape for spec in signature)], strict=True):
            array.set_shape(shape)
        return number, structured(schema, arrays)

    indices = tf.data.Dataset.range(tf.int64.max if iterations.endless else iterations.most_blocks)
    blocks = indices.scan(np.int64(-1), block)
    return blocks if iterations.single else blocks.unbatch()
