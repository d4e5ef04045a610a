"""Settings: validated together, early, with what to do."""

from __future__ import annotations

import os

import pytest

from tfdist.config import ComputeConfig, FitConfig
from tfdist.environ import scoped_environ
from tfdist.errors import ConfigError
from tfdist.launch.protocol import LaunchPlan


def test_all_problems_of_a_compute_config_come_together() -> None:
    """Every wrong setting is named at once."""
    with pytest.raises(ConfigError) as caught:
        ComputeConfig(slots=0, strategy="mirored", show_output="some", launcher="yarn", env={"A": 1}, max_restarts=-1)  # type: ignore[arg-type,dict-item]
    assert [p.partition(":")[0] for p in caught.value.problems] == [
        "compute.slots",
        "compute.strategy",
        "compute.show_output",
        "compute.launcher",
        "compute.max_restarts",
        "compute.env",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"global_batch": 2.5},
        {"seed": -1},
        {"seed": True},
        {"verbose": 3},
        {"validation_batch": 0},
        {"checkpoint_every_steps": 0},
        {"checkpoint_dir": "s3://bucket/checkpoints"},
        {"checkpoint_dir": 7},
        {"keep_checkpoints": 0},
        {"resume": "yes"},
    ],
)
def test_a_wrong_fit_setting_is_named(wrong: dict[str, object]) -> None:
    """A value outside its range is refused by the setting's dotted name."""
    with pytest.raises(ConfigError, match=f"fit.{next(iter(wrong))}: expected"):
        FitConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"min_slots": 0}, "min_slots: expected a whole number of at least 1, got 0"),
        ({"min_slots": True}, "min_slots: expected a whole number"),
        ({"min_slots": 4}, r"min_slots: expected at most 3 \(slots\), got 4"),
        ({"last_call_timeout_s": -1.0}, "last_call_timeout_s: expected seconds of at least 0, got -1.0"),
        ({"last_call_timeout_s": float("nan")}, "last_call_timeout_s: expected seconds of at least 0, got nan"),
    ],
)
def test_a_wrong_setting_of_an_elastic_training_is_named(wrong: dict[str, float], told: str) -> None:
    """The least number of slots is at least 1 and at most all; the wait for the others is no negative number."""
    with pytest.raises(ConfigError, match=f"compute.{told}"):
        ComputeConfig(slots=3, **wrong)  # type: ignore[arg-type]


def test_with_fewer_slots_a_rank_that_is_not_there_is_not_shown() -> None:
    """What a launch with fewer workers is given is valid, whatever rank was to be shown."""
    compute = ComputeConfig(slots=3, min_slots=1, show_output=2)
    assert compute.with_slots(3) == ComputeConfig(slots=3, show_output=2)
    assert compute.with_slots(2) == ComputeConfig(slots=2, show_output="none")
    assert compute.with_slots(1).strategy_in_force == "single"


@pytest.mark.parametrize("wrong", [2, -1, True, 1.0, "all workers"])
def test_whose_output_is_shown_is_a_word_or_a_rank(wrong: object) -> None:
    """Each rank of the slots can be shown by itself; another number, and what is no number, is refused."""
    assert ComputeConfig(slots=2, show_output=1).show_output == 1
    with pytest.raises(ConfigError, match=r"compute\.show_output: expected .* a rank below 2 \(slots\), got"):
        ComputeConfig(slots=2, show_output=wrong)  # type: ignore[arg-type]


def test_the_variables_of_the_workers_are_not_shown() -> None:
    """What a configuration looks like, alone and in a launch plan, says nothing of its variables."""
    compute = ComputeConfig(env={"API_TOKEN": "unheard"})
    plan = LaunchPlan.of(compute, "run", results="chief")
    assert plan.env == {"API_TOKEN": "unheard"}
    assert "unheard" not in f"{compute!r} {plan!r}"


def test_auto_is_single_for_one_slot_and_multi_worker_for_more() -> None:
    """The strategy in force follows from the slots unless it is named."""
    assert ComputeConfig().strategy_in_force == "single"
    assert ComputeConfig(slots=2).strategy_in_force == "multi_worker_mirrored"
    assert ComputeConfig(strategy="mirrored").strategy_in_force == "mirrored"


def test_a_scoped_environment_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables set, changed and removed for a block are as before after it, also when it fails."""
    monkeypatch.setenv("TFDIST_OLD", "1")
    monkeypatch.delenv("TFDIST_NEW", raising=False)

    def fail_inside() -> None:
        with scoped_environ({"TFDIST_OLD": None, "TFDIST_NEW": "2"}):
            assert "TFDIST_OLD" not in os.environ
            assert os.environ["TFDIST_NEW"] == "2"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ["TFDIST_OLD"] == "1"
    assert "TFDIST_NEW" not in os.environ
