"""Streams: a frame's partitions handed to the workers, on real barrier tasks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tfdist
from tfdist.data.dealt import POOL_BYTES, Dealt
from tfdist.data.streaming import Stream
from tfdist.errors import ConfigError, DataError, WorkerError
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id
from tfdist.launch.spark import SparkLauncher


@pytest.fixture(scope="module")
def local_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all workers keep rows: one folder, since another environment is another warm parent."""
    return tmp_path_factory.mktemp("local")


def run(spark: SparkSession, program: Any, frame: DataFrame, local_dir: Path, on_event: Any = lambda _: None) -> Any:
    """What ``program`` returned on each of two workers that get the partitions of ``frame``."""
    env = {"TFDIST_LOCAL_DIR": str(local_dir)}
    plan = LaunchPlan(new_run_id(), 2, 2, "multi_worker_mirrored", results="all", show_output="none", env=env)
    pickled = dump_program(lambda: json.dumps(program()).encode(), "test")
    return [json.loads(result) for result in SparkLauncher(spark).launch(pickled, plan, on_event, frame)]


def draw(dealt: Dealt, global_batch: int, shuffle: Any = True) -> dict[str, Any]:
    """All steps of all epochs as this worker sees them in the strategy's scope, after one look at the first."""
    from tfdist.data.failures import own_errors
    from tfdist.strategies.builders import strategy_scope

    with own_errors(), strategy_scope("multi_worker_mirrored"):
        local = tf.distribute.get_strategy().experimental_local_results
        batches = dealt.to_tf(global_batch=global_batch, shuffle=shuffle, seed=5)
        peeked = local(next(iter(batches))[1])[0].numpy().tolist()
        features, ids = [], []
        for x, y in batches:
            features.append({name: _listed(local(values)[0]) for name, values in x.items()})
            ids.append(local(y)[0].numpy().tolist())
    links = (os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    files = [link for link in links if link.startswith(os.environ["TFDIST_LOCAL_DIR"])]
    return {"peeked": peeked, "ids": ids, "features": features, "files": len(files)}


def _listed(tensor: Any) -> list[Any]:
    values = tensor.to_list() if hasattr(tensor, "to_list") else tensor.numpy().tolist()
    return [v.decode() if isinstance(v, bytes) else v for v in values]


def uneven(spark: SparkSession) -> DataFrame:
    """Five partitions of 0, 60, 200, 0 and 111 rows, with a text, a list, nulls, and 29 rows to drop."""
    frame = spark.range(0, 1000, 1, 5).filter("id between 200 and 259 or id between 400 and 599 or id >= 860")
    return frame.selectExpr(
        "id",
        "concat('t', id % 7) AS `a text`",
        "slice(array(id, id, id), 1, int(id % 4)) AS list",
        "if(id % 5 = 0, null, id) AS n",
        "if(id between 860 and 888, null, 1) AS there",
    )


CHOICE: dict[str, Any] = {"label": "id", "nulls": {"n": "mask", "there": "drop"}}


def test_each_row_is_read_once_in_each_of_three_epochs(spark: SparkSession, tmp_path: Path, local_dir: Path) -> None:
    """Uneven and empty partitions are spread over two workers; rows come whole, in equal steps; nothing stays."""
    stream = tfdist.data.stream(uneven(spark), **CHOICE)
    assert (stream.partitions, stream.rows, stream.steps(40)) == ((0, 60, 200, 0, 111), 371, 10)
    dealt, frame = stream.dealt(2, 40, 3)
    assert (
        stream.element_spec_text
        == tfdist.data.from_dataframe(uneven(spark), cache_dir=tmp_path / "cache", **CHOICE).element_spec_text
    )
    one, other = run(spark, functools.partial(draw, dealt, 40), frame, local_dir)
    wanted = {row["id"]: row for row in uneven(spark).dropna(subset=["there"]).collect()}
    assert [len(one["ids"]), len(other["ids"])] == [30, 30]
    for start in (0, 10, 20):
        steps = [a + b for a, b in zip(one["ids"][start : start + 10], other["ids"][start : start + 10], strict=True)]
        assert Counter(itertools.chain(*steps)) == Counter(wanted.keys())
        assert {len(step) for step in steps} <= {36, 37, 38}
        assert min(map(len, one["ids"] + other["ids"])) >= 1
    assert one["ids"][:10] != one["ids"][10:20] != one["ids"][20:]
    for worker in (one, other):
        assert worker["peeked"] == worker["ids"][0]
        assert worker["files"] > 0
        for ids, x in zip(worker["ids"], worker["features"], strict=True):
            rows = [wanted[number] for number in ids]
            assert x["a text"] == [row["a text"] for row in rows]
            assert x["list"] == [row["list"] for row in rows]
            assert x["n"] == [row["n"] or 0 for row in rows]
            assert x["n_is_null"] == [row["n"] is None for row in rows]
    assert list(local_dir.iterdir()) == []


def test_one_epoch_writes_nothing_and_keeps_the_order(spark: SparkSession, local_dir: Path) -> None:
    """The frame's own two partitions go to the workers as they are, in order without shuffling, and use no disk."""
    stream = tfdist.data.stream(spark.range(0, 500, 1, 2).selectExpr("id AS x", "id"), label="id")
    dealt, frame = stream.dealt(2, 60, 1)
    assert frame is stream.frame
    workers = run(spark, functools.partial(draw, dealt, 60, False), frame, local_dir)
    for rank, worker in enumerate(workers):
        assert [*itertools.chain(*worker["ids"])] == list(range(250 * rank, 250 * rank + 250))
        assert [len(step) for step in worker["ids"]] == [(k + 1) * 250 // 9 - k * 250 // 9 for k in range(9)]
        assert worker["files"] == 0


def twice(features: Any) -> Any:
    return {"twice": 2 * features["x"]}


def as_text(features: Any) -> Any:
    return {**features, "text": tf.strings.as_string(features["twice"])}


def test_transforms_follow_each_batch_of_a_stream(spark: SparkSession, local_dir: Path) -> None:
    """A list of them decides the element spec; each step's pool is transformed once, in order, after a look too."""
    chain = [twice, as_text]
    frame = spark.range(0, 120, 1, 2).selectExpr("id AS x", "id")
    stream = tfdist.data.stream(frame, label="id", transform=chain)
    assert stream.element_spec_text.splitlines() == ["twice: int64[]", "text: string[]", "label id: int64[]"]
    dealt = dataclasses.replace(stream.dealt(2, 4, 1)[0], row_bytes=POOL_BYTES)
    workers = run(spark, functools.partial(draw, dealt, 4, False), stream.frame, local_dir)
    for rank, worker in enumerate(workers):
        assert [*itertools.chain(*worker["ids"])] == list(range(60 * rank, 60 * rank + 60))
        assert worker["peeked"] == worker["ids"][0]
        for ids, x in zip(worker["ids"], worker["features"], strict=True):
            assert x == {"twice": [2 * i for i in ids], "text": [str(2 * i) for i in ids]}
    with pytest.raises(ConfigError, match=r"transform: expected a function of a batch .* it fails: KeyError"):
        tfdist.data.stream(frame, transform=lambda f: f["none"])


def test_a_corrupt_image_of_a_stream_is_named_by_what_finds_it(spark: SparkSession, local_dir: Path) -> None:
    """There are no files to say the row of, so the error has a condition by which Spark finds it."""
    png = tf.io.encode_png(np.zeros((2, 3, 3), np.uint8)).numpy()
    images = spark.createDataFrame([(png if i != 33 else png[:40], i) for i in range(64)], "image binary, id int")
    stream = tfdist.data.stream(images, label="id", transform=tfdist.data.decode_images("image", (2, 3, 3)))
    dealt, frame = stream.dealt(2, 8, 1)
    with pytest.raises(DataError, match=r"column 'image': .*sha2\(image, 256\) is '") as caught:
        run(spark, functools.partial(draw, dealt, 8), frame, local_dir)
    condition = re.search(r"where (sha2.*) is ('\w+')", str(caught.value))
    assert condition is not None
    assert [row.id for row in images.filter(f"{condition[1]} = {condition[2]}").collect()] == [33]


def build_model(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    hidden = keras.layers.Dense(8, activation="relu")(inputs["x"])
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.05), "binary_crossentropy", metrics=["accuracy"])
    return model


def learnable(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("float(sin(id)) a", "float(cos(7 * id)) b").selectExpr("*", "float(a + b > 0) y")


def side_by_side(features: Any) -> Any:
    return {"x": tf.stack([features["a"], features["b"]], axis=-1)}


def test_a_stream_trains_to_the_weights_of_one_process(spark: SparkSession, tmp_path: Path, local_dir: Path) -> None:
    """Three rows of one worker and five of the other in each step: the weights of one process on the same batches.

    The transform is published beside the model, and scoring takes raw columns through it.
    """
    steps, env = 50, {"TFDIST_LOCAL_DIR": str(local_dir)}
    rows = spark.range(0, 10 * steps, 1, 2).filter(f"id >= {5 * steps} or id % 5 < 3")
    batches = rows.selectExpr("id", f"if(id < {5 * steps}, int(id / 5), int((id - {5 * steps}) / 5)) step")
    in_turn = learnable(batches.repartition(1).sortWithinPartitions("step", "id").select("id"))
    handle = tfdist.data.from_dataframe(in_turn, label="y", cache_dir=tmp_path, transform=side_by_side)
    fit = tfdist.FitConfig(epochs=2, global_batch=8, seed=3, shuffle=False, output_dir=tmp_path / "stream")
    stream = tfdist.data.stream(learnable(rows), label="y", name="rows", transform=side_by_side)
    assert stream.partitions == (3 * steps, 5 * steps)
    result = tfdist.fit(build_model, stream, validation=handle, compute=tfdist.ComputeConfig(slots=2, env=env), fit=fit)
    one = tfdist.fit(
        build_model,
        handle,
        compute=tfdist.ComputeConfig(env=env),
        fit=tfdist.FitConfig(epochs=2, global_batch=8, seed=3, shuffle=False),
    )
    for a, b in zip(one.model().trainable_variables, result.model().trainable_variables, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5, atol=1e-6)
    assert result.rows == 8 * steps
    assert len(result.history["val_accuracy"]) == 2
    scored = tfdist.score(in_turn, result).collect()
    wanted = result.model().predict({"x": np.array([[row.a, row.b] for row in scored])}, verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in scored], wanted, rtol=1e-5)


def test_an_error_of_the_plan_ends_the_training_with_its_text(
    spark: SparkSession, tmp_path: Path, local_dir: Path
) -> None:
    """A UDF that fails after rows have arrived reaches the driver, and no process or file is left."""
    armed = tmp_path / "armed"

    @F.udf("float")
    def fails_late(number: int) -> float:
        if number == 27_000 and armed.exists():
            raise ZeroDivisionError("row 27000 of the user's own")
        return float(number % 2)

    stream = tfdist.data.stream(spark.range(0, 60_000, 1, 2).select("id", fails_late("id").alias("y")), label="y")
    armed.touch()
    dealt, frame = stream.dealt(2, 2000, 2)
    with pytest.raises(WorkerError, match=r"could not compute the rows(.|\n)*ZeroDivisionError: row 27000 of the"):
        run(spark, functools.partial(draw, dealt, 2000), frame, local_dir)
    assert list(local_dir.iterdir()) == []


def changing(spark: SparkSession, flag: Path) -> DataFrame:
    """400 rows while the file is not there, then 399."""
    kept = F.udf(lambda number: number != 300 or not flag.exists(), "boolean")
    return spark.range(0, 400, 1, 2).filter(kept("id")).selectExpr("id AS x", "id")


def test_another_number_of_rows_than_counted_is_told(spark: SparkSession, tmp_path: Path, local_dir: Path) -> None:
    """A source that gives other rows the second time is an error on the driver, at the deal and in the training."""
    flag = tmp_path / "flag"
    stream = tfdist.data.stream(changing(spark, flag), label="id", name="clicks")
    dealt, frame = stream.dealt(2, 50, 1)
    flag.touch()
    with pytest.raises(DataError, match=r"clicks: expected 400 rows as counted before, got 399.*cache\(\)"):
        stream.dealt(1, 50, 1)
    with pytest.raises(DataError, match=r"clicks: rank 1: expected 200 rows, as counted .*, got 199.*cache\(\)"):
        run(spark, functools.partial(draw, dealt, 50), frame, local_dir)


def leave_rows_alone() -> str:
    return "done"


def test_a_training_may_end_before_its_rows(spark: SparkSession, local_dir: Path) -> None:
    """A program that reads nothing returns while most rows wait; an interrupted one ends too; the next one runs."""
    frame = tfdist.data.stream(spark.range(0, 400_000, 1, 2), name="ids").frame
    assert run(spark, leave_rows_alone, frame, local_dir) == ["done", "done"]

    def interrupt(event: Any) -> None:
        if event["kind"] == "joined":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spark, functools.partial(time.sleep, 600), frame, local_dir, interrupt)
    assert run(spark, leave_rows_alone, frame, local_dir) == ["done", "done"]


def test_partitions_that_spark_cannot_hand_over_are_spread(spark: SparkSession) -> None:
    """Coalesced partitions and uneven ones are spread anew; where a step stays without a row, the numbers are told."""
    coalesced = tfdist.data.stream(spark.range(0, 400, 1, 4).coalesce(2))
    assert (coalesced.partitions, coalesced.whole) == ((200, 200), False)
    dealt, frame = coalesced.dealt(2, 50, 1)
    assert frame is not coalesced.frame
    assert dealt.shares == (200, 200)
    few = tfdist.data.stream(spark.range(0, 21, 1, 2).filter("id > 2"), name="few")
    assert min(few.dealt(2, 3, 1)[0].shares) >= 6
    with pytest.raises(
        ConfigError, match=r"few: expected a row on each of 2 workers in each of 18 steps, got \d+, \d+"
    ):
        few.dealt(2, 1, 1)


@pytest.mark.parametrize(
    ("expressions", "choice"),
    [
        (
            ["if(id = 3, null, id) n", "if(id < 4, null, array(id)) a", "if(id = 9, double('nan'), double(id)) f"],
            {"f": "int8"},
        ),
        (["array_repeat(id, int(id % 2) + 3) v", "array(if(id = 5, null, id)) w"], {"v": "int64[3]"}),
        (
            ["id + if(id = 4, 0.5d, 0d) d", "cast(if(id = 4, '0.5', '9223372036854775807') as decimal(38,19)) m"],
            {"d": "int32", "m": "int64"},
        ),
    ],
    ids=["nulls", "arrays", "fractions"],
)
def test_rows_are_checked_as_when_they_are_written(
    spark: SparkSession, tmp_path: Path, expressions: list[str], choice: dict[str, str]
) -> None:
    """Nulls without a policy, arrays of other lengths, values out of range: as from_dataframe says, without places."""
    df = spark.range(0, 10, 1, 3).selectExpr(*expressions)
    with pytest.raises(DataError) as written:
        tfdist.data.from_dataframe(df, cache_dir=tmp_path, dtypes=choice)
    with pytest.raises(DataError) as streamed:
        tfdist.data.stream(df, dtypes=choice)
    # The rows of a stream have no lasting place that could be named.
    assert str(streamed.value) == re.sub(r" \([^()]*row \d+ of the data\)", "", str(written.value))
    assert len(str(written.value).splitlines()) >= 2


def test_what_no_stream_can_do_is_refused_with_the_way_out(spark: SparkSession) -> None:
    """Local processes, a remainder to drop and a second stream for validation name from_dataframe or what to leave."""
    stream = tfdist.data.stream(learnable(spark.range(0, 64, 1, 2)), label="y")
    assert isinstance(stream, Stream)
    with pytest.raises(ConfigError) as caught:
        tfdist.fit(
            build_model,
            stream,
            compute=tfdist.ComputeConfig(launcher="local"),
            fit=tfdist.FitConfig(drop_remainder=True),
        )
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["train", "fit.drop_remainder"]
    assert "use from_dataframe, or launcher='spark'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"validation: .* got Stream; .* use from_dataframe for it"):
        tfdist.fit(build_model, stream, validation=stream)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a training to which Spark hands the rows"):
        stream.dealt(1, 8, 1)[0].to_tf(global_batch=8)
