"""The state of a Keras training in this process: taken out as arrays and JSON, and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from tfdist.errors import ConfigError
from tfdist.train.checkpoint import RankState
from tfdist.train.plain import NotPlainError, as_stored, from_plain, storable, to_plain

_OF_KERAS = ("params", "_model")  # attributes that each fit() sets anew


def variables_of(model: Any, *, global_seed: bool) -> list[Any]:
    """All variables of a training, each once: weights, seeds, metrics, optimizers.

    Args:
        model: compiled and built.
        global_seed: with the state of Keras' own seed generator, which draws the seeds that nobody gives.
    """
    optimizers = [model.optimizer, *(v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer))]
    found = [*model.variables, *model.metrics_variables, *(v for o in optimizers if o is not None for v in o.variables)]
    if global_seed:
        found.append(global_seed_generator().state)
    return list({id(variable): variable for variable in found}.values())


def has_global_seed() -> bool:
    """Whether Keras has drawn a seed that nobody gave; its generator is a variable from then on."""
    return get_global_attribute(GLOBAL_SEED_GENERATOR) is not None


def described(variables: Sequence[Any]) -> list[list[Any]]:
    """Path, shape and dtype of each variable, as JSON."""
    return [[v.path, [int(n) for n in v.shape], str(v.dtype)] for v in variables]


def check_described(variables: Sequence[Any], wanted: Sequence[Sequence[Any]], name: str) -> None:
    """Are these the variables of a checkpoint?

    Args:
        variables: of the model that was built.
        wanted: as :func:`described` when the checkpoint was written.
        name: of the checkpoint.

    Raises:
        ConfigError: they are of another model.
    """
    got = described(variables)
    if got == [list(v) for v in wanted]:
        return
    first = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != list(b)), None)
    if first is None:
        told = f"{len(wanted)} variables, got {len(got)}"
    else:
        told = f"{_text(wanted[first])}, got {_text(got[first])}"
    raise ConfigError(
        f"fit.resume: {name} is of another model: expected {told}; build the same model and optimizer, or start anew "
        "with another fit.checkpoint_dir"
    )


def _text(variable: Sequence[Any]) -> str:
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"


def on_read(variables: Sequence[Any]) -> dict[str, str]:
    """Number to ``sum`` or ``mean``, for variables of which each replica has its own value, aggregated when read."""
    kinds = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
    found = {}
    for number, value in enumerate(variable.value for variable in variables):
        own = getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ
        if own and tf.distribute.has_strategy() and value.aggregation in kinds:
            found[str(number)] = kinds[value.aggregation]
    return found


def replicas_of(variables: Sequence[Any]) -> list[int]:
    """How many values this process holds of each variable."""
    return [len(_locals(variable)) for variable in variables]


def read_variables(variables: Sequence[Any]) -> dict[str, np.ndarray]:
    """The values that this process holds, one for each of its replicas: some differ, and some are summed when read."""
    return {
        f"v{i}.{j}": storable(local.numpy()) for i, variable in enumerate(variables) for j, local in _locals(variable)
    }


def write_variables(variables: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Put the values of :func:`read_variables` back, into each replica its own."""
    for i, variable in enumerate(variables):
        for j, local in _locals(variable):
            value = as_stored(arrays[f"v{i}.{j}"], np.dtype(local.dtype.as_numpy_dtype), tuple(local.shape))
            local.assign(value)


def _locals(variable: Any) -> list[tuple[int, Any]]:
    return list(enumerate(tf.distribute.get_strategy().experimental_local_results(variable.value)))


class CallbackState:
    """The plain attributes of callbacks that have changed since the training began.

    What does not change (their settings) stays as the callbacks were made for this launch; what is no plain value
    (files, models, functions of the user's) is theirs to make again in ``on_train_begin``.

    Args:
        callbacks: just after their ``on_train_begin``.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._begun = [_attributes(callback) for callback in callbacks]

    def take(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """For each callback its class and changed attributes, as JSON, and their arrays."""
        texts, arrays = [], {}
        for number, (callback, begun) in enumerate(zip(self._callbacks, self._begun, strict=True)):
            changed = {}
            for name, (plain, own) in _attributes(callback, f"c{number}.{{}}").items():
                if name not in begun or not _equal(from_plain(plain, own), from_plain(*begun[name])):
                    changed[name] = plain
                    arrays.update(own)
            texts.append([_class_name(callback), changed])
        return texts, arrays

    def put_back(self, texts: Sequence[Any], arrays: Mapping[str, np.ndarray], name: str) -> None:
        """Give the callbacks what :meth:`take` took.

        Raises:
            ConfigError: they are other callbacks.
        """
        wanted, got = [text[0] for text in texts], [_class_name(callback) for callback in self._callbacks]
        if wanted != got:
            raise ConfigError(
                f"fit.resume: {name} was written with the callbacks {', '.join(wanted)}, got {', '.join(got)}; give "
                "the same ones in the same order, or start anew with another fit.checkpoint_dir"
            )
        for callback, (_, changed) in zip(self._callbacks, texts, strict=True):
            for attribute, plain in changed.items():
                setattr(callback, attribute, from_plain(plain, arrays))


def _class_name(callback: Any) -> str:
    return type(callback).__name__


def _attributes(callback: Any, key: str = "{}") -> dict[str, tuple[Any, dict[str, np.ndarray]]]:
    found = {}
    for name, value in vars(callback).items():
        arrays: dict[str, np.ndarray] = {}
        try:
            if name not in _OF_KERAS:
                found[name] = to_plain(value, arrays, key.format(name)), arrays
        except NotPlainError:
            continue
    return found


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    return bool(one == other)


def take_state(variables: Sequence[Any], callbacks: CallbackState) -> RankState:
    """The state of this rank, as copies."""
    texts, arrays = callbacks.take()
    arrays.update(read_variables(variables))
    chances = {"python": random.getstate(), "numpy": np.random.get_state()}
    values = {"callbacks": texts, "random": to_plain(chances, arrays, "random")}
    return RankState(arrays, values)


def put_random_state_back(state: RankState) -> None:
    """The generators of Python and NumPy go on as they were."""
    chances = from_plain(state.values["random"], state.arrays)
    random.setstate(chances["python"])
    np.random.set_state(chances["numpy"])
