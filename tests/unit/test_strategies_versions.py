"""Which versions of Keras are accepted, and how attributes are replaced and restored."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import UnsupportedVersionError
from tfdist.strategies.corrections.patch import patch_into
from tfdist.strategies.versions import NEWEST, OLDEST, check_keras_version

numbers = st.integers(0, 40)


@given(numbers, numbers, numbers, st.sampled_from(["", "rc1", ".dev20250101"]))
def test_versions_in_the_tested_range_only(major: int, minor: int, patch: int, suffix: str) -> None:
    """A version is accepted when its major and minor number were tested; otherwise the error names it and the range."""
    version = f"{major}.{minor}.{patch}{suffix}"
    if OLDEST <= (major, minor) <= NEWEST:
        assert check_keras_version(version) == (major, minor)
    else:
        with pytest.raises(UnsupportedVersionError, match=r"3\.12 to 3\.15") as caught:
            check_keras_version(version)
        assert version in str(caught.value)


def test_a_version_that_is_none_is_refused() -> None:
    """Text without numbers is no version."""
    with pytest.raises(UnsupportedVersionError, match="unknown"):
        check_keras_version("unknown")


def test_replaced_attributes_are_restored_in_order() -> None:
    """Own attributes come back, inherited ones are inherited again, and two replacements of one are undone in turn."""

    class Base:
        def inherited(self) -> str:
            return "base"

    class Child(Base):
        def own(self) -> str:
            return "child"

    before = dict(vars(Child))
    with ExitStack() as stack:
        patch = patch_into(stack)
        for mark in ("1", "2"):
            for name in ("own", "inherited"):
                patch(Child, name, lambda original, mark=mark: lambda self: original(self) + mark)
        assert (Child().own(), Child().inherited()) == ("child12", "base12")
        assert Base().inherited() == "base"
    assert dict(vars(Child)) == before
