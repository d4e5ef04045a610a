"""What needs a GPU: ``CUDA_VISIBLE_DEVICES=0 ./run test tests/gpu``, with a TensorFlow that is built for CUDA."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfdist
from tfdist.launch.devices import host_devices
from tfdist.launch.protocol import emit
from tfdist.testing import tiny_parquet

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
pytestmark = pytest.mark.skipif(
    not host_devices(VISIBLE), reason=f"no GPU on this host for the tests (CUDA_VISIBLE_DEVICES={VISIBLE})"
)


def build_model(schema: Any) -> Any:
    import keras
    import tensorflow as tf

    device = tf.config.list_logical_devices("GPU") or ["no GPU"]
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    inputs = schema.keras_inputs()
    x = keras.ops.stack([inputs[f"x{i}"] for i in range(3)], axis=-1)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, activation="tanh")(x)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    if visible:
        used, total = map(float, subprocess.check_output([*query, "-i", visible], text=True).split(","))
        emit("memory", share=used / total)
    emit("device", name=getattr(device[0], "name", device[0]), precision=model.layers[-1].compute_dtype)
    return model


def fit(folder: Path, name: str, **compute: Any) -> tuple[list[Any], dict[str, Any]]:
    """The weights after a training in a process of this host, and what it said of its device."""
    events: dict[str, Any] = {}
    result = tfdist.fit(
        build_model,
        tiny_parquet(folder / "data", 400),
        compute=tfdist.ComputeConfig(launcher="local", **compute),
        fit=tfdist.FitConfig(epochs=3, global_batch=32, output_dir=folder / name),
        on_event=lambda event: events.update({event["kind"]: event}),
    )
    return result.model().get_weights(), events


def test_a_gpu_trains_to_the_weights_of_the_cpu(tmp_path: Path) -> None:
    """The same seed and rows give the same weights on both, within the rounding of float32 sums."""
    on_gpu, events = fit(tmp_path, "gpu", use_gpu=True)
    on_cpu, others = fit(tmp_path, "cpu")
    assert "GPU" in events["device"]["name"]
    assert others["device"]["name"] == "no GPU"
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("grows", [True, False])
def test_memory_grows_when_asked(tmp_path: Path, grows: bool) -> None:
    """With memory growth a small model takes a small part of the GPU's memory, without it nearly all."""
    _, events = fit(tmp_path, "model", use_gpu=True, gpu_memory_growth=grows)
    assert (events["memory"]["share"] < 0.5) is grows


def train_in_half_precision() -> tuple[str, str, list[float]]:
    import keras

    keras.mixed_precision.set_global_policy("mixed_float16")
    x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    loss = model.fit(x, x.sum(axis=1), batch_size=64, epochs=5, verbose=0).history["loss"]
    return model.layers[0].compute_dtype, model.layers[0].kernel.dtype, loss


def test_mixed_precision_trains() -> None:
    """Under mixed_float16 layers compute in float16, weights stay float32, and the loss falls."""
    runner = tfdist.MirroredStrategyRunner(num_slots=1, local_mode=True, on_event=lambda event: None)
    computed, kept, loss = runner.run(train_in_half_precision)
    assert (computed, kept) == ("float16", "float32")
    assert loss[-1] < loss[0]
