"""Replacing attributes of Keras for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Patch = Callable[[Any, str, Callable[[Any], Any]], None]
"""``patch(owner, name, make)`` sets ``owner.name`` to ``make(original)`` until the context ends."""


def patch_into(stack: ExitStack) -> Patch:
    """A :data:`Patch` whose replacements are undone when ``stack`` closes, the last one first."""

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        # An inherited attribute is restored by removing ours, or a later change of the base class would be hidden.
        own = vars(owner).get(name)
        setattr(owner, name, make(original if own is None else own))
        if own is None:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, own)

    return patch
