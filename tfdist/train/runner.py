"""The drop-in for ``spark_tensorflow_distributor.MirroredStrategyRunner``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from tfdist.config import ComputeConfig, StrategyName
from tfdist.errors import ConfigError, LaunchError, PreflightError
from tfdist.launch import preflight
from tfdist.launch.classic import UpstreamRunner
from tfdist.launch.devices import visible_devices
from tfdist.launch.local import LocalLauncher
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, OnEvent, new_run_id
from tfdist.launch.slots import spark_facts
from tfdist.launch.spark import SparkLauncher, session_or_new
from tfdist.train.console import print_event
from tfdist.train.function import run_train_fn


class MirroredStrategyRunner(UpstreamRunner):  # type: ignore[misc]
    """Runs a TensorFlow program on Spark tasks, data-parallel.

    Takes every argument of ``spark_tensorflow_distributor.MirroredStrategyRunner`` with the same meaning and default,
    and passes ``isinstance`` for it. Unlike it, each task trains in a process of its own, Keras 3 works, and an error
    on a worker arrives as that error.

    Args:
        num_slots: number of GPUs, or of tasks when training on CPUs.
        local_mode: train in one process on the driver's host, with ``num_slots`` of the GPUs that Spark gave the driver
            (``spark.driver.resource.gpu``), or of those that the host has.
        use_gpu: train on the GPUs that Spark schedules.
        gpu_resource_name: the name of that Spark resource.
        use_custom_strategy: the train function makes its own strategy; otherwise it runs inside ours.
        strategy: ``multi_worker_mirrored``, ``mirrored`` or ``single`` (one task).
        env: variables set before TensorFlow is imported.
        spark: the session to use; by default the active one, or a new one.
        results: ``chief`` returns the value of rank 0, ``all`` a list with every rank's.
        on_event: receives the events of the run in place of the printed lines.
        stall_timeout_s: seconds in which no worker uses the CPU, reads or writes files, prints or sends an event,
            after which the run is ended with a StallError; None waits for ever.

    Raises:
        ConfigError: an argument is wrong.
        PreflightError: the Spark configuration lacks what the arguments ask for.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
        strategy: StrategyName = "multi_worker_mirrored",
        env: Mapping[str, str] | None = None,
        spark: Any = None,
        results: Literal["chief", "all"] = "chief",
        on_event: OnEvent | None = None,
        stall_timeout_s: float | None = 600.0,
    ) -> None:
        if results not in ("chief", "all"):
            raise ConfigError(f"results: expected 'chief' or 'all', got {results!r}")
        if local_mode and not use_gpu and num_slots > 1:
            raise ConfigError(f"num_slots: expected 1 on the CPU in local mode, got {num_slots}")
        self._compute = ComputeConfig(
            slots=num_slots,
            use_gpu=use_gpu,
            gpu_resource_name=gpu_resource_name,
            strategy="mirrored" if local_mode else strategy,
            env=env or {},
            stall_timeout_s=stall_timeout_s,
        )
        self._spark = spark or session_or_new()
        self.sc = getattr(self._spark, "sparkContext", None)  # Spark Connect has none
        self._local_mode = local_mode
        self._use_custom_strategy = use_custom_strategy
        self._results = results
        self._on_event = on_event or print_event
        self._num_tasks = None if local_mode else self.get_num_tasks()

    def get_num_tasks(self) -> int:
        """The number of Spark tasks that ``num_slots`` takes."""
        compute = self._compute
        tasks, problems = preflight.tasks_for(
            compute.slots,
            spark_facts(self._spark).conf,
            use_gpu=compute.use_gpu,
            gpu_resource_name=compute.gpu_resource_name,
        )
        if compute.use_gpu and not problems and not self._use_custom_strategy:
            problems = preflight.uneven_devices(compute.slots, tasks, compute.strategy_in_force)
        if problems:
            raise PreflightError(problems)
        return tasks

    def _driver_gpus(self) -> tuple[str, ...] | None:
        """What Spark gave the driver (``spark.driver.resource.gpu``); None where it gave none: those of its host."""
        found = None if self.sc is None else self.sc.resources.get(self._compute.gpu_resource_name)
        if found is None:
            return None
        try:
            return visible_devices(found.addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except LaunchError as error:
            name = f"spark.driver.resource.{self._compute.gpu_resource_name}"
            raise PreflightError(f"{name}: {error}; correct either of them") from error

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``train_fn(**kwargs)`` on every worker.

        Returns:
            The return value of rank 0, or the list of all by rank with ``results="all"``.

        Raises:
            WorkerError: ``train_fn`` failed on a worker; also of that exception's own type.
            PreflightError: the cluster cannot run that many tasks at once.
        """
        compute = self._compute
        call = partial(run_train_fn, train_fn, kwargs, compute.threads_per_worker, self._use_custom_strategy)
        program = dump_program(call, "train_fn")
        plan = LaunchPlan.of(
            compute, new_run_id(), results=self._results, tasks=1 if self._local_mode else self._num_tasks
        )
        if self._local_mode and compute.use_gpu:
            plan = replace(plan, gpus=self._driver_gpus())
        launcher = LocalLauncher() if self._local_mode else SparkLauncher(self._spark, compute.startup_timeout_s)
        # The values are Python objects that the caller's own function made and asked back.
        values = [pickle.loads(value) for value in launcher.launch(program, plan, self._on_event)]
        return values if self._results == "all" else values[0]
