"""Moving statistics of BatchNormalization: one value for all replicas."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.strategies.corrections.means import mean_over_replicas
from tfdist.strategies.corrections.patch import Patch


def correct_statistics(patch: Patch) -> None:
    """Read the moving statistics as the mean over replicas, as tf_keras did.

    Keras 3 creates them without aggregation: each worker keeps its own, saves its own and evaluates with its own. The
    mean is exact at any moment, since a moving average is linear in what it started from.
    """
    from keras.layers import BatchNormalization
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    patch(BatchNormalization, "add_weight", _averaged_on_read)
    # Steps read the value of their own replica, so it is made equal before those that do not train.
    patch(TensorFlowTrainer, "make_test_function", _levelling_first)
    patch(TensorFlowTrainer, "make_predict_function", _levelling_first)


def _averaged_on_read(original: Any) -> Any:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, trainable: bool = True, **kwargs: Any) -> Any:
        if trainable or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return original(self, *args, trainable=trainable, **kwargs)

        def creator(create: Any, **options: Any) -> Any:
            options["aggregation"] = tf.VariableAggregation.MEAN
            options["synchronization"] = tf.VariableSynchronization.ON_READ
            return create(**options)

        with tf.variable_creator_scope(creator):
            variable = original(self, *args, trainable=trainable, **kwargs)
        # A model that is built from its first batch creates the TensorFlow variable later, out of the scope above.
        variable._aggregation, variable._synchronization = "mean", "on_read"
        return variable

    return add_weight


def _levelling_first(original: Any) -> Any:
    @functools.wraps(original)
    def make_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self._distribute_strategy
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            _level(strategy, self)
        return original(self, *args, **kwargs)

    return make_function


def _level(strategy: Any, model: Any) -> None:
    from keras.layers import BatchNormalization

    layers = [layer for layer in model._flatten_layers() if isinstance(layer, BatchNormalization) and layer.built]
    variables = [v.value for layer in layers for v in layer.non_trainable_variables]
    variables = [v for v in variables if v.synchronization == tf.VariableSynchronization.ON_READ]
    if not variables:
        return
    means = tf.function(lambda: mean_over_replicas(strategy, lambda: variables), autograph=False)()
    with strategy.scope():
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean)
