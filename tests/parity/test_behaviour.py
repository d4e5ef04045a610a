"""What the corrections cost, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from .gang import run_on, shares, split_cpu


def _collectives_of_a_step() -> list[int]:
    """How many all-reduces each graph of a training step has that was traced, for a model of dense weights."""
    import tensorflow as tf
    from tensorflow.python.distribute import cross_device_utils

    from tfdist.strategies.builders import strategy_scope

    from .cases import _network, _sgd, vectors

    with strategy_scope("multi_worker_mirrored", threads=1) as strategy:
        launcher = cross_device_utils.CollectiveReplicaLauncher
        graphs: list[Any] = []
        all_reduce = launcher.all_reduce

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                graphs.append(tf.compat.v1.get_default_graph())
            return all_reduce(self, *args, **kwargs)

        launcher.all_reduce = counting
        model = _network(_sgd(), weighted_metrics=["mse", "mae"])
        model.fit(shares(vectors(), strategy), steps_per_epoch=3, verbose=0)
        launcher.all_reduce = all_reduce
    return [sum(other is graph for other in graphs) for graph in graphs]


def test_a_step_takes_two_collectives() -> None:
    """All gradients and the row counts travel in one all-reduce, all logs of the step in a second."""
    for counts in run_on(2, _collectives_of_a_step, strategy="multi_worker_mirrored"):
        assert counts
        assert set(counts) == {2}


def _corrected_and_restored() -> dict[str, Any]:
    import keras
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.losses import loss
    from keras.src.trainers.trainer import Trainer

    from tfdist.strategies.keras_compat import keras_corrections

    split_cpu(2)

    def snapshot() -> list[Any]:
        owners = (trainer, loss, trainer.TensorFlowTrainer, TFOptimizer, Trainer, keras.layers.BatchNormalization)
        return [dict(vars(owner)) for owner in owners]

    before = snapshot()
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with keras_corrections(tf.distribute.get_strategy()):
        one_replica = snapshot() == before
    try:
        with keras_corrections(mirrored):
            once = snapshot()
            with keras_corrections(mirrored):
                twice = snapshot()
            after_inner = snapshot()
            raise KeyError("leaves the context by an error")
    except KeyError:
        pass
    return {
        "untouched with one replica": one_replica,
        "corrected": once != before,
        "entering again changes nothing": twice == once == after_inner,
        "restored": snapshot() == before,
    }


def test_corrections_act_only_inside_their_context() -> None:
    """Keras is as before after the context, also by an error; entering twice or with one replica changes nothing."""
    [seen] = run_on(1, _corrected_and_restored, strategy="mirrored")
    assert [name for name, holds in seen.items() if not holds] == []


def _refusals() -> dict[str, str]:
    import keras
    import tensorflow as tf

    from tfdist.errors import ConfigError, UnsupportedVersionError
    from tfdist.strategies import builders, keras_compat

    from .cases import _network, _sgd, vectors

    split_cpu(2)
    said: dict[str, str] = {}

    def refused(name: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as caught:
            call()
        said[name] = str(caught.value)

    x, y = vectors().arrays
    outside = _network(_sgd())
    refused("unknown", ConfigError, lambda: builders.build("mirored"))
    refused("no cluster", ConfigError, lambda: builders.build("multi_worker_mirrored"))
    with builders.strategy_scope("mirrored"):
        refused("outside", ConfigError, lambda: outside.fit(x, y, verbose=0))
        one_a_row = _network(_sgd())
        one_a_row.compute_metrics = lambda x, y, predicted, sample_weight=None: {"rows": y[:, 0]}
        refused("shape", ConfigError, lambda: one_a_row.fit(x, y, verbose=0))
    refused("threads", ConfigError, lambda: builders.build("single", threads=2))
    installed, keras.__version__ = keras.__version__, "3.11.3"
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    refused("version", UnsupportedVersionError, lambda: keras_compat.keras_corrections(two).__enter__())
    keras.__version__ = installed
    return said


def test_refusals_say_what_to_do() -> None:
    """A wrong name, a missing cluster, a model from outside, an untested Keras: each is refused with what to do."""
    [said] = run_on(1, _refusals, strategy="mirrored")
    assert "'mirored'" in said["unknown"]
    assert "multi_worker_mirrored" in said["unknown"]
    assert "TF_CONFIG" in said["no cluster"]
    assert "build and compile it inside" in said["outside"]
    assert "return one number" in said["shape"]
    assert "threads_per_worker" in said["threads"]
    assert "3.11.3" in said["version"]
    assert "3.12 to 3.15" in said["version"]


def _built_after_tensorflow_ran() -> str:
    import tensorflow as tf

    from tfdist.errors import ConfigError
    from tfdist.strategies.builders import build

    tf.config.list_logical_devices()
    with pytest.raises(ConfigError) as caught:
        build("multi_worker_mirrored")
    return str(caught.value)


def test_tensorflow_in_use_before_the_strategy_is_refused() -> None:
    """A process that has run TensorFlow cannot join workers, and hears which code to move."""
    for said in run_on(2, _built_after_tensorflow_ran, strategy="multi_worker_mirrored"):
        assert "move TensorFlow operations" in said


def _compiled_by_xla() -> dict[str, Any]:
    from tfdist.strategies.builders import strategy_scope

    from .cases import _network, _sgd, vectors

    with strategy_scope("multi_worker_mirrored", threads=1) as strategy:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = _network(_sgd(), jit_compile=True)
        history = model.fit(shares(vectors(), strategy), steps_per_epoch=3, verbose=0).history
        return {"warned": [str(w.message) for w in caught], "on": model.jit_compile, "epochs": len(history["loss"])}


def test_xla_across_workers_is_turned_off_with_a_message() -> None:
    """jit_compile=True trains without XLA across workers and says so."""
    for seen in run_on(2, _compiled_by_xla, strategy="multi_worker_mirrored"):
        assert not seen["on"]
        assert seen["epochs"] == 1
        assert any("jit_compile" in message for message in seen["warned"])
