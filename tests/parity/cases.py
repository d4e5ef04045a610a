"""The trainings that must not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Batches:
    """Rows in their order, cut into global batches; the last may be smaller."""

    arrays: Any
    global_batch: int

    @property
    def rows(self) -> int:
        return len(self.arrays[1] if not isinstance(self.arrays[1], dict) else next(iter(self.arrays[1].values())))

    @property
    def steps(self) -> int:
        return -(-self.rows // self.global_batch)

    def batches(self) -> Iterator[Any]:
        import tensorflow as tf

        for step in range(self.steps):
            part = slice(step * self.global_batch, (step + 1) * self.global_batch)
            yield tf.nest.map_structure(lambda a, part=part: a[part], self.arrays)


@dataclass(frozen=True)
class Case:
    """One training.

    ``serves`` evaluates and predicts with the trained model. ``same`` says that weights and history equal those of one
    process; where it is False only the ranks are compared.
    """

    name: str
    build: Callable[[], Any]
    data: Callable[[], Batches]
    epochs: int = 2
    validation: Callable[[], Batches] | None = None
    callbacks: Callable[[], list[Any]] | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    extra: Callable[[Any, Any], dict[str, Any]] | None = None
    policy: str = "float32"
    serves: bool = False
    same: bool = True
    tolerance: float = 1e-6


# 37 rows in batches of 16: the last batch has 5 rows, 2 + 3 on two workers and 1 + 2 + 2 on three; 16 = 5 + 5 + 6.
ROWS, GLOBAL_BATCH = 37, 16


def vectors(rows: int = ROWS, global_batch: int = GLOBAL_BATCH, seed: int = 1) -> Batches:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype("float32")
    y = (x @ random.normal(size=(6, 1)) + 0.3 * random.normal(size=(rows, 1)) > 0).astype("float32")
    return Batches((x, y), global_batch)


def even() -> Batches:
    return vectors(rows=36, global_batch=12)


def table(rows: int = ROWS) -> Batches:
    random = np.random.default_rng(2)
    columns = {
        "distance": random.normal(size=(rows, 1)).astype("float32"),
        "hour": random.integers(0, 5, size=(rows, 1)).astype("int64"),
        "carrier": random.choice(np.array([b"AA", b"UA", b"DL", b"??"], dtype=object), size=(rows, 1)),
    }
    y = (columns["distance"] + 0.2 * columns["hour"] > 0.3).astype("float32")
    return Batches((columns, y), GLOBAL_BATCH)


def images() -> Batches:
    random = np.random.default_rng(3)
    return Batches(
        (random.normal(size=(ROWS, 8, 8, 1)).astype("float32"), random.integers(0, 3, size=ROWS).astype("int32")),
        GLOBAL_BATCH,
    )


def two_labels() -> Batches:
    x, y = vectors().arrays
    return Batches((x, {"a": y, "b": x[:, :1] * 2}), GLOBAL_BATCH)


def weighted_rows() -> Batches:
    x, y = vectors().arrays
    weights = np.random.default_rng(4).uniform(0.1, 3.0, size=len(y)).astype("float32")
    return Batches((x, y, weights), GLOBAL_BATCH)


def sequences() -> Batches:
    """Codes of words, 0 is padding; some rows are all but padding, so that shares differ in their valid entries."""
    random = np.random.default_rng(5)
    x = random.integers(1, 7, size=(ROWS, 5)).astype("int64")
    x[np.arange(5) >= random.integers(1, 6, size=(ROWS, 1))] = 0
    return Batches((x, (x % 2).astype("float32")[..., None]), GLOBAL_BATCH)


def _network(optimizer: Any, *, loss: Any = "binary_crossentropy", l2: float = 0.0, **compiled: Any) -> Any:
    import keras

    regularizer = keras.regularizers.L2(l2) if l2 else None
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **compiled)
    return model


def _sgd(**arguments: Any) -> Any:
    import keras

    return keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **arguments})


def _adam(**arguments: Any) -> Any:
    import keras

    return keras.optimizers.Adam(**{"learning_rate": 0.01, **arguments})


def tabular() -> Any:
    import keras

    distance = keras.Input((1,), name="distance")
    hour = keras.Input((1,), name="hour", dtype="int64")
    carrier = keras.Input((1,), name="carrier", dtype="string")
    codes = keras.layers.StringLookup(vocabulary=["AA", "UA", "DL"])(carrier)
    parts = [
        keras.layers.Normalization(mean=[0.1], variance=[1.2])(distance),
        keras.layers.Flatten()(keras.layers.Embedding(5, 3)(hour)),
        keras.layers.Flatten()(keras.layers.Embedding(4, 2)(codes)),
    ]
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()(parts))
    output = keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model({"distance": distance, "hour": hour, "carrier": carrier}, output)
    model.compile(_adam(), loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model


def clipped_table() -> Any:
    model = tabular()
    model.compile(_adam(clipnorm=0.05), loss="binary_crossentropy")
    return model


def convolutional(optimizer: Any = None) -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or _sgd(learning_rate=0.05), loss=loss, metrics=["accuracy"])
    return model


def recurrent() -> Any:
    import keras

    layers = [
        keras.Input((5,), dtype="int64"),
        keras.layers.Embedding(7, 4, mask_zero=True),
        keras.layers.LSTM(5, return_sequences=True),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    model = keras.Sequential(layers)
    model.compile(_adam(), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def two_outputs() -> Any:
    import keras

    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = {
        "a": keras.layers.Dense(1, activation="sigmoid", name="a")(hidden),
        "b": keras.layers.Dense(1, name="b")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(_sgd(), loss={"a": "binary_crossentropy", "b": "mse"}, loss_weights={"a": 1.0, "b": 0.5})
    return model


def built_late() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(_sgd(), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def own_step() -> Any:
    import keras
    import tensorflow as tf

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.compute_metrics(x, y, predicted)

    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dense(8, activation="tanh")(inputs))
    model = Own(inputs, outputs)
    model.compile(_sgd(), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def normalised(*, synchronized: bool, late: bool = False) -> Any:
    import keras

    layers = [
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.7),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    model = keras.Sequential(layers if late else [keras.Input((6,)), *layers])
    model.compile(_sgd(), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def with_dropout() -> Any:
    import keras

    layers = [keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential(layers)
    model.compile(_sgd(), loss="binary_crossentropy")
    return model


def dropout_masks(model: Any, strategy: Any) -> dict[str, Any]:
    import tensorflow as tf

    masks = strategy.run(lambda: model.layers[0](tf.ones((1, 64)), training=True))
    return {"masks": [np.array(mask) for mask in strategy.experimental_local_results(masks)]}


def own_statistics(model: Any, strategy: Any) -> dict[str, Any]:
    """The moving mean on this rank, as read from outside (``seen``) and as its step uses it (``local``)."""

    def read() -> dict[str, Any]:
        value = model.layers[1].moving_mean
        local = strategy.run(lambda: value.value + 0.0)
        return {"seen": value.numpy(), "local": np.array(strategy.experimental_local_results(local)[0])}

    trained = read()
    model.evaluate(np.zeros((4, 6), "float32"), np.zeros((4, 1), "float32"), batch_size=4, verbose=0)
    return {"trained": trained, "evaluated": read()}


def hand_written_loop(model: Any, strategy: Any) -> dict[str, Any]:
    """Weights after a training loop of the user's own, which divides by the rows of the global batch itself."""
    import tensorflow as tf

    x, y = even().arrays
    optimizer = _sgd(clipnorm=0.05)
    optimizer.build(model.trainable_variables)

    def step(share: Any) -> Any:
        start, rows = share
        features, labels = (tf.slice(a, [start, 0], [rows, a.shape[1]]) for a in (x, y))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(features, training=True) - labels)) / len(x)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    total = strategy.num_replicas_in_sync
    cuts = [len(x) * i * i // (total * total) for i in range(total + 1)]  # unequal on purpose
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: (cuts[i := context.replica_id_in_sync_group], cuts[i + 1] - cuts[i])
    )
    run = tf.function(lambda shares: strategy.run(step, args=(shares,)))
    for _ in range(3):
        run(shares)
    return {"values": [np.array(w) for w in model.get_weights()]}


def one_batch(model: Any, strategy: Any) -> dict[str, Any]:
    """What ``train_on_batch`` returns, and the weights after it; each replica is given the same rows."""
    x, y = even().arrays
    logs = model.train_on_batch(x, y, return_dict=True)
    return {"values": [float(logs["loss"]), *(np.array(w) for w in model.get_weights())]}


def _loss_scaled(**arguments: Any) -> Any:
    import keras

    scaled = keras.optimizers.LossScaleOptimizer
    return _network(scaled(_sgd(**arguments), initial_scale=2.0**10, dynamic_growth_steps=3))


def scale_of_loss(model: Any, strategy: Any) -> dict[str, Any]:
    return {"values": [float(model.optimizer.dynamic_scale.numpy())]}


def _overflowing_everywhere() -> Any:
    import keras

    scaled = keras.optimizers.LossScaleOptimizer
    return _network(scaled(_sgd(), initial_scale=2.0**127), loss_weights=[30.0])


def _overflowing_somewhere() -> Any:
    import keras

    scaled = keras.optimizers.LossScaleOptimizer
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(scaled(_sgd(learning_rate=0.01), initial_scale=2.0**110), loss="mae")
    return model


def one_steep_row() -> Batches:
    x, y = vectors().arrays
    x[GLOBAL_BATCH - 1] = 1e9  # in the share of the last worker
    return Batches((x, y), GLOBAL_BATCH)


def stop_early() -> list[Any]:
    import keras

    return [
        keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.05, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, min_delta=0.05),
    ]


def _mean_loss(y: Any, predicted: Any) -> Any:
    import keras

    return keras.ops.mean(keras.ops.square(y - predicted))


def _sum_loss() -> Any:
    import keras

    return keras.losses.MeanSquaredError(reduction="sum")


def _mean_by_weights() -> Any:
    import keras

    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


CASES = (
    Case("tabular", tabular, table, validation=lambda: table(21), serves=True),
    Case("convolutional", convolutional, images, serves=True),
    Case("convolutional-adam", lambda: convolutional(_adam()), images),
    Case("sgd", lambda: _network(_sgd()), vectors, serves=True),
    Case("adam", lambda: _network(_adam()), vectors),
    Case("even", lambda: _network(_sgd()), even, extra=one_batch),
    Case("hand-written", lambda: _network(_sgd()), even, epochs=1, extra=hand_written_loop),
    Case("one-row-a-worker", lambda: _network(_sgd()), lambda: vectors(rows=19, global_batch=16)),
    Case("l2", lambda: _network(_sgd(), l2=0.1), vectors),
    Case("weight-decay", lambda: _network(_adam(weight_decay=0.1)), vectors),
    Case("clipnorm", lambda: _network(_sgd(clipnorm=0.05)), vectors),
    Case("global-clipnorm", lambda: _network(_sgd(global_clipnorm=0.05)), vectors),
    Case("clipvalue", lambda: _network(_sgd(clipvalue=0.02)), vectors),
    Case("clipped-embeddings", clipped_table, table),
    Case("accumulation", lambda: _network(_sgd(gradient_accumulation_steps=2, clipnorm=0.1)), vectors, epochs=3),
    Case("ema", lambda: _network(_sgd(use_ema=True, ema_momentum=0.8)), vectors),
    Case("ema-overwrite", lambda: _network(_sgd(use_ema=True, ema_overwrite_frequency=2)), vectors),
    Case("four-steps", lambda: _network(_sgd(), steps_per_execution=4), lambda: vectors(rows=69, global_batch=8)),
    Case("eager", lambda: _network(_sgd(), run_eagerly=True), vectors, epochs=1),
    Case("loss-scale", _loss_scaled, vectors, extra=scale_of_loss),
    Case("loss-scale-accumulation", lambda: _loss_scaled(gradient_accumulation_steps=2), vectors, extra=scale_of_loss),
    Case("overflow-everywhere", _overflowing_everywhere, vectors, extra=scale_of_loss),
    Case("overflow-on-one-worker", _overflowing_somewhere, one_steep_row, extra=scale_of_loss),
    Case("half-precision", _loss_scaled, vectors, policy="mixed_float16", tolerance=1e-2),
    Case("two-outputs", two_outputs, two_labels),
    Case("weighted-rows", lambda: _network(_sgd(), weighted_metrics=["mse"]), weighted_rows),
    Case("sum-of-losses", lambda: _network(_sgd(learning_rate=0.01), loss=_sum_loss(), l2=0.1), vectors),
    Case("mean-by-weights", lambda: _network(_sgd(), loss=_mean_by_weights()), weighted_rows),
    Case("masked-sequences", recurrent, sequences),
    Case("one-number-loss", lambda: _network(_sgd(), loss=_mean_loss), vectors),
    Case("built-late", built_late, vectors),
    Case("own-step", own_step, vectors),
    Case(
        "early-stopping",
        lambda: _network(_adam(learning_rate=0.05)),
        vectors,
        epochs=6,
        validation=lambda: vectors(seed=9),
        callbacks=stop_early,
    ),
    Case("synchronized-normalization", lambda: normalised(synchronized=True), vectors),
    Case("normalization", lambda: normalised(synchronized=False), vectors, same=False, extra=own_statistics),
    Case(
        "normalization-late",
        lambda: normalised(synchronized=False, late=True),
        vectors,
        same=False,
        extra=own_statistics,
    ),
    Case("dropout", with_dropout, vectors, same=False, extra=dropout_masks),
)
