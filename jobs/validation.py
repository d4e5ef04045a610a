"""Checks values read from a file against a pydantic model: every problem at once, in words, with its dotted place."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tfdist.environ import names_secret
from tfdist.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Place = tuple[str | int, ...]

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
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def validated(model: type[Model], raw: Mapping[str, Any]) -> tuple[Model | None, list[str]]:
    """Check ``raw`` against ``model``.

    Args:
        model: forbids unknown keys; its validators raise :class:`ConfigError` with texts that name their place.
        raw: as read from a file.

    Returns:
        The model, or None with every problem found. A section is checked again without its wrong values, so that rules
        over several values are not hidden by one wrong value. The value of a misspelled key is taken as that of the key
        which is closest, so that its absence is no second problem.
    """
    rest = json.loads(json.dumps(raw, default=str))
    problems: dict[str, None] = {}
    removed: set[Place] = set()
    while True:
        try:
            # JSON mode, because there strict means strict, yet a list may still become a tuple and text a path.
            spec = model.model_validate_json(json.dumps(rest), strict=True)
        except ValidationError as error:
            wrong: dict[Place, list[Any]] = {}
            for item in error.errors():
                wrong.setdefault(_place(item, rest), []).append(item)
        else:
            return (None if problems else spec), list(problems)
        found = {place: items for place, items in wrong.items() if place not in removed}
        renamed = {place: new for place, items in found.items() if (new := _meant(place, items, model, rest))}
        removed.update(renamed.values())  # neither that a key is missing nor that the guess is wrong is told besides
        for place, items in found.items():
            if place not in removed:
                problems.update(dict.fromkeys(_describe(place, items, model)))
        removed.update(found)
        # From the end, so that the numbers of a list's remaining elements stay what they were.
        gone = [
            _rename(rest, place, renamed[place]) if place in renamed else _remove(rest, place)
            for place in sorted(wrong, key=_sort_key, reverse=True)
        ]
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


def _describe(place: Place, items: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> list[str]:
    """The problem texts of what pydantic found wrong at one place; several are the members of one union."""
    dotted, kind, got = ".".join(map(str, place)), items[0]["type"], items[0]["input"]
    cause = items[0].get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return list(cause.problems)
    if kind in _UNKNOWN_KEY:
        known = _names_at(model, place[:-1])
        return [f"{dotted}: expected one of {', '.join(known)}, got an unknown key{nearest(str(place[-1]), known)}"]
    if kind in ("missing", "missing_argument"):
        return [f"{dotted}: expected a value, got nothing; this key is required"]
    wanted = " or ".join(dict.fromkeys(_wanted(item) for item in items))
    choices = re.findall("'([^']*)'", wanted) if kind == "literal_error" else []
    secret = place[:1] == ("compute",) and names_secret(f"{dotted} {got!r}")
    told = "a value that is not shown" if secret else shown(got)
    return [f"{dotted}: expected {wanted}, got {told}{nearest(str(got), choices)}"]


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


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to ``name``, or nothing."""
    close = _closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def _closest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)), None)


def _meant(place: Place, items: Sequence[Mapping[str, Any]], model: type[BaseModel], raw: Any) -> Place | None:
    """The place that an unknown key was probably meant to be, where the file has nothing yet."""
    if items[0]["type"] not in _UNKNOWN_KEY:
        return None
    section = raw
    for part in place[:-1]:
        section = section[part]
    close = _closest(str(place[-1]), _names_at(model, place[:-1]))
    return None if close is None or close in section else (*place[:-1], close)


def shown(value: Any) -> str:
    """A value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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


def _rename(raw: Any, place: Place, new: Place) -> bool:
    """Move the value at ``place`` to the key at the end of ``new`` in the same section."""
    section = raw
    for part in place[:-1]:
        section = section[part]
    section.setdefault(new[-1], section.pop(place[-1]))
    return True


def _names_at(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that are valid at a place of a file of ``model``."""
    section: Any = model
    for part in place:
        hints = typing.get_type_hints(section)
        # A key that is no field's name is a key of the user's own (a column), inside the section already found.
        section = section_in(hints[part]) if part in hints else section
    if dataclasses.is_dataclass(section):
        return [f.name for f in dataclasses.fields(section)]
    return list(section.model_fields)


def section_in(hint: Any) -> Any:
    """The model or dataclass that a type hint speaks of, also inside dict, list and unions."""
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel)):
        return hint
    return next(filter(None, map(section_in, typing.get_args(hint))), None)
