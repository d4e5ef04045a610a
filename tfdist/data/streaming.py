"""A DataFrame that is trained on without being written first: its partitions are handed to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tfdist.data.counting import facts_from_json, facts_of_batch, facts_to_json, together
from tfdist.data.dealt import Dealt, steps_of
from tfdist.data.facts import Facts, checked_lengths
from tfdist.data.location import default_cache_dir
from tfdist.data.schema import Nulls, Schema
from tfdist.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Stream:
    """A DataFrame as training data, with what is known of its rows. Lives on the driver.

    Args:
        frame: the chosen columns, by their names in files.
        schema: columns and tensors.
        partitions: rows of each partition of the frame.
        whole: whether the partitions are made where they are read, as Spark demands of barrier tasks; those of a
            ``coalesce`` or of some unions are not.
        row_bytes: bytes of a row in memory, on average.
        name: what errors call it.
        transform: applied to the features of each batch.
    """

    frame: DataFrame
    schema: Schema
    partitions: tuple[int, ...]
    whole: bool
    row_bytes: int
    name: str
    transform: Callable[[Any], Any] | None = None

    @property
    def rows(self) -> int:
        """Rows, after those that a ``drop`` policy left out."""
        return sum(self.partitions)

    @property
    def model_root(self) -> Path:
        """Where trained models are kept unless said otherwise."""
        return default_cache_dir() / "models"

    @property
    def element_spec(self) -> Any:
        """The ``tf.TensorSpec`` of a batch: a dict of columns, or (dict, label); the first dimension is the rows."""
        from tfdist.data.pipeline import element_spec

        return element_spec(self.schema)

    @property
    def element_spec_text(self) -> str:
        """The element spec as text, one tensor a line; needs no TensorFlow."""
        return self.schema.describe()

    def steps(self, global_batch: int) -> int:
        """Steps of an epoch, the same on every worker.

        Args:
            global_batch: rows of a step over all workers, on average at most.
        """
        return steps_of(self.rows, global_batch)

    def dealt(self, workers: int, global_batch: int, epochs: int) -> tuple[Dealt, DataFrame]:
        """The rows for so many workers: what they need to know, and a frame with a partition for each.

        The frame's own partitions are taken where there is one for each worker, with a row for each step. Others are
        spread by a shuffle and counted again.

        Raises:
            ConfigError: a worker would be without a row in some step.
            DataError: the rows are not as many as before.
        """
        steps, frame, shares = self.steps(global_batch), self.frame, self.partitions
        if not self.whole or len(shares) != workers or min(shares) < steps:
            frame = self.frame.repartition(workers)
            shares = tuple(part.rows for part in _counted(frame, Schema(()))[0])
            if sum(shares) != self.rows:
                raise DataError(
                    f"{self.name}: expected {self.rows} rows as counted before, got {sum(shares)}; the frame gives "
                    "other rows each time it is computed (random values, a source that changes): cache() it, or use "
                    "from_dataframe"
                )
        if min(shares) < steps:
            raise ConfigError(
                f"{self.name}: expected a row on each of {workers} workers in each of {steps} steps, got "
                f"{', '.join(map(str, shares))} rows on them, spread as evenly as Spark does; make fit.global_batch "
                "larger, or use fewer slots"
            )
        return Dealt(self.name, self.schema, shares, self.row_bytes, epochs, self.transform), frame


def stream(
    df: DataFrame,
    *,
    label: str | None = None,
    features: Sequence[str] | None = None,
    nulls: Nulls | None = None,
    dtypes: Mapping[str, str] | None = None,
    pack: Mapping[str, Sequence[str]] | None = None,
    transform: Any = None,
    name: str | None = None,
) -> Stream:
    """Training data from a DataFrame that is not written to shared storage: Spark hands its rows to the workers.

    The plan is computed twice: once here, to count and check the rows, and once for the training, whose first epoch
    trains while rows arrive. It is computed a third time where there is not one partition for each worker, or where
    they are too uneven, since rows are then spread anew; over Spark Connect always. ``cache()`` a frame that is
    expensive, and one whose rows differ from time to time: other rows in the same number are not noticed. For later
    epochs each worker keeps its rows on the local disk (``$TFDIST_LOCAL_DIR``, else the temporary folder); one epoch
    writes nothing.

    Unlike the batches of :func:`from_dataframe`, those of a stream depend on the number of workers.

    Args:
        df: the rows.
        label: the column to learn.
        features: columns to read, in this order; by default all but the label.
        nulls: column to ``"error"`` (the default), ``"drop"``, ``"mask"`` or ``("fill", value)``.
        dtypes: column to the dtype to cast to, for example ``"float32"``, and how arrays are laid out; see
            :meth:`Schema.from_spark`.
        pack: name to numeric features of one dtype that become one tensor ``[rows, features]`` of that name.
        transform: a function, or a list of them, of the features of a batch (a dict of tensors ``[rows, ...]``) that
            returns those the model reads, as for :func:`from_dataframe`.
        name: what errors call it.

    Raises:
        DataError: a column is missing or has a type that becomes no tensor, or the rows have nulls without a policy or
            arrays of other lengths than declared.
        ConfigError: a setting makes no sense, or the transform cannot be applied to the features.
    """
    from tfdist.data.materialize import stored_columns

    schema = Schema.from_spark(df.schema, features=features, label=label, nulls=nulls, dtypes=dtypes, pack=pack)
    frame = stored_columns(df, schema)
    parts, whole = _counted(frame, schema)
    facts = together(parts)
    nulls_in = {column: count for (kind, column), count in facts.found.items() if kind == "nulls"}
    decided = schema.with_lengths(checked_lengths(schema, nulls_in, facts))
    row_bytes = max(1, facts.found.get(("bytes", ""), 0) // max(1, facts.rows))
    if transform is not None:
        from tfdist.data.transform import transformed

        decided, transform = transformed(decided, transform)
    return Stream(frame, decided, tuple(part.rows for part in parts), whole, row_bytes, name or "stream", transform)


def _counted(frame: DataFrame, schema: Schema) -> tuple[list[Facts], bool]:
    """The facts of each partition, in their order, and whether Spark can hand them to barrier tasks."""
    # The plan of the training but for the function: so its partitions will be these.
    counting = frame.mapInArrow(partial(_count, schema), "partition int, facts string")
    found = {row[0]: facts_from_json(row[1]) for row in counting.collect()}
    parts = [found[number] for number in sorted(found)]
    plan = getattr(counting, "_jdf", None)  # the client of Spark Connect does not see it, so its rows are spread anew
    return parts, plan is not None and _is_whole(plan.queryExecution().toRdd(), len(parts))


def _count(schema: Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    facts = Facts(0, {})
    for batch in batches:
        facts = together([facts, facts_of_batch(batch, schema)])
    context = TaskContext.get()
    assert context is not None
    numbers = pa.array([context.partitionId()], pa.int32())
    yield pa.record_batch({"partition": numbers, "facts": [facts_to_json(facts)]})


def _is_whole(rdd: Any, partitions: int) -> bool:
    """Whether all RDDs of a stage have so many partitions (DAGScheduler.checkBarrierStageWithRDDChainPattern)."""
    if rdd.getNumPartitions() != partitions:
        return False
    dependencies = rdd.dependencies()
    each = (dependencies.apply(i) for i in range(dependencies.size()))
    return all(_is_whole(d.rdd(), partitions) for d in each if "ShuffleDependency" not in d.getClass().getName())
