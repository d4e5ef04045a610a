"""What runs in a training process: the whole training on one page."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tfdist.cluster import worker_context
from tfdist.data import Handle
from tfdist.errors import ConfigError
from tfdist.launch.pulse import At, mark
from tfdist.train.checkpoint import Position
from tfdist.train.task import FitTask, TrainingData, epoch_rows


def fit_on_worker(task: FitTask) -> dict[str, Any]:
    """Train on this worker's share and publish the model on the chief.

    Returns:
        JSON values: ``history`` (name to a value per epoch), ``digest`` of the trained weights, ``model_path`` (chief),
        ``epoch_seconds`` and ``seconds`` by phase.
    """
    from tfdist.data.failures import own_errors
    from tfdist.strategies.builders import strategy_scope
    from tfdist.train.callbacks import EpochEvents, StepMarks
    from tfdist.train.publish import MODEL, check_announced, publish
    from tfdist.train.resume import resumable

    worker, fit = worker_context(), task.fit
    if worker.is_chief:
        check_announced(task.output_dir, worker.run_id)
    if task.checkpoints is not None:
        check_announced(task.checkpoints.folder, worker.run_id, "fit.checkpoint_dir")
    clock = [time.perf_counter()]
    mark(At.MEETING)
    placed: dict[str, Any] = {
        "threads": task.compute.threads_per_worker,
        "seed": fit.seed,
    }
    with own_errors(), strategy_scope(worker.strategy, **placed):
        mark(At.WORKING)
        share: dict[str, Any] = {"repeat": True, "seed": fit.seed}
        data = _laid_out(task, worker.world_size)
        begin = Position() if task.checkpoints is None else task.checkpoints.position
        train = data.to_tf(
            global_batch=fit.global_batch,
            shuffle=fit.shuffle,
            drop_remainder=fit.drop_remainder,
            epoch=begin.data_epoch,
            start_step=begin.data_step,
            **share,
        )
        steps = data.steps(fit.global_batch, fit.drop_remainder)
        arguments: dict[str, Any] = {"steps_per_epoch": steps}
        if task.validation is not None:
            batch = fit.validation_batch or fit.global_batch
            arguments["validation_data"] = task.validation.to_tf(global_batch=batch, shuffle=False, **share)
            arguments["validation_steps"] = task.validation.steps(batch)
        model = _checked(task.build_model(task.train.schema))
        clock.append(time.perf_counter())
        events = EpochEvents(epoch_rows(task.train, fit), fit.epochs, begin, steps)
        callbacks = [StepMarks(), *(task.callbacks() if task.callbacks else ()), *([events] if worker.is_chief else ())]
        arguments |= {"epochs": fit.epochs, "verbose": fit.verbose if worker.is_chief else 0}
        with resumable(task.checkpoints, callbacks, model, train, arguments) as resumed:
            history = model.fit(train, shuffle=False, **arguments, **resumed).history  # the pipeline has shuffled
        clock.append(time.perf_counter())
        # Every rank saves: reading variables that are aggregated on read takes all of them.
        assert worker.scratch_dir is not None
        saved = worker.scratch_dir / MODEL
        model.save(saved)
    path = publish(saved, task.train, task.output_dir) if worker.is_chief else None
    clock.append(time.perf_counter())
    return {
        "history": {name: [float(v) for v in values] for name, values in history.items()},
        "digest": _digest(model),
        "model_path": None if path is None else str(path),
        "epoch_seconds": events.epoch_seconds,
        "seconds": dict(zip(("build", "train", "save"), (b - a for a, b in pairwise(clock)), strict=True)),
    }


def _laid_out(task: FitTask, workers: int) -> TrainingData:
    """The training rows in the batches of the workers with which the training began."""
    import tensorflow as tf

    data, planned = task.train, task.laid_out_for
    if not isinstance(data, Handle) or planned in (None, workers):
        return data
    each = tf.distribute.get_strategy().num_replicas_in_sync // workers  # a worker may hold several GPUs
    return replace(data, laid_out_for=planned * each)


def _checked(model: Any) -> Any:
    import keras

    if not isinstance(model, keras.Model):
        raise ConfigError(f"build_model: expected it to return a compiled Keras model, got {model!r}")
    if not model.compiled:
        raise ConfigError("build_model: expected a compiled Keras model, got one without model.compile(...)")
    return model


def _digest(model: Any) -> str:
    """SHA-256 of the trainable weights, to prove that all workers end with the same."""
    import numpy as np

    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()
