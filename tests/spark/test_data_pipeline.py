"""Batches as TensorFlow gets them: content, shares of workers, epochs; files without Spark."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import threading
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tfdist.data import Handle, from_parquet
from tfdist.data.pipeline import one_after_another
from tfdist.data.rowgroups import RowGroups
from tfdist.errors import ConfigError, DataError
from tfdist.launch.local import LocalLauncher
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id
from tfdist.testing import as_worker, tiny_parquet


def write(folder: Path, groups: list[int], **choice: Any) -> Handle:
    """Rows numbered from 0, one file with these row groups; the other columns follow from the number."""
    rows = np.arange(sum(groups))
    schema = pa.schema(
        {"row": pa.int64(), "a.b": pa.string(), "n": pa.float32(), "v": pa.list_(pa.int16()), "y": pa.int32()}
    )
    with pq.ParquetWriter(folder / "part.parquet", schema) as writer:
        for part in np.split(rows, np.cumsum(groups)[:-1]):
            columns = [
                pa.array(part),
                pa.array([f"text {i % 7}" for i in part], pa.string()),
                pa.array([None if i % 5 == 0 else float(i) for i in part], pa.float32()),
                pa.array([[i % 100, i % 3] for i in part], pa.list_(pa.int16())),
                pa.array(part * 2, pa.int32()),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, len(part)))
    return from_parquet(folder, **{"label": "y", "nulls": {"n": "mask"}, **choice})


def rows_of(batches: Any) -> list[list[int]]:
    return [features["row"].numpy().tolist() for features, _ in batches]


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Handle:
    return write(tmp_path_factory.mktemp("rows"), [100, 37, 0, 250, 1, 112])


ORDERS: list[Any] = [False, True, "pool"]


@pytest.fixture(params=[2**20, 1], ids=["cut", "single"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are cut out of larger blocks, or are blocks by themselves, as those of images are."""
    monkeypatch.setattr("tfdist.data.reader.SINGLE_BYTES", request.param)


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("shuffle", ORDERS)
def test_a_row_keeps_its_columns_together(handle: Handle, shuffle: Any) -> None:
    """Numbers, text, null masks, arrays and the label of a row stay in one row, in batches kept until the end."""
    kept = list(handle.to_tf(global_batch=64, shuffle=shuffle, seed=3))
    for features, label in kept:
        row = features["row"].numpy()
        assert label.numpy().tolist() == (row * 2).tolist()
        assert features["a.b"].numpy().tolist() == [f"text {i % 7}".encode() for i in row]
        assert features["n_is_null"].numpy().tolist() == (row % 5 == 0).tolist()
        assert features["n"].numpy().tolist() == np.where(row % 5 == 0, 0, row).tolist()
        assert features["v"].numpy().tolist() == [[i % 100, i % 3] for i in row]
    read = [row for rows in rows_of(kept) for row in rows]
    assert sorted(read) == list(range(500))
    assert (read == list(range(500))) is (shuffle is False)
    assert len(kept) == handle.steps(64) == 8


def test_the_element_spec_is_known_before_reading(handle: Handle) -> None:
    """The handle's element spec is what the pipeline has; a dict alone without a label."""
    assert handle.to_tf(global_batch=8).element_spec == handle.element_spec
    features, label = handle.element_spec
    assert features["v"] == tf.TensorSpec((None, 2), "int16")
    assert label.dtype == tf.int32
    assert set(from_parquet(handle.root, features=["row"]).element_spec) == {"row"}


@pytest.mark.parametrize(("world", "shuffle"), [(3, False), (2, True), (5, True), (3, "pool")])
def test_the_shares_of_the_workers_make_up_the_global_batches(handle: Handle, world: int, shuffle: Any) -> None:
    """What the workers of a training read in a step is together what one process reads."""
    whole = rows_of(handle.to_tf(global_batch=90, shuffle=shuffle, lanes=30))
    shares = []
    for rank in range(world):
        with as_worker(rank, world):
            shares.append(rows_of(handle.to_tf(global_batch=90, shuffle=shuffle, lanes=30)))
            assert handle.steps(90) == len(whole)
    assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == whole


@pytest.mark.parametrize(
    ("groups", "world", "batch"), [([10, 10, 1000], 2, 64), ([5], 4, 8), ([0, 3, 0, 1, 0, 2], 3, 4)]
)
def test_any_layout_of_row_groups_gives_every_worker_rows(
    tmp_path: Path, groups: list[int], world: int, batch: int
) -> None:
    """Skewed, tiny and empty row groups: each row once, equally many steps, never an empty batch."""
    handle = write(tmp_path, groups)
    shares = []
    for rank in range(world):
        with as_worker(rank, world):
            shares.append(rows_of(handle.to_tf(global_batch=batch)))
    assert len({len(steps) for steps in shares}) == 1
    assert all(rows for steps in shares for rows in steps)
    assert sorted(row for steps in shares for rows in steps for row in rows) == list(range(sum(groups)))


def test_fewer_rows_than_workers_are_refused_before_reading(tmp_path: Path) -> None:
    """Three rows cannot feed four workers: refused when the pipeline is made, with both numbers."""
    handle = write(tmp_path, [3])
    with as_worker(0, 4), pytest.raises(ConfigError, match="4 workers, got 3 rows"):
        handle.to_tf(global_batch=8)


@pytest.mark.usefixtures("batches")
def test_each_full_iteration_is_the_next_epoch(handle: Handle) -> None:
    """Iterations follow the epochs' orders; a stopped one does not count, one drawn by steps alone does."""
    epochs = [rows_of(handle.to_tf(global_batch=200, epoch=e)) for e in range(4)]
    assert epochs[0] != epochs[1]
    dataset = handle.to_tf(global_batch=200)
    assert len(dataset) == 3
    for steps in (1, 2, 0):
        assert rows_of(itertools.islice(dataset, steps)) == epochs[0][:steps]
    assert rows_of(dataset) == epochs[0]
    drawn = iter(dataset)
    assert rows_of([next(drawn) for _ in range(3)]) == epochs[1]
    assert rows_of(dataset) == epochs[2]
    assert rows_of(handle.to_tf(global_batch=200, epoch=2)) == epochs[2]


@pytest.mark.usefixtures("batches")
def test_repeat_is_one_stream_of_epochs(handle: Handle) -> None:
    """The endless stream has the batches of epoch after epoch, and says that it is endless."""
    stream = handle.to_tf(global_batch=200, repeat=True, epoch=1)
    assert stream.cardinality() == tf.data.INFINITE_CARDINALITY
    wanted = [b for e in (1, 2, 3) for b in rows_of(handle.to_tf(global_batch=200, epoch=e))]
    assert rows_of(stream.take(9)) == wanted


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("shuffle", ORDERS)
def test_an_epoch_can_be_begun_at_any_step(handle: Handle, shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each step on the batches are those of a whole run, then come the next epochs; earlier rows are not read."""
    read = read_groups(monkeypatch)  # at first: what other datasets read ahead counts too
    assert rows_of(handle.to_tf(start_step=16, global_batch=30, shuffle=False)) == [[*range(480, 500)]]
    assert set(read) == {5}
    monkeypatch.setattr("tfdist.data.reader.BLOCK_BYTES", 4000)
    settings: dict[str, Any] = {"global_batch": 30, "shuffle": shuffle, "pool_bytes": 4000}
    epochs = [rows_of(handle.to_tf(epoch=e, **settings)) for e in (1, 2, 3)]
    for step in range(handle.steps(30)):
        resumed = handle.to_tf(epoch=1, start_step=step, **settings)
        assert rows_of(resumed) == epochs[0][step:]
        assert rows_of(resumed) == epochs[1]
        stream = handle.to_tf(epoch=1, start_step=step, repeat=True, **settings)
        assert rows_of(stream.take(20)) == list(itertools.chain(*epochs))[step : step + 20]
    with pytest.raises(ConfigError, match="a step of an epoch of 17, got 17"):
        handle.to_tf(start_step=17, **settings)


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize(("world", "shuffle"), [(1, True), (3, True), (2, "pool"), (2, False)])
def test_ragged_rows_stay_whole_in_every_order(tmp_path: Path, world: int, shuffle: Any) -> None:
    """Lists of any length follow their row through shuffling, shares and the smaller last batch."""
    rows = np.arange(230)
    lists = [[f"t{i % 5}"] * (i % 4) for i in rows]
    nested = [[[i] * (i % 3), [-i]][: i % 3] for i in rows]
    table = pa.table({"row": rows, "words": lists, "nested": pa.array(nested, pa.list_(pa.list_(pa.int64())))})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=50)
    handle = from_parquet(tmp_path, label="row")
    assert handle.schema.describe().splitlines() == ["words: string[*]", "nested: int64[*, *]", "label row: int64[]"]
    read = []
    for rank in range(world):
        with as_worker(rank, world):
            for features, label in handle.to_tf(global_batch=48, seed=2, shuffle=shuffle):
                for row, words, inner in zip(
                    label.numpy().tolist(), features["words"].to_list(), features["nested"].to_list(), strict=True
                ):
                    assert words == [w.encode() for w in lists[row]]
                    assert inner == nested[row]
                    read.append(row)
    assert sorted(read) == rows.tolist()
    assert (read == rows.tolist()) is (shuffle is False and world == 1)


def test_many_columns_are_one_tensor(tmp_path: Path) -> None:
    """184 columns read as a matrix whose rows stay whole, in a training that takes it as it is."""
    import keras

    numbers = np.arange(184 * 700, dtype=np.float32).reshape(700, 184)
    table = pa.table({**{f"c{i}": column for i, column in enumerate(numbers.T)}, "row": np.arange(700)})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=300)
    handle = from_parquet(tmp_path, label="row", pack={"x": [f"c{i}" for i in range(184)]})
    assert handle.schema.describe().splitlines() == ["x: float32[184]", "label row: int64[]"]
    rows = 0
    for features, label in handle.to_tf(global_batch=64):
        np.testing.assert_array_equal(features["x"], numbers[label.numpy()])
        rows += len(label)
    assert rows == 700
    inputs = handle.schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["x"]))
    model.compile("sgd", "mse")
    assert len(model.fit(handle.to_tf(global_batch=350), verbose=0).history["loss"]) == 1


def read_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the row groups that are read from here on."""
    read: list[int] = []
    original = RowGroups.read

    def noting(self: RowGroups, group: int) -> Any:
        read.append(group)
        return original(self, group)

    monkeypatch.setattr(RowGroups, "read", noting)
    return read


def test_iterations_side_by_side_do_not_disturb_each_other(handle: Handle) -> None:
    """More iterators over one dataset than it keeps open, drawn in turn, each give the whole epoch."""
    dataset = handle.to_tf(global_batch=30)
    wanted = rows_of(handle.to_tf(global_batch=30))
    drawn = [rows_of(step) for step in zip(*(iter(dataset) for _ in range(7)), strict=True)]
    assert [list(rows) for rows in zip(*drawn, strict=True)] == [wanted] * 7


def test_drop_remainder_gives_full_batches_only(handle: Handle) -> None:
    """500 rows in batches of 64 without the remainder: seven times 64."""
    assert [len(rows) for rows in rows_of(handle.to_tf(global_batch=64, drop_remainder=True))] == [64] * 7
    assert handle.steps(64, drop_remainder=True) == 7


def test_shuffling_mixes_rows_from_all_over(tmp_path: Path) -> None:
    """Batches of sorted rows have means near the overall mean, as a full shuffle would give."""
    handle = write(tmp_path, [1000] * 24, features=["row"], nulls=None)
    batches = rows_of(handle.to_tf(global_batch=240, shuffle=True))
    means = np.array([np.mean(rows) for rows in batches])
    ideal = 24000 / np.sqrt(12) / np.sqrt(240)
    assert means.std() < 1.5 * ideal


@pytest.mark.parametrize("shuffle", ORDERS)
def test_small_pools_and_many_rounds_read_the_same_rows(handle: Handle, shuffle: Any) -> None:
    """With memory for a few batches only, each row still comes once and is the same at each reading."""
    settings: dict[str, Any] = {"global_batch": 24, "shuffle": shuffle, "pool_bytes": 2000}
    first, second = (rows_of(handle.to_tf(**settings)) for _ in range(2))
    assert first == second
    assert sorted(itertools.chain(*first)) == list(range(500))


@pytest.mark.parametrize("shuffle", ["pool", False])
def test_the_order_is_the_same_with_and_without_the_cache(handle: Handle, shuffle: Any) -> None:
    """Batches of two epochs that come from the local disk equal those that come from the files."""
    cached, streamed = (handle.to_tf(global_batch=50, shuffle=shuffle, cache=c, pool_bytes=3000) for c in (True, False))
    for _ in range(2):
        for (one, one_label), (other, other_label) in zip(cached, streamed, strict=True):
            assert all((one[name] == other[name]).numpy().all() for name in one)
            assert (one_label == other_label).numpy().all()


def test_later_epochs_come_from_the_local_disk_and_leave_nothing_there(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row group is read once for all epochs, into files that no one else sees and that go with the reader."""
    monkeypatch.setenv("TFDIST_LOCAL_DIR", str(tmp_path))
    read = read_groups(monkeypatch)
    dataset = handle.to_tf(global_batch=100)
    for _ in range(3):
        assert sorted(itertools.chain(*rows_of(dataset))) == list(range(500))
    assert sorted(read) == [0, 1, 3, 4, 5]  # one is empty
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert any(path.startswith(str(tmp_path)) for path in held)
    assert list(tmp_path.iterdir()) == []


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_disk_without_room_for_the_cache_is_said_before_reading(handle: Handle) -> None:
    """The error has the bytes that are needed and that are free, and the two ways out."""
    large = replace(handle, manifest=replace(handle.manifest, row_bytes=2**50))
    with pytest.raises(DataError, match=r"MiB for the rows.*MiB free; set TFDIST_LOCAL_DIR.*shuffle='pool'"):
        large.to_tf(global_batch=100)
    assert large.to_tf(global_batch=100, shuffle="pool") is not None


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"shuffle": "rows"}, "shuffle: expected True, False or 'pool', got 'rows'"),
        ({"cache": False}, "cache: expected True with shuffle=True"),
        ({"pool_bytes": 0}, "pool_bytes: expected a whole number of at least 1"),
    ],
)
def test_settings_of_the_order_that_make_no_sense_are_refused(
    handle: Handle, choice: dict[str, Any], words: str
) -> None:
    """A wrong value names the setting and what it may be."""
    with pytest.raises(ConfigError, match=words):
        handle.to_tf(global_batch=10, **choice)


def test_keras_fits_the_pipeline_as_it_is(tmp_path: Path) -> None:
    """model.fit and evaluate take the dataset of each epoch, text included, and are reproducible."""
    import keras

    handle = tiny_parquet(tmp_path, 300)
    losses = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        inputs = handle.schema.keras_inputs()
        index = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])(inputs["kind"])
        parts = [keras.layers.Reshape((1,))(inputs[f"x{i}"]) for i in range(3)] + [keras.layers.Embedding(4, 2)(index)]
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(parts)))
        model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
        history = model.fit(handle.to_tf(global_batch=64), epochs=4, verbose=0).history["loss"]
        losses.append([*history, model.evaluate(handle.to_tf(global_batch=64, shuffle=False), verbose=0)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_dirty_rows_are_named_while_reading(tmp_path: Path) -> None:
    """A row of another length in a later row group stops the reading with column, row, row group and file."""
    rows = pa.array([[1.0, 2.0]] * 40 + [[1.0], [1.0, 2.0, 3.0]] + [[1.0, 2.0]] * 8, pa.list_(pa.float64()))
    pq.write_table(pa.table({"v": rows}), tmp_path / "part.parquet", row_group_size=25)
    handle = from_parquet(tmp_path, dtypes={"v": "float64[2]"})
    words = r"'v': expected arrays of length 2, got 1 in row 15.*row group 1 of .*part\.parquet"
    with pytest.raises(tf.errors.OpError, match=words):
        list(handle.to_tf(global_batch=10))


def test_a_replaced_file_is_noticed(tmp_path: Path) -> None:
    """Files that changed behind the handle's back are refused, not read."""
    handle = write(tmp_path, [50, 50])
    write(tmp_path, [50, 51])
    with pytest.raises(tf.errors.OpError, match="the file was changed"):
        list(handle.to_tf(global_batch=10))


def test_replicas_of_one_worker_get_their_shares_in_turn() -> None:
    """tf.distribute deals a worker's elements to its replicas one after another."""
    parts = [tf.data.Dataset.from_tensor_slices([10 * i, 10 * i + 1]) for i in range(3)]
    joined = one_after_another(parts)
    assert [int(x) for x in joined] == [0, 10, 20, 1, 11, 21]
    assert len(joined) == 6


def draw_in_scope(handle: Handle) -> bytes:
    """What one of two workers draws inside the strategy's scope, as JSON."""
    from tfdist.strategies.builders import strategy_scope

    with strategy_scope("multi_worker_mirrored"):
        strategy = tf.distribute.get_strategy()
        with pytest.raises(ConfigError, match="at least 8 steps, got 3"):
            handle.to_tf(global_batch=200)
        dataset = handle.to_tf(global_batch=60)
        endless = handle.to_tf(global_batch=60, repeat=True)

        def own(batches: Any) -> list[list[int]]:
            local = strategy.experimental_local_results
            return [local(features["row"])[0].numpy().tolist() for features, _ in batches]

        peeked = own(itertools.islice(dataset, 1))
        first = own(dataset)
        drawn = iter(dataset)
        second = own([next(drawn) for _ in range(9)])
        third = own(dataset)
        stream = own(itertools.islice(endless, 27))
    return json.dumps({"peeked": peeked, "epochs": first + second + third, "stream": stream}).encode()


def test_in_the_scope_of_a_multi_worker_strategy_batches_are_distributed(handle: Handle) -> None:
    """There to_tf gives a distributed dataset with the worker's share, epoch by epoch, a peek not counted."""
    plan = LaunchPlan(new_run_id(), 2, 2, "multi_worker_mirrored", results="all", show_output="none")
    program = dump_program(functools.partial(draw_in_scope, handle), "test")
    results = LocalLauncher().launch(program, plan, lambda event: None)
    one, other = (json.loads(result) for result in results)
    plain = [rows_of(handle.to_tf(global_batch=60, epoch=e)) for e in range(3)]
    assert [a + b for a, b in zip(one["peeked"], other["peeked"], strict=True)] == plain[0][:1]
    for drawn in ("epochs", "stream"):
        assert [a + b for a, b in zip(one[drawn], other[drawn], strict=True)] == [*itertools.chain(*plain)]


@pytest.mark.parametrize("shuffle", ORDERS)
def test_a_dataset_that_is_let_go_gives_back_its_threads_and_files(handle: Handle, shuffle: Any) -> None:
    """Iterations left in the middle end with their dataset, whatever was made of it; an iterator keeps them alive."""

    def held() -> tuple[int, int]:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("tfdist-")]
        for thread in threads:
            thread.join(0.2)
        return sum(thread.is_alive() for thread in threads), psutil.Process().num_fds()

    list(handle.to_tf(global_batch=64, shuffle=shuffle))  # what is opened once
    before = held()
    for _ in range(5):
        next(iter(handle.to_tf(global_batch=64, shuffle=shuffle).map(lambda features, label: label).prefetch(2)))
    iterator = iter(handle.to_tf(global_batch=64, shuffle=shuffle).map(lambda features, label: features["row"]))
    gc.collect()
    assert sorted(row for rows in iterator for row in rows.numpy().tolist()) == list(range(500))
    del iterator
    after = held()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_decimals_become_the_nearest_floats(tmp_path: Path) -> None:
    """Decimals of few and many digits, negative, null or in lists, are the float64 that Python reads of their text."""
    values = [None if i == 7 else Decimal(i * 37 - 500_000).scaleb(-3) for i in range(1000)]
    few, many = (pa.array(values, pa.decimal128(digits, 3)) for digits in (12, 30))
    lists = pa.array([[v or Decimal(0)] * 2 for v in values], pa.list_(pa.decimal128(12, 3)))
    pq.write_table(pa.table({"few": few, "many": many, "list": lists}), tmp_path / "part.parquet")
    fill: dict[str, Any] = {"few": ("fill", 0.5), "many": ("fill", 0.5)}
    handle = from_parquet(tmp_path, nulls=fill, dtypes={"many": "float64", "list": "float64[2]"})
    (batch,) = handle.to_tf(global_batch=1000, shuffle=False)
    wanted = [0.5 if v is None else float(v) for v in values]
    assert batch["few"].numpy().tolist() == batch["many"].numpy().tolist() == wanted
    assert batch["list"].numpy()[:, 1].tolist() == [float(v or 0) for v in values]


def test_a_file_replaced_after_planning_is_noticed(tmp_path: Path) -> None:
    """Another file with as many rows, or with another column, is refused by name, not read as the old one."""
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"x": np.arange(10)}), path)
    handle = from_parquet(tmp_path)
    for other in ({"x": np.arange(10) + 100}, {"y": np.arange(10)}):
        pq.write_table(pa.table(other), path)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"part\.parquet: .*another footer; the file was changed"
        ):
            list(handle.to_tf(global_batch=10))


def test_files_of_other_names_are_told(tmp_path: Path) -> None:
    """A folder that holds files of other names is read without them, with a warning that counts them."""
    for name in ("a.parquet", "b", "c.pq"):
        pq.write_table(pa.table({"x": [1]}), tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    with pytest.warns(UserWarning, match=r"2 files that are not named \*\.parquet are not read, for example b"):
        assert from_parquet(tmp_path).rows == 1


def test_nulls_of_files_as_they_lie_cannot_be_dropped_and_nobody_says_so(tmp_path: Path) -> None:
    """The refusal of a null offers what works for files that are read as they lie."""
    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match=r"got 1; say nulls={'x': 'mask'} \(adds 'x_is_null'\) or \('fill', value\)"):
        from_parquet(tmp_path)
