"""Keras' loop of fit and evaluate: building the model, making the steps, reducing what they return."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.strategies.corrections.means import mean_over_replicas
from tfdist.strategies.corrections.patch import Patch
from tfdist.strategies.corrections.step import count_rows, entered_step

_references: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def correct_build(patch: Patch) -> None:
    """Build the model from this replica's batch.

    Keras reduces the batch over replicas to learn its shape: that fails on text, on unequal shares, and on the wrapped
    values of one worker. It also does so in silence for a model of another strategy, which then trains alone.
    """
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    patch(TensorFlowTrainer, "_maybe_symbolic_build", _building_locally)


def correct_steps(patch: Patch) -> None:
    """Make each step know its rows, and run several steps per execution one after the other.

    Keras loops over steps inside the graph, with the collectives under a ``cond``, which TensorFlow does not allow.
    """
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    patch(TensorFlowTrainer, "_make_function", _making_steps)


def correct_logs(patch: Patch) -> None:
    """Average what a step returns over replicas, in one collective.

    Keras takes the mean along axis 0 of scalars, which fails across workers, and one collective for each metric.
    """
    from keras.src.backend.tensorflow import trainer

    patch(trainer, "reduce_per_replica", _averaging)


def correct_compilation(patch: Patch) -> None:
    """Turn XLA off across workers: the collectives of CPUs have no XLA version, and training was seen to diverge."""
    from keras.src.trainers.trainer import Trainer

    patch(Trainer, "jit_compile", _without_xla_across_workers)


def _building_locally(original: Any) -> Any:
    @functools.wraps(original)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if tf.distribute.has_strategy() and self._distribute_strategy is not tf.distribute.get_strategy():
            raise ConfigError(
                f"model {self.name!r}: expected a model that was built inside the strategy's scope, got one built "
                "outside or under another strategy, which would train on each worker alone; build and compile it "
                "inside the train function (or in build_model)"
            )
        if self._distribute_strategy is None:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        if self in _references and _is_built(self):
            return
        strategy = self._distribute_strategy
        if iterator is not None:
            _, _, steps = next(iter(iterator))
            data_batch = next(steps)
        local = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], data_batch)
        if self not in _references:
            _references[self] = _usual_rows(strategy, local)
        with strategy.scope():
            self._symbolic_build(data_batch=local)

    return maybe_symbolic_build


def _is_built(model: Any) -> bool:
    parts = (model._compile_metrics, model._compile_loss, model.optimizer, *model._flatten_layers())
    return all(part is None or part.built for part in parts)


def _usual_rows(strategy: Any, batch: Any) -> float:
    """Mean rows of a share over the first replicas of all workers; every worker gets the same number."""
    rows = tf.cast(count_rows(batch)[0], tf.float32)
    mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(lambda: rows), axis=None)
    return max(float(mean), 1.0)


def usual_rows(model: Any) -> float | None:
    """The rows of a usual share that the steps of a model reckon with, or None before its first batch."""
    return _references.get(model)


def set_usual_rows(model: Any, rows: float) -> None:
    """Let a model go on with the number that it had: another one is as right, and rounds otherwise."""
    _references[model] = rows


def _making_steps(original: Any) -> Any:
    @functools.wraps(original)
    def make_function(self: Any, step_function: Any) -> Any:
        strategy = self._distribute_strategy
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return original(self, step_function)

        @functools.wraps(step_function)
        def step(data: Any) -> Any:
            with entered_step(data, _references.get(self, 1.0)):
                return step_function(data)

        one_step = original(_OneStep(self), step)
        return one_step if self.steps_per_execution == 1 else _several(one_step, self)

    return make_function


class _OneStep:
    """A model as Keras makes its steps from it, which takes one of them at a time."""

    steps_per_execution = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _several(one_step: Any, model: Any) -> Any:
    """Steps one after the other, of which each takes its batch inside the graph.

    There no batch has a size of its own, so that all take the same graph, also in a training that goes on elsewhere.
    """

    def steps(iterator: Any) -> Any:
        if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            for batch in itertools.islice(iterator, model.steps_per_execution):
                logs = one_step(iter([batch]))
            return logs
        logs = one_step(iterator)
        for _ in range(model.steps_per_execution - 1):
            try:
                logs = one_step(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        return logs

    return steps


def _averaging(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or strategy.num_replicas_in_sync == 1:
            return original(values, strategy, reduction)
        flat = tf.nest.flatten(values)
        means = mean_over_replicas(strategy, lambda *local: local, tuple(flat)) if flat else []
        return tf.nest.pack_sequence_as(values, means)

    return reduce_per_replica


def _without_xla_across_workers(original: property) -> property:
    def set_jit_compile(self: Any, value: Any) -> None:
        strategy = self._distribute_strategy
        if value and strategy is not None and strategy.extended._in_multi_worker_mode():
            warnings.warn("jit_compile=True is not available across workers; training goes on without", stacklevel=3)
            value = False
        original.__set__(self, value)

    return original.setter(set_jit_compile)
