"""A driver on a cluster that schedules GPUs which are not there: what did each training process get?

python gpu_sessions.py MASTER DISCOVERY_SCRIPT FOLDER; prints JSON. A task takes four resources at once, so that one
session has all amounts: one ``gpu``, two of ``pair``, half of ``half``, and one ``mig``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import tfdist
from tfdist.errors import TfdistError
from tfdist.testing import tiny_parquet

EXECUTOR = {"gpu": 2, "pair": 4, "half": 1, "mig": 2}
TASK = {"gpu": "1", "pair": "2", "half": "0.5", "mig": "1"}


def session(master: str, script: str) -> SparkSession:
    """Two executors of two cores, both there."""
    settings = {
        "spark.executor.cores": "2",
        "spark.executor.memory": "1g",
        "spark.cores.max": "4",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "7,4,6,5",
        "spark.driver.resource.gpu.amount": "2",
        "spark.driver.resource.gpu.discoveryScript": script,
        **{f"spark.executor.resource.{name}.amount": str(amount) for name, amount in EXECUTOR.items()},
        **{f"spark.task.resource.{name}.amount": amount for name, amount in TASK.items()},
    }
    builder = SparkSession.builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.range(1).count()
    return spark


def report() -> list[Any]:
    """Rank, the executor's folder, GPUs, and whether memory grows."""
    names = ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH")
    return [tfdist.worker_context().rank, os.getcwd(), *map(os.environ.get, names)]


def build_model(schema: Any) -> Any:
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["x0"][:, None]))
    model.compile("sgd", "mse")
    return model


def run(slots: int, resource: str = "gpu", function: Callable[[], Any] = report, **arguments: Any) -> Any:
    """What each rank returned, or the error."""
    usual = {"use_custom_strategy": True, "results": "all", "on_event": lambda event: None}
    arguments = {**usual, "gpu_resource_name": resource, **arguments}
    try:
        return tfdist.MirroredStrategyRunner(num_slots=slots, **arguments).run(function)
    except TfdistError as error:
        return str(error)


def main() -> None:
    master, script, folder = sys.argv[1:]
    spark = session(master, script)
    found = {
        "one each": run(4),
        "on the CPU": run(2, use_gpu=False),
        "local": run(2, local_mode=True),
        "too many local": run(3, local_mode=True),
        "two each": run(8, "pair"),
        "uneven": run(3, "pair"),
        "uneven in a strategy": run(3, "pair", use_custom_strategy=False),
        "shared": run(4, "half"),
        "slices": run(4, "mig"),
    }
    result = tfdist.fit(
        build_model,
        tiny_parquet(folder, 64),
        compute=tfdist.ComputeConfig(slots=4, use_gpu=True, gpu_resource_name="pair", gpu_memory_growth=True),
        fit=tfdist.FitConfig(global_batch=16, output_dir=Path(folder, "model")),
        on_event=lambda event: None,
    )
    found["fit"] = [worker["devices"] for worker in result.workers]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
