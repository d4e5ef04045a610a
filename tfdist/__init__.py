"""Train TensorFlow / Keras 3 models on Apache Spark.

Names are loaded when first used: ``import tfdist`` pulls in neither TensorFlow nor pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist import data as data
    from tfdist import errors as errors
    from tfdist.cluster import WorkerContext as WorkerContext
    from tfdist.cluster import worker_context as worker_context
    from tfdist.config import ComputeConfig as ComputeConfig
    from tfdist.config import FitConfig as FitConfig
    from tfdist.inference.score import score as score
    from tfdist.train.driver import FitResult as FitResult
    from tfdist.train.driver import fit as fit
    from tfdist.train.runner import MirroredStrategyRunner as MirroredStrategyRunner

__version__ = "0.1.0"

_HOMES = {
    "ComputeConfig": "tfdist.config",
    "FitConfig": "tfdist.config",
    "FitResult": "tfdist.train.driver",
    "MirroredStrategyRunner": "tfdist.train.runner",
    "WorkerContext": "tfdist.cluster",
    "fit": "tfdist.train.driver",
    "score": "tfdist.inference.score",
    "worker_context": "tfdist.cluster",
}
_MODULES = ("data", "errors")

__all__ = [
    "ComputeConfig",
    "FitConfig",
    "FitResult",
    "MirroredStrategyRunner",
    "WorkerContext",
    "__version__",
    "data",
    "errors",
    "fit",
    "score",
    "worker_context",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"tfdist.{name}")
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
