"""Functions between the columns and the model: element spec, images, errors, training and scoring."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image
from pyspark.sql import SparkSession

import tfdist
from tfdist.data import Handle, decode_images, from_parquet, per_row
from tfdist.data.failures import own_errors
from tfdist.errors import ConfigError, DataError
from tfdist.testing import tiny_parquet

SHAPE = (4, 5, 3)


def encoded(rows: int) -> list[bytes]:
    """PNG images whose upper left pixel tells their row."""
    found = []
    for row in range(rows):
        pixels = np.full(SHAPE, row % 50, np.uint8)
        pixels[0, 0] = row % 200, row // 200, 7
        found.append(tf.io.encode_png(pixels).numpy())
    return found


def write_images(folder: Path, images: list[bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    table = pa.table({"image": pa.array(images, pa.binary()), "row": np.arange(len(images))})
    pq.write_table(table, folder / "part.parquet", row_group_size=100)
    return folder


def read(handle: Handle) -> list[Any]:
    with own_errors():
        return list(handle.to_tf(global_batch=64, shuffle=False))


def test_images_are_decoded_and_the_spec_is_the_decoded_one(tmp_path: Path) -> None:
    """A binary column becomes uint8 pictures, each with its row's label; the element spec says so before reading."""
    handle = from_parquet(write_images(tmp_path, encoded(230)), label="row", transform=decode_images("image", SHAPE))
    assert handle.element_spec_text == "image: uint8[4, 5, 3]\nlabel row: int64[]"
    assert handle.element_spec == ({"image": tf.TensorSpec((None, *SHAPE), "uint8")}, tf.TensorSpec((None,), "int64"))
    assert handle.to_tf(global_batch=64).element_spec == handle.element_spec
    rows = 0
    for features, label in read(handle):
        first = features["image"].numpy()[:, 0, 0]
        assert (first == np.stack([label % 200, label // 200, np.full(len(label), 7)], axis=1)).all()
        rows += len(label)
    assert rows == 230


def test_images_of_another_size_are_resized_on_request(tmp_path: Path) -> None:
    """resize=True brings each image to the size; dtype float32 gives numbers from 0 to 1."""
    folder = write_images(tmp_path, encoded(3))
    decode = decode_images("image", (8, 10, 3), dtype="float32", resize=True)
    ((features, _),) = read(from_parquet(folder, label="row", transform=decode))
    assert features["image"].shape == (3, 8, 10, 3)
    assert float(tf.reduce_max(features["image"])) <= 1
    np.testing.assert_allclose(features["image"][2, -1, -1], np.full(3, 2 / 255), rtol=1e-5)


def written_by_pillow(kind: str, *pictures: np.ndarray) -> bytes:
    file = io.BytesIO()
    first, *others = map(Image.fromarray, pictures)
    first.save(file, kind, **({"save_all": True, "append_images": others} if others else {}))
    return file.getvalue()


def test_pictures_of_all_kinds_are_those_of_tensorflow(tmp_path: Path) -> None:
    """JPEG, PNG, BMP and the first picture of a GIF come as TensorFlow decodes each alone; several threads do so."""
    pixels = np.random.default_rng(1).integers(0, 255, (60, 8, 12, 3), np.uint8)
    images = [tf.io.encode_jpeg(one).numpy() for one in pixels[:57]] + [tf.io.encode_png(pixels[57]).numpy()]
    images += [written_by_pillow("BMP", pixels[58]), written_by_pillow("GIF", pixels[59], pixels[58])]
    wanted = np.stack([tf.io.decode_image(one, channels=3, expand_animations=False) for one in images])
    decode = decode_images("image", (8, 12, 3))
    ((features, _),) = read(from_parquet(write_images(tmp_path, images), label="row", transform=decode))
    assert (features["image"].numpy() == wanted).all()
    decode = decode_images("image", (5, 7, 3), resize=True)
    ((features, _),) = read(from_parquet(tmp_path, label="row", transform=decode))
    assert (features["image"].numpy() == np.round(tf.image.resize(wanted, (5, 7)))).all()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("decode-images")]
    allowed = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    assert (allowed > 1) <= len(threads) <= allowed


def test_a_corrupt_image_is_named_by_its_row_and_file(tmp_path: Path) -> None:
    """Row 777 of 1,000 holds half an image, or one of another size: the error has column, row, row group and file.

    The first of several in a batch is told.
    """
    images = encoded(1000)
    images[800] = b"none"
    whole = images[777]
    images[777] = whole[: len(whole) // 2]
    path = write_images(tmp_path / "cut", images)
    words = (
        r"'image': .* \(4, 5, 3\), got no image .* \(Invalid PNG data.*\), .* in row 777 of the data \(row 77 of row"
    )
    with pytest.raises(DataError, match=words + rf" group 7 of {re.escape(str(path))}/part\.parquet\)"):
        read(from_parquet(path, transform=decode_images("image", SHAPE), features=["image"]))
    images[777] = tf.io.encode_png(np.zeros((2, 2, 3), np.uint8)).numpy()
    path = write_images(tmp_path / "small", images)
    with pytest.raises(DataError, match=r"got one of shape \(2, 2, 3\), \d+ bytes, in row 777 of the data"):
        read(from_parquet(path, transform=decode_images("image", SHAPE), label="row"))


def test_transforms_follow_each_other_and_may_take_single_rows(tmp_path: Path) -> None:
    """A list of transforms is a chain; per_row applies a function without the batch dimension, ragged lists too."""
    lists = [[float(i)] * (i % 3 + 1) for i in range(50)]
    pq.write_table(pa.table({"v": lists, "row": np.arange(50)}), tmp_path / "part.parquet")
    chain = [per_row(lambda f: {"sum": tf.reduce_sum(f["v"]), "row": f["row"]}), lambda f: {**f, "twice": f["sum"] * 2}]
    handle = from_parquet(tmp_path, transform=chain)
    assert handle.element_spec_text.splitlines() == ["sum: float64[]", "row: int64[]", "twice: float64[]"]
    for features in read(handle):
        row = features["row"].numpy()
        assert features["twice"].numpy().tolist() == (2 * row * (row % 3 + 1)).tolist()


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (5, "expected a function of the features or a list of them, got 5"),
        ([lambda f: f, "x"], "expected a function of the features or a list of them, got 'x'"),
        (lambda f: f["none"], "it fails: KeyError: 'none'"),
        (lambda f: f["x0"], "expected it to return a dict of tensors"),
        (lambda f: {"mean": tf.reduce_mean(f["x0"])}, "a row for each row of a batch, got 'mean'"),
        (lambda f: {"one": tf.reduce_mean(f["x0"])[None]}, "as many rows as a batch has, got 1 in 'one'"),
        (lambda f: {"n": tf.reshape(f["x0"], tf.stack([-1, tf.size(f["x0"])]))}, "a known shape of a row"),
        (decode_images("x0", SHAPE), "expected encoded bytes in 'x0', got float32"),
        (decode_images("y", SHAPE), "one of the features"),
    ],
)
def test_transforms_that_do_not_fit_are_refused_on_the_driver(tmp_path: Path, transform: Any, words: str) -> None:
    """What a transform lacks is said when it is given, before any training."""
    with pytest.raises(ConfigError, match=words):
        tiny_parquet(tmp_path, 10, label="label", features=["x0", "kind"], transform=transform)


def test_wrong_sizes_of_images_are_refused() -> None:
    """Sizes must be three whole numbers above 0, with 1, 3 or 4 channels."""
    for shape in ((4, 5), (4, 5, 2), (0, 5, 3), 4):
        with pytest.raises(ConfigError, match="height, width, channels"):
            decode_images("image", shape)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="uint8 or float32, got 'int64'"):
        decode_images("image", SHAPE, dtype="int64")


def build(schema: tfdist.data.Schema) -> Any:
    import keras

    inputs = schema.keras_inputs()
    hidden = keras.layers.Dense(4, "relu")(inputs["x"])
    word = keras.layers.Embedding(4, 2)(inputs["word"])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, word])))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_a_training_with_preprocessing_layers_scores_through_them(spark: SparkSession, tmp_path: Path) -> None:
    """Adapted Keras layers in a transform train on two workers as on one, and scoring applies them to raw columns."""
    import keras

    normal = keras.layers.Normalization(axis=-1)
    normal.adapt(np.random.default_rng(0).random((50, 3)))
    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])

    def prepare(features: Any) -> Any:
        x = tf.stack([features[f"x{i}"] for i in range(3)], axis=1)
        return {"x": normal(x), "word": lookup(features["kind"])}

    choice: dict[str, Any] = {"label": "label", "features": ["x0", "x1", "x2", "kind"]}
    train = tiny_parquet(tmp_path, 90, transform=prepare, **choice)
    assert train.element_spec_text.splitlines()[:2] == ["x: float32[3]", "word: int64[]"]
    results = []
    for slots in (1, 2):
        compute = tfdist.ComputeConfig(slots=slots, launcher="local", threads_per_worker=1)
        fit = tfdist.FitConfig(epochs=2, global_batch=16, output_dir=tmp_path / f"model{slots}")
        results.append(tfdist.fit(build, train, validation=train, compute=compute, fit=fit))
    np.testing.assert_allclose(results[1].history["val_loss"], results[0].history["val_loss"], rtol=1e-5)
    raw = from_parquet(train.root, **choice)
    (features,) = (f for f, _ in raw.to_tf(global_batch=90, shuffle=False))
    wanted = results[1].model().predict(prepare(features), verbose=0)[:, 0]
    scored = tfdist.score(spark.read.parquet(str(train.root)).coalesce(1), results[1])
    np.testing.assert_allclose([row["prediction"] for row in scored.collect()], wanted, rtol=1e-5)
    with pytest.raises(ConfigError, match="validation: expected the columns and tensors of train"):
        tfdist.fit(build, train, validation=raw, compute=compute, fit=fit)


def test_a_transform_of_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    """Features that are cut or repeated would be trained against the labels of other rows: the first batch fails."""
    pq.write_table(pa.table({"x": np.arange(30.0), "y": np.arange(30.0)}), tmp_path / "part.parquet")

    def without_first(features: Any) -> Any:
        return {"z": features["x"][1:]}

    def twice(features: Any) -> Any:
        return {"z": tf.concat([features["x"], features["x"]], 0)}

    for transform in (without_first, twice):
        batches = from_parquet(tmp_path, label="y", transform=transform).to_tf(global_batch=10)
        with pytest.raises(tf.errors.InvalidArgumentError, match="transform: expected a row for each row of the batch"):
            next(iter(batches))
