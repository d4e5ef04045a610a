"""Runs many small trainings in one gang of processes, so that starting TensorFlow is paid once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.launch.local import LocalLauncher
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id

from .cases import CASES, Batches, Case

SEED = 7


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a case."""

    weights: list[np.ndarray]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: np.ndarray | None
    extra: dict[str, Any] = field(default_factory=dict)


def run_gang(workers: int, *, strategy: str, names: Sequence[str], replicas: int = 1) -> list[dict[str, Outcome]]:
    """Run the named cases on ``workers`` processes of ``replicas`` devices each; returns the outcomes of each rank."""

    def train_all() -> dict[str, Any]:
        # Plain values: this module is sent by value, so its classes are other ones there.
        return {name: vars(outcome) for name, outcome in _train_all(names, strategy, replicas).items()}

    ranks = run_on(workers, train_all, strategy=strategy)
    return [{name: Outcome(**values) for name, values in rank.items()} for rank in ranks]


def run_on(workers: int, function: Callable[[], Any], *, strategy: str) -> list[Any]:
    """Call ``function`` on each of ``workers`` processes; returns what each returned."""
    plan = LaunchPlan(new_run_id(), workers, workers, strategy, results="all", show_output="none")
    program = dump_program(lambda: pickle.dumps(function()), "function")
    return [pickle.loads(result) for result in LocalLauncher().launch(program, plan, lambda _: None)]


def _train_all(names: Sequence[str], strategy_name: str, replicas: int) -> dict[str, Outcome]:
    import keras

    from tfdist.strategies.builders import strategy_scope

    if replicas > 1:
        split_cpu(replicas)
    by_name = {case.name: case for case in CASES}
    outcomes = {}
    with strategy_scope(strategy_name, threads=1) as strategy:
        for name in names:
            keras.utils.set_random_seed(SEED)
            outcomes[name] = _train(by_name[name], strategy)
    return outcomes


def split_cpu(devices: int) -> None:
    """Make TensorFlow see ``devices`` CPUs in this process."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)


def _train(case: Case, strategy: Any) -> Outcome:
    import keras

    keras.config.set_dtype_policy(case.policy)
    model = case.build()
    data = case.data()
    train = shares(data, strategy)
    fit = dict(case.fit)
    if case.validation is not None:
        validation = case.validation()
        fit |= {"validation_data": shares(validation, strategy), "validation_steps": validation.steps}
    if case.callbacks is not None:
        fit["callbacks"] = case.callbacks()
    fitted = model.fit(train, steps_per_epoch=data.steps, epochs=case.epochs, verbose=0, **fit)
    evaluated, predicted = {}, None
    if case.serves:
        evaluated = model.evaluate(shares(data, strategy), steps=data.steps, verbose=0, return_dict=True)
        predicted = model.predict(shares(data, strategy, labels=False), steps=data.steps, verbose=0)
    weights = [np.array(w) for w in model.get_weights()]
    extra = case.extra(model, strategy) if case.extra else {}
    return Outcome(weights, fitted.history, evaluated, predicted, extra)


def shares(data: Batches, strategy: Any, *, labels: bool = True) -> Any:
    """The global batches without end, each cut into one contiguous share a replica, as Keras takes them."""
    import tensorflow as tf

    total = strategy.num_replicas_in_sync

    def of_pipeline(context: Any) -> Any:
        here = total // context.num_input_pipelines
        mine = range(context.input_pipeline_id * here, (context.input_pipeline_id + 1) * here)

        def generate() -> Iterator[Any]:
            for batch in data.batches():
                for replica in mine:
                    share = _share(batch, replica, total)
                    yield share if labels else share[0]

        spec = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), data.arrays)
        signature = spec if labels else spec[0]
        return tf.data.Dataset.from_generator(generate, output_signature=signature).repeat()

    if total == 1:
        return of_pipeline(tf.distribute.InputContext())
    return strategy.distribute_datasets_from_function(of_pipeline)


def _share(batch: Any, replica: int, total: int) -> Any:
    import tensorflow as tf

    rows = len(tf.nest.flatten(batch)[0])
    start, end = replica * rows // total, (replica + 1) * rows // total
    return tf.nest.map_structure(lambda a: a[start:end], batch)
