"""The value that stands for a data set: small, picklable, usable in any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tfdist.cluster import worker_context
from tfdist.data.batches import plan_batches
from tfdist.data.manifest import Manifest
from tfdist.data.schema import Schema
from tfdist.errors import ConfigError

Shuffle = bool | Literal["pool"]


@dataclass(frozen=True)
class Handle:
    """A data set. Holds no rows; needs neither a Spark session nor, until read, TensorFlow.

    Args:
        manifest: its files, row counts and schema.
        cache_dir: folder of cached data, beside which models are kept.
        transform: applied to the features of each batch.
        laid_out_for: the number of workers whose batches these are, where others read them: of a training that goes on
            with fewer or more workers; None: that of now.
    """

    manifest: Manifest
    cache_dir: str
    transform: Callable[[Any], Any] | None = None
    laid_out_for: int | None = None

    @staticmethod
    def of(manifest: Manifest, cache_dir: str, transform: Any = None) -> Handle:
        """A handle whose element spec is that after a transform, a function of the features or a list of them.

        Raises:
            ConfigError: the transform cannot be applied to the features.
        """
        if transform is None:
            return Handle(manifest, cache_dir)
        from tfdist.data.transform import transformed

        schema, chain = transformed(manifest.schema, transform, manifest)
        return Handle(replace(manifest, schema=schema), cache_dir, chain)

    @property
    def rows(self) -> int:
        """Rows, after those that a ``drop`` policy left out."""
        return self.manifest.rows

    @property
    def schema(self) -> Schema:
        """Columns and their tensors."""
        return self.manifest.schema

    @property
    def root(self) -> Path | str:
        """Folder of the files, a URL where it is not a path."""
        return self.manifest.storage.location

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
            ConfigError: the data is empty, or the batches are smaller than the workers are many.
        """
        _check_positive("global_batch", global_batch)
        world = min(worker_context().world_size, max(self.rows, 1))
        return plan_batches(self.rows, global_batch, world, drop_remainder, self.laid_out_for).steps

    def to_tf(
        self,
        *,
        global_batch: int,
        shuffle: Shuffle = True,
        seed: int = 0,
        epoch: int = 0,
        start_step: int = 0,
        repeat: bool = False,
        drop_remainder: bool = False,
        cache: bool | None = None,
        lanes: int | None = None,
        pool_bytes: int = 16 * 2**20,
    ) -> Any:
        """The rows as batches; inside a training this worker's share of each, elsewhere all of it.

        A batch is a dict of columns by their own names, or (dict, label) when a label is named. The global batches do
        not depend on the number of workers.

        Args:
            global_batch: rows of a step over all workers.
            shuffle: True mixes the rows anew each epoch, nearly as well as a permutation of all of them would.
                ``"pool"`` permutes the row groups and mixes only the rows of a few neighbours: for data that no local
                disk holds, and in no order of its own. False keeps the order of the source.
            seed: of the order.
            epoch: number of the first epoch, which decides its order.
            start_step: step of that epoch to begin with, as if those before it had been taken; at most the rows that
                are mixed with each other are read for it in vain.
            repeat: one endless stream of epochs. Otherwise an iteration is one epoch and the next iteration the
                next epoch; one that is abandoned before its last batch does not count.
            drop_remainder: leave out the rows that do not fill a batch.
            cache: keep the rows on the local disk (``$TFDIST_LOCAL_DIR``, else the temporary folder) as they are first
                read, in fixed width, and read them from there in later epochs, which is faster. None does so for
                ``shuffle=True`` alone, which needs it; each worker keeps its own share, and nothing is left at the end.
            lanes: parts of the data that each batch draws from; by default 12 or somewhat more when shuffling, else 1.
            pool_bytes: rows that are mixed with each other at a time, in bytes over all workers; the memory of a worker
                grows by up to four times its part of them.

        Returns:
            A ``tf.data.Dataset``; in the scope of a strategy over several workers the distributed dataset that
            ``model.fit``, ``model.evaluate`` and ``model.predict`` take. They give every worker the values of all
            workers: with ``shuffle=False`` the predictions of all rows, in the order of the source.

        Raises:
            ConfigError: a setting is out of range; there are fewer rows, or smaller batches, than workers; or a
                shuffled epoch over several workers is too short to be told from the next (use ``repeat``).
            DataError: the local disk has too little space for the cache.
        """
        _check_positive("global_batch", global_batch)
        if lanes is not None:
            _check_positive("lanes", lanes)
        for name, value in (("seed", seed), ("epoch", epoch), ("start_step", start_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: expected a whole number of at least 0, got {value!r}")
        _check_positive("pool_bytes", pool_bytes)
        for name, value in (("repeat", repeat), ("drop_remainder", drop_remainder)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}: expected True or False, got {value!r}")
        if cache not in (None, True, False):
            raise ConfigError(f"cache: expected True, False or None, got {cache!r}")
        if shuffle is not True and shuffle is not False and shuffle != "pool":
            raise ConfigError(f"shuffle: expected True, False or 'pool', got {shuffle!r}")
        if shuffle is True and cache is False:
            raise ConfigError("cache: expected True with shuffle=True, which draws from everywhere; or shuffle='pool'")
        from tfdist.data.pipeline import dataset
        from tfdist.data.reader import Reading

        reading = Reading(
            self.manifest,
            global_batch,
            seed=seed,
            mixing="rows" if shuffle is True else "pool" if shuffle else "none",
            cached=shuffle is True if cache is None else cache,
            drop_remainder=drop_remainder,
            lanes=lanes,
            pool_bytes=pool_bytes,
            laid_out_for=self.laid_out_for,
        )
        if self.transform is None:
            return dataset(reading, epoch, start_step, repeat)
        from tfdist.data.transform import reading as traced_for

        with traced_for(self.manifest):
            return dataset(reading, epoch, start_step, repeat, self.transform)


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
