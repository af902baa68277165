"""Validation errors in the words of the command contract: dotted path, what was expected, the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infra.errors import Problem


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """One problem for each thing that pydantic found, sorted by where it stands."""
    found = []
    for item in error.errors(include_url=False):
        path, classes = _follow(root, item["loc"])
        dotted = ".".join(map(str, path))
        if item["type"] == "extra_forbidden":
            found.append(_unknown_key(dotted, str(path[-1]), classes))
        elif item["type"] == "missing":
            found.append(Problem("missing_key", dotted, "this key is missing", f"add {path[-1]}:"))
        else:
            found.append(Problem("bad_value", dotted, _expected(item)))
    return sorted(set(found), key=lambda problem: problem.path)


def _expected(item: Any) -> str:
    text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = text.replace("Input should be", "expected").replace("Input should", "expected to")
    given = item.get("input")
    if isinstance(given, str | int | float | bool) and repr(given) not in text:
        text += f", got {given!r}"
    return text


def _unknown_key(dotted: str, key: str, classes: list[type[BaseModel]]) -> Problem:
    keys = sorted({field.alias or name for cls in classes for name, field in cls.model_fields.items()})
    nearest = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(keys)}"
    return Problem("unknown_key", dotted, "there is no such key", fix)


def _follow(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[int | str], list[type[BaseModel]]]:
    """The part of an error's location that a person wrote, and the classes that own its last key.

    Pydantic puts the tags of unions and the names of validators between the keys; those are no part of the file.
    """
    path: list[int | str] = []
    owners: list[type[BaseModel]] = []
    here: list[type[BaseModel]] = [root]
    annotation: Any = root
    for position, part in enumerate(loc):
        fields = {field.alias or name: field for cls in here for name, field in cls.model_fields.items()}
        if isinstance(part, int):
            path.append(part)
            here = list(_models(annotation))
        elif part in fields:
            path.append(part)
            owners = here
            annotation = fields[part].annotation
            here = list(_models(annotation))
        elif tagged := [cls for cls in _models(annotation) if _has_tag(cls, part)]:
            here = tagged
        elif position == len(loc) - 1 and here:
            path.append(part)
            owners = here
        elif not here and "[" not in part:
            path.append(part)
    return path, owners


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _has_tag(cls: type[BaseModel], tag: str) -> bool:
    return cls.__name__ == tag or any(tag in get_args(field.annotation) for field in cls.model_fields.values())
