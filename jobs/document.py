"""YAML text as plain values, and single values set by ``a.b=c``."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tfdist.environ import names_secret
from tfdist.errors import ConfigError

from .validation import section_in, shown


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a readable job file, got: {error}") from error
    raw = load(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys and values, got {_type_name(raw)}")
    return raw


def load(text: str, where: str) -> Any:
    """YAML text as values; ``where`` is named in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}: line {mark.line + 1}, column {mark.column + 1}" if mark is not None else where
        raise ConfigError(f"{place}: expected YAML, got: {getattr(error, 'problem', error)}") from error


def dump(raw: Mapping[str, Any]) -> str:
    """Values as YAML text that :func:`load` reads back."""
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def override(raw: dict[str, Any], text: str, model: type[BaseModel]) -> str | None:
    """Apply ``a.b=value`` to ``raw``.

    Args:
        raw: as read; changed.
        text: the override; its value is YAML.
        model: says which places are sections.

    Returns:
        The problem, if there is one.
    """
    dotted, equals, value = text.partition("=")
    if names_secret(dotted) or dotted.strip().startswith("compute.env"):  # values of env may be secrets
        text = f"{dotted}=..."
    parts = _split_place(dotted.strip(), model)
    if not equals or not all(parts):
        return f"--set {text}: expected a.b=value, got {text!r}"
    at = raw
    for depth, part in enumerate(parts[:-1]):
        below = at.setdefault(part, {})
        if not isinstance(below, dict):
            return f"--set {text}: expected a section at {'.'.join(parts[: depth + 1])}, got {shown(below)}"
        at = below
    try:
        at[parts[-1]] = load(value, f"--set {text}")
    except ConfigError as error:
        return str(error)
    return None


def _split_place(dotted: str, model: type[BaseModel]) -> list[str]:
    """The keys of a dotted place; in a map with keys of the user's own (``spark.conf``) the rest is one key."""
    parts, section = dotted.split("."), model
    for depth, part in enumerate(parts):
        hint = typing.get_type_hints(section).get(part)
        if typing.get_origin(hint) in (dict, Mapping):
            return [*parts[: depth + 1], *filter(None, [".".join(parts[depth + 1 :])])]
        section = section_in(hint)
        if section is None:
            break
    return parts


def _type_name(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), type(value).__name__)


class _Loader(yaml.SafeLoader):
    """YAML with two repairs: a key given twice is an error, and ``1e-3`` is a number (YAML 1.1 reads it as text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would read as numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
