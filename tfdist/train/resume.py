"""Where a training begins, goes on after a restart, and when it is written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import worker_context
from tfdist.strategies.corrections.training import set_usual_rows, usual_rows
from tfdist.train import state
from tfdist.train.checkpoint import Checkpoint, Manifest, Position, RankState
from tfdist.train.regroup import regrouped
from tfdist.train.task import CheckpointPlan
from tfdist.train.writer import CheckpointWriter


@contextmanager
def resumable(
    plan: CheckpointPlan | None, callbacks: Sequence[Any], model: Any, train: Any, arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The arguments of ``model.fit`` by which a training is written down, and goes on where it was.

    Args:
        plan: where and when; None writes nothing down.
        callbacks: of the training.
        model: compiled.
        train: the batches to come.
        arguments: the other arguments of ``model.fit``.

    Yields:
        ``callbacks``, and ``initial_epoch`` where there is a plan.
    """
    if plan is None:
        yield {"callbacks": list(callbacks)}
        return
    if plan.start is not None and model._distribute_strategy is None:
        # Outside of strategies Keras creates metrics, optimizer and some layers in the first step only.
        model._symbolic_build(data_batch=next(iter(train)))
    together = ResumableCallbacks(plan, callbacks, model, arguments)
    try:
        yield {"callbacks": together, "initial_epoch": together.initial_epoch}
    except BaseException:
        together.writer.close()
        raise
    together.writer.wait()


class ResumableCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls the callbacks of a training, and is the training's memory.

    An epoch that goes on at its step ``k`` is for Keras' loop an epoch as any other. The first ``k`` steps are taken
    without being computed: the train function does nothing, no batch is drawn, and the callbacks are not called, since
    they have seen these steps, and the beginning of the epoch, before the restart.

    Args:
        plan: where and when, and what the training goes on from.
        callbacks: in their order; those with ``keeps_no_state`` are of this launch alone.
        model: compiled; it may be built by ``fit``.
        arguments: ``epochs``, ``steps_per_epoch`` and ``verbose`` of ``model.fit``.
    """

    def __init__(
        self, plan: CheckpointPlan, callbacks: Sequence[Any], model: Any, arguments: Mapping[str, Any]
    ) -> None:
        self._epochs, self._steps, verbose = (arguments[k] for k in ("epochs", "steps_per_epoch", "verbose"))
        super().__init__(
            list(callbacks),
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=self._epochs,
            steps=self._steps,
        )
        self._async_train = False  # what is written down at the end of a step must be the callbacks' state by then
        self._plan, self._worker = plan, worker_context()
        self._position = plan.position
        self._to_skip = self._position.executions
        self.writer = CheckpointWriter(plan.folder, plan.keep, self._worker.rank)
        self._start: RankState | None = None
        if plan.start is None:
            return
        manifest = plan.start.manifest
        # Ranks that are new take the random states and callbacks of the last one: the chief's may differ.
        self._start = plan.start.read(min(self._worker.rank, manifest.world_size - 1))
        if (rows := self._start.values["usual_rows"]) is not None:
            same = not manifest.replicas or manifest.replicas == _replicas()
            set_usual_rows(model, rows if same else rows * manifest.replicas / _replicas())

    @property
    def initial_epoch(self) -> int:
        """The first epoch that Keras runs; none where a callback had stopped the training."""
        return self._epochs if self._position.stopped else self._position.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._kept = state.CallbackState([c for c in self.callbacks if not _keeps_no_state(c)])
        if self._start is None:
            return
        assert self._plan.start is not None
        name, manifest = f"checkpoint {self._plan.start.folder}", self._plan.start.manifest
        self._variables = self._all_variables(self._start.values["global_seed"])
        state.check_described(self._variables, manifest.variables, name)
        if (manifest.world_size, manifest.replicas or _replicas()) != (self._worker.world_size, _replicas()):
            self._start = self._for_this_gang(self._plan.start, self._start)
        state.write_variables(self._variables, self._start.arrays)
        self._kept.put_back(self._start.values["callbacks"], self._start.arrays, name)
        state.put_random_state_back(self._start)
        if self._to_skip:
            self._train_function = self.model.train_function
            self.model.train_function = lambda _iterator: {}
        else:
            self._start = None

    def _for_this_gang(self, start: Checkpoint, found: RankState) -> RankState:
        values = regrouped(start, self._worker.rank, state.replicas_of(self._variables), state.on_read(self._variables))
        return replace(found, arrays={**found.arrays, **values})

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._to_skip:
            super().on_epoch_begin(epoch, logs)
            return
        assert self._start is not None
        for callback in self.callbacks:
            if _keeps_no_state(callback):
                callback.on_epoch_begin(epoch, logs)
        state.write_variables(self._variables, self._start.arrays)  # Keras has just reset the metrics
        self._start = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._to_skip:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self.model.train_function = self._train_function
            return
        super().on_train_batch_end(batch, logs)
        before = self._position
        taken = self.model.steps_per_execution
        total = before.total + taken
        self._position = Position(
            total,
            before.epoch,
            before.executions + 1,
            *divmod(before.data_epoch * self._steps + before.data_step + taken, self._steps),
        )
        every = self._plan.every_steps
        due = every is not None and total // every > before.total // every
        # After the last step of an epoch there is more to come before the next one: validation, callbacks.
        if due and self._position.executions * taken < self._steps and not self.model.stop_training:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        before, every, stopped = self._position, self._plan.every_steps, bool(self.model.stop_training)
        self._position = Position(before.total, epoch + 1, 0, before.data_epoch, before.data_step, stopped)
        last = stopped or epoch + 1 == self._epochs
        if every is None or last or before.total % every < self.model.steps_per_execution:
            self._save()

    def _save(self) -> None:
        global_seed = state.has_global_seed()
        variables = self._all_variables(global_seed)
        kept = state.take_state(variables, self._kept)
        rows = usual_rows(self.model)
        worker, plan = self._worker, self._plan
        manifest = Manifest(
            plan.training,
            worker.run_id,
            worker.world_size,
            self._position,
            plan.settings,
            state.described(variables),
            replicas=_replicas(),
            on_read=state.on_read(variables),
        )
        values = {**kept.values, "global_seed": global_seed, "usual_rows": rows}
        self.writer.save(manifest, RankState(kept.arrays, values))

    def _all_variables(self, global_seed: bool) -> list[Any]:
        return state.variables_of(self.model, global_seed=global_seed)


def _replicas() -> int:
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def _keeps_no_state(callback: Any) -> bool:
    return getattr(callback, "keeps_no_state", False) or isinstance(callback, keras.callbacks.ProgbarLogger)
