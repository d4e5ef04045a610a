"""What of a training is refused before a worker starts, all reasons together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdist.config import ComputeConfig, FitConfig
from tfdist.data import Handle, Stream
from tfdist.errors import ConfigError


def check_arguments(build_model: Any, train: Any, validation: Any, callbacks: Any) -> None:
    """Are the arguments of ``tfdist.fit`` of the right kinds?

    Raises:
        ConfigError: some are not.
    """
    problems = []
    if not isinstance(train, Handle | Stream):
        problems.append(
            "train: expected the handle of tfdist.data.from_dataframe or from_parquet, or a tfdist.data.stream, got "
            f"{type(train).__qualname__}"
        )
    if not isinstance(validation, Handle | None):
        hint = "; it is read anew after each epoch, and a job has one stream: use from_dataframe for it"
        problems.append(
            "validation: expected the handle of tfdist.data.from_dataframe or from_parquet, got "
            f"{type(validation).__qualname__}{hint if isinstance(validation, Stream) else ''}"
        )
    if not callable(build_model):
        problems.append(f"build_model: expected a function of the schema, got {type(build_model).__qualname__}")
    if callbacks is not None and not callable(callbacks):
        problems.append(
            f"callbacks: expected a function that returns a list, got {type(callbacks).__qualname__}; it is called on "
            "every worker, since callbacks do not travel"
        )
    if problems:
        raise ConfigError(problems)


def check_training(
    train: Handle | Stream, validation: Handle | None, compute: ComputeConfig, fit: FitConfig, output_dir: Path
) -> None:
    """Can these rows be trained on with these settings?

    Raises:
        ConfigError: they cannot, with all reasons.
    """
    problems = settings_problems(compute, fit, output_dir)
    if compute.launcher == "local" and isinstance(train, Stream):
        problems.append(
            "train: a stream is handed to the workers by Spark, got compute.launcher='local'; use from_dataframe, or "
            "launcher='spark'"
        )
    if fit.drop_remainder and isinstance(train, Stream):
        problems.append(
            "fit.drop_remainder: a stream has no remainder, its rows are spread evenly over the steps; leave it out"
        )
    if train.schema.label is None:
        problems.append("train: expected a label; name it with from_dataframe(..., label=...)")
    empty = (name for name, data in (("train", train), ("validation", validation)) if data and not data.rows)
    problems += [f"{name}: expected at least a row, got an empty data set; check its filters" for name in empty]
    if validation is not None and validation.element_spec_text != train.element_spec_text:
        wanted, got = train.element_spec_text.splitlines(), validation.element_spec_text.splitlines()
        missing, other = (", ".join(x for x in a if x not in b) for a, b in ((wanted, got), (got, wanted)))
        problems.append(
            f"validation: expected the columns and tensors of train ({missing or 'in that order'}), got "
            f"{other or 'fewer'}; dtypes decides how arrays are laid out"
        )
    if fit.resume and fit.checkpoint_dir is None and fit.output_dir is None:
        problems.append("fit.resume: expected checkpoint_dir or output_dir of the earlier run, got neither")
    if isinstance(train, Stream):
        problems += [
            f"fit.{name}: a stream is read from its beginning only, so that a training on it cannot be gone on with; "
            "leave it out, or use from_dataframe"
            for name in ("checkpoint_every_steps", "checkpoint_dir", "resume")
            if getattr(fit, name)
        ]
    if problems:
        raise ConfigError(problems)


def settings_problems(compute: ComputeConfig, fit: FitConfig, output_dir: Path) -> list[str]:
    """What is wrong with settings together, whatever the rows are."""
    problems = []
    if fit.global_batch < compute.slots:
        problems.append(
            f"fit.global_batch: expected at least a row for each of {compute.slots} workers, got {fit.global_batch}"
        )
    if fit.checkpoint_dir is not None and Path(fit.checkpoint_dir).is_file():
        problems.append(f"fit.checkpoint_dir: expected a folder, got the file {fit.checkpoint_dir}")
    if output_dir.is_file():
        problems.append(f"fit.output_dir: expected a folder, got the file {output_dir}")
    return problems
