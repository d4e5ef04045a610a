"""The value that stands for a data set: small, picklable, usable in any process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.cluster import worker_context
from tfdist.data.manifest import Manifest
from tfdist.data.schema import Schema
from tfdist.data.shards import plan_batches
from tfdist.errors import ConfigError


@dataclass(frozen=True)
class Handle:
    """A data set. Holds no rows; needs neither a Spark session nor, until read, TensorFlow.

    Args:
        manifest: its files, row counts and schema.
        cache_dir: folder of cached data, beside which models are kept.
    """

    manifest: Manifest
    cache_dir: str

    @property
    def rows(self) -> int:
        """Rows, after those that a ``drop`` policy left out."""
        return self.manifest.rows

    @property
    def schema(self) -> Schema:
        """Columns and their tensors."""
        return self.manifest.schema

    @property
    def root(self) -> Path:
        """Folder of the files."""
        return Path(self.manifest.root)

    @property
    def model_root(self) -> Path:
        """Where trained models are kept unless said otherwise."""
        return Path(self.cache_dir) / "models"

    @property
    def element_spec(self) -> Any:
        """The ``tf.TensorSpec`` of a batch: a dict of columns, or (dict, label); the first dimension is the rows."""
        from tfdist.data.pipeline import element_spec

        return element_spec(self.schema)

    @property
    def element_spec_text(self) -> str:
        """The element spec as text, one tensor a line; needs no TensorFlow."""
        return self.schema.describe()

    def steps(self, global_batch: int, drop_remainder: bool = False) -> int:
        """Steps of an epoch, the same on every worker.

        Args:
            global_batch: rows of a step over all workers.
            drop_remainder: leave out the rows that do not fill a batch.

        Raises:
            ConfigError: there are fewer rows, or smaller batches, than workers.
        """
        _check_positive("global_batch", global_batch)
        return plan_batches(self.rows, global_batch, worker_context().world_size, drop_remainder).steps

    def to_tf(
        self,
        *,
        global_batch: int,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        start_step: int = 0,
        repeat: bool = False,
        drop_remainder: bool = False,
        lanes: int | None = None,
    ) -> Any:
        """The rows as batches; inside a training this worker's share of each, elsewhere all of it.

        A batch is a dict of columns by their own names, or (dict, label) when a label is named. The global batches do
        not depend on the number of workers.

        Args:
            global_batch: rows of a step over all workers.
            shuffle: mix the rows anew each epoch; False keeps the order of the source.
            seed: of the order.
            epoch: number of the first epoch, which decides its order.
            start_step: step of that epoch to begin with, as if those before it had been taken; at most the rows that
                are mixed with each other are read for it in vain.
            repeat: one endless stream of epochs. Otherwise an iteration is one epoch and the next iteration the
                next epoch; one that is abandoned before its last batch does not count.
            drop_remainder: leave out the rows that do not fill a batch.
            lanes: parts of the data that each batch draws from; by default 12 or somewhat more when shuffling, else 1.

        Returns:
            A ``tf.data.Dataset``; in the scope of a strategy over several workers the distributed dataset that
            ``model.fit`` takes.

        Raises:
            ConfigError: a setting is out of range; there are fewer rows, or smaller batches, than workers; or a
                shuffled epoch over several workers is too short to be told from the next (use ``repeat``).
        """
        _check_positive("global_batch", global_batch)
        if lanes is not None:
            _check_positive("lanes", lanes)
        for name, value in (("seed", seed), ("epoch", epoch), ("start_step", start_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: expected a whole number of at least 0, got {value!r}")
        for name, value in (("shuffle", shuffle), ("repeat", repeat), ("drop_remainder", drop_remainder)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}: expected True or False, got {value!r}")
        from tfdist.data.pipeline import dataset
        from tfdist.data.reader import Reading

        reading = Reading(
            self.manifest,
            global_batch,
            seed=seed,
            shuffle=shuffle,
            drop_remainder=drop_remainder,
            lanes=lanes,
        )
        return dataset(reading, epoch, start_step, repeat)


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
