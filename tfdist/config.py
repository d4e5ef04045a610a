"""What a training needs to know besides the model and the data: frozen, validated, with units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from tfdist.errors import ConfigError

StrategyName = Literal["auto", "single", "mirrored", "multi_worker_mirrored"]
STRATEGIES: tuple[str, ...] = ("auto", "single", "mirrored", "multi_worker_mirrored")


def _check_positive(owner: str, values: Mapping[str, Any], problems: list[str]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{owner}.{name}: expected a whole number of at least 1, got {value!r}")


@dataclass(frozen=True)
class ComputeConfig:
    """Where the training runs.

    Args:
        slots: number of workers (CPU) or of GPUs (with ``use_gpu``).
        use_gpu: give each worker its share of the GPUs that Spark scheduled to its task.
        gpu_resource_name: name of the Spark resource that holds the GPUs.
        gpu_memory_growth: True lets TensorFlow take GPU memory as it needs it, False nearly all at once. None is
            TensorFlow's own choice (all at once), except where several workers share a GPU. Without GPUs it is nothing.
        strategy: ``auto`` is ``single`` for one slot and ``multi_worker_mirrored`` for more.
        threads_per_worker: TensorFlow's intra-op threads in each worker; None leaves TensorFlow's own choice.
        env: variables set in the training processes before TensorFlow is imported; never shown, they may be secrets.
        show_output: ``chief`` streams the chief's output to the driver, ``all`` every worker's, ``none`` nobody's, and
            a number that of the worker with this rank.
        startup_timeout_s: seconds in which the cluster must offer all slots, and all workers must have met after the
            first one came.
        stall_timeout_s: seconds without a step, or another sign of progress, after which a training is ended with a
            StallError that names the worker; None waits for ever.
        launcher: ``spark`` runs each worker as a barrier task of the session, ``local`` as a process of this host.
        warm_start: fork workers from a process that has imported TensorFlow; False starts new interpreters.
        max_restarts: how often a training is launched again, from its last checkpoint, when a worker died.
        min_slots: makes the training elastic: each launch takes the slots that are there, from ``min_slots`` to
            ``slots``. None: always ``slots``.
        last_call_timeout_s: seconds in which an elastic launch that has ``min_slots`` waits for the others: new
            executors take their time, and Spark replaces a lost one within seconds where a host has room. (The name
            and the default are those of torchrun's rendezvous.)
    """

    slots: int = 1
    use_gpu: bool = False
    gpu_resource_name: str = "gpu"
    gpu_memory_growth: bool | None = None
    strategy: StrategyName = "auto"
    threads_per_worker: int | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    show_output: Literal["chief", "all", "none"] | int = "chief"
    startup_timeout_s: float = 120.0
    stall_timeout_s: float | None = 600.0
    launcher: Literal["spark", "local"] = "spark"
    warm_start: bool = True
    max_restarts: int = 0
    min_slots: int | None = None
    last_call_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        problems: list[str] = []
        _check_positive("compute", {"slots": self.slots}, problems)
        if self.threads_per_worker is not None:
            _check_positive("compute", {"threads_per_worker": self.threads_per_worker}, problems)
        if self.strategy not in STRATEGIES:
            problems.append(f"compute.strategy: expected one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.strategy == "single" and self.slots != 1:
            problems.append(f"compute.strategy: 'single' takes one slot, got {self.slots}; use 'multi_worker_mirrored'")
        if not self._shows_somebody():
            problems.append(
                f"compute.show_output: expected chief, all, none or a rank below {self.slots} (slots), "
                f"got {self.show_output!r}"
            )
        if self.launcher not in ("spark", "local"):
            problems.append(f"compute.launcher: expected spark or local, got {self.launcher!r}")
        if self.startup_timeout_s <= 0:
            problems.append(f"compute.startup_timeout_s: expected seconds above 0, got {self.startup_timeout_s!r}")
        if self.stall_timeout_s is not None and not self.stall_timeout_s > 0:
            problems.append(f"compute.stall_timeout_s: expected seconds above 0 or None, got {self.stall_timeout_s!r}")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            problems.append(f"compute.max_restarts: expected a whole number of at least 0, got {self.max_restarts!r}")
        if self.gpu_memory_growth not in (None, True, False):
            problems.append(f"compute.gpu_memory_growth: expected True, False or None, got {self.gpu_memory_growth!r}")
        self._check_elastic(problems)
        bad = [k for k, v in self.env.items() if not isinstance(k, str) or not isinstance(v, str)]
        if bad:
            problems.append(f"compute.env: expected text values, got other types for {', '.join(map(repr, bad))}")
        if problems:
            raise ConfigError(problems)

    def _check_elastic(self, problems: list[str]) -> None:
        if self.min_slots is not None:
            before = len(problems)
            _check_positive("compute", {"min_slots": self.min_slots}, problems)
            if len(problems) == before and isinstance(self.slots, int) and self.min_slots > self.slots:
                problems.append(f"compute.min_slots: expected at most {self.slots} (slots), got {self.min_slots}")
        if not self.last_call_timeout_s >= 0:
            problems.append(
                f"compute.last_call_timeout_s: expected seconds of at least 0, got {self.last_call_timeout_s!r}"
            )

    def with_slots(self, slots: int) -> ComputeConfig:
        """The same with exactly so many slots, at most those of now; a rank that is not there shows nothing."""
        shown = self.show_output
        if isinstance(shown, int) and not isinstance(shown, bool) and shown >= slots:
            shown = "none"
        return replace(self, slots=slots, min_slots=None, show_output=shown)

    def _shows_somebody(self) -> bool:
        if isinstance(self.show_output, str):
            return self.show_output in ("chief", "all", "none")
        is_rank = isinstance(self.show_output, int) and not isinstance(self.show_output, bool)
        return is_rank and isinstance(self.slots, int) and 0 <= self.show_output < self.slots

    @property
    def strategy_in_force(self) -> str:
        """The strategy's name with ``auto`` decided."""
        if self.strategy != "auto":
            return self.strategy
        return "single" if self.slots == 1 else "multi_worker_mirrored"


@dataclass(frozen=True)
class FitConfig:
    """How the model is trained.

    Args:
        epochs: passes over the training rows.
        global_batch: rows per step over all workers together.
        seed: decides initial weights, the order of the rows and everything random.
        shuffle: True mixes the rows anew each epoch, out of a cache on each worker's local disk; ``"pool"`` mixes only
            neighbouring rows and needs no disk; False trains in the order of the source.
        drop_remainder: leave out the last, smaller batch of each epoch.
        validation_batch: rows per validation step over all workers; None takes ``global_batch``.
        output_dir: where the trained model is kept; None takes a new folder beside the cached data. Every worker
            and the driver must see it.
        verbose: Keras' own progress output on the chief (0, 1 or 2); the live display of a terminal takes its place.
        checkpoint_every_steps: steps between two checkpoints. None writes one at the end of each epoch where
            ``checkpoint_dir``, ``resume`` or ``ComputeConfig.max_restarts`` asks for checkpoints, else none.
        checkpoint_dir: where they are kept; None takes the folder ``<output_dir>.checkpoints``. Every worker and the
            driver must see it.
        keep_checkpoints: how many are kept; the newest is never deleted.
        resume: go on from the newest checkpoint of an earlier run, or begin where there is none.
    """

    epochs: int = 1
    global_batch: int = 256
    seed: int = 0
    shuffle: bool | Literal["pool"] = True
    drop_remainder: bool = False
    validation_batch: int | None = None
    output_dir: str | Path | None = None
    verbose: int = 0
    checkpoint_every_steps: int | None = None
    checkpoint_dir: str | Path | None = None
    keep_checkpoints: int = 2
    resume: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        _check_positive("fit", {"epochs": self.epochs, "global_batch": self.global_batch}, problems)
        if self.validation_batch is not None:
            _check_positive("fit", {"validation_batch": self.validation_batch}, problems)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            problems.append(f"fit.seed: expected a whole number from 0 to 4294967295, got {self.seed!r}")
        if not isinstance(self.shuffle, bool) and self.shuffle != "pool":
            problems.append(f"fit.shuffle: expected True, False or 'pool', got {self.shuffle!r}")
        if not isinstance(self.drop_remainder, bool):
            problems.append(f"fit.drop_remainder: expected True or False, got {self.drop_remainder!r}")
        if self.verbose not in (0, 1, 2):
            problems.append(f"fit.verbose: expected 0, 1 or 2, got {self.verbose!r}")
        self._check_checkpoints(problems)
        if problems:
            raise ConfigError(problems)

    def _check_checkpoints(self, problems: list[str]) -> None:
        _check_positive("fit", {"keep_checkpoints": self.keep_checkpoints}, problems)
        if self.checkpoint_every_steps is not None:
            _check_positive("fit", {"checkpoint_every_steps": self.checkpoint_every_steps}, problems)
        if not isinstance(self.checkpoint_dir, str | Path | None) or self.checkpoint_dir == "":
            problems.append(f"fit.checkpoint_dir: expected the path of a folder, got {self.checkpoint_dir!r}")
        elif "://" in str(self.checkpoint_dir):
            problems.append(
                f"fit.checkpoint_dir: expected the path of a folder that all workers see, got {self.checkpoint_dir}; a "
                "URL cannot be written to as files are: mount it, or name another folder"
            )
        if not isinstance(self.resume, bool):
            problems.append(f"fit.resume: expected True or False, got {self.resume!r}")


def field_names(config: type) -> tuple[str, ...]:
    """Names of a configuration's fields, in their order."""
    return tuple(f.name for f in fields(config))
