"""Programs that cannot be sent: the error names the variable, before anything is launched."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import ConfigError
from tfdist.launch.program import dump_program

LOG = logging.getLogger(__name__)
GLOBAL_LOCK = threading.Lock()


def uses_a_global() -> Any:
    return [GLOBAL_LOCK for _ in range(2)]


def run(train_fn: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return train_fn(**arguments)


class Trainer:
    """An object of the user's whose method is the train function."""

    def __init__(self) -> None:
        self.settings = {"locks": [threading.Lock()]}

    def train(self) -> Any:
        return self.settings


def closing_over(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return lambda: inner()


def with_default(rate: float = 1.0, guard: Any = GLOBAL_LOCK) -> Any:
    return rate, guard


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (closing_over(GLOBAL_LOCK), "'value', a _thread.lock"),
        (uses_a_global, "'GLOBAL_LOCK', a _thread.lock"),
        (partial(run, print, {"rate": 1, "guard": GLOBAL_LOCK}), "'guard', a _thread.lock"),
        (Trainer().train, "\"self.settings['locks'][0]\", a _thread.lock"),
        (with_default, "'guard', a _thread.lock"),
    ],
)
def test_what_cannot_be_sent_is_named(program: Callable[[], Any], named: str) -> None:
    """A closure, a global, an argument, an attribute and a default are each named, however deep, with their type."""
    with pytest.raises(ConfigError) as caught:
        dump_program(program, "train_fn")
    assert str(caught.value).startswith("train_fn: expected code and arguments that can be sent")
    assert named in str(caught.value)
    assert "inside the function" in str(caught.value)


def test_an_open_file_is_refused_by_its_name(tmp_path: Path) -> None:
    """A file open for reading is not copied in silence; its variable is named."""
    path = tmp_path / "rows.txt"
    path.write_text("1")
    with path.open() as rows, pytest.raises(ConfigError, match=r"'rows', a _io\.TextIOWrapper: an open file"):
        dump_program(lambda: rows.read(), "train_fn")


def test_a_logger_travels_by_its_name() -> None:
    """A module's logger is that of the same name on the worker."""
    assert pickle.loads(dump_program(lambda: LOG, "train_fn"))() is LOG
