"""Validation errors in the form of the command contract: dotted path, expected value, nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from infra.errors import Problem, quoted
from tasks.stages import usable_stages

IN_WORDS = {
    r"^[a-z0-9][a-z0-9._-]*$": "lower-case letters, digits and . _ -, starting with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits and . _ -, starting with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "letters, digits and . _ -, starting with a letter or digit",
    r"^[a-z0-9_]+\.[a-z0-9_]+$": "a step and its figure, such as rlhf.reward_gain",
    r"^([a-z]{2})?$": "the two letters of a language, such as en",
    "^/": "an absolute path",
}
"""Descriptions of the patterns of keys."""
SURE, DEEPEST = 0.8, 3
"""Minimum similarity of a misspelling to a known name, and the maximum depth at which a key is searched."""


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """One problem per pydantic error, sorted by location."""
    problems = []
    items = error.errors(include_url=False)
    for item in items:
        # A list whose items are all wrong counts as empty: it is not, and its items are reported.
        if item["type"] == "too_short" and any(_is_within(item["loc"], other["loc"]) for other in items):
            continue
        path, classes = _follow(root, item["loc"])
        dotted = ".".join(map(str, path))
        if item["type"] == "extra_forbidden":
            problems.append(_unknown_key(dotted, str(path[-1]), classes))
        elif item["type"] == "missing":
            problems.append(Problem("missing_key", dotted, "this key is missing", f"add {path[-1]}:"))
        elif item["type"].startswith("union_tag") and (key := item["ctx"]["discriminator"].strip("'")) == "uses":
            problems.append(_unknown_stage(f"{dotted}.{key}", item["ctx"].get("tag")))
        elif item["type"] == "union_tag_invalid":
            key, known = item["ctx"]["discriminator"].strip("'"), item["ctx"]["expected_tags"].replace("'", "")
            message = f"there is no such {key}, got {quoted(item['ctx']['tag'])}"
            problems.append(
                Problem(
                    "bad_value", f"{dotted}.{key}", message, nearest(item["ctx"]["tag"], known.split(", "), "one of")
                )
            )
        else:
            problems.append(Problem("bad_value", dotted, _expected(item)))
    return sorted(set(problems), key=lambda problem: problem.path)


def _is_within(loc: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(other) > len(loc) and other[: len(loc)] == loc


def _expected(item: Any) -> str:
    if item["type"] == "string_pattern_mismatch":
        pattern = item["ctx"]["pattern"]
        return f"expected {IN_WORDS.get(pattern, f'text of the form {pattern}')}, got {quoted(item['input'])}"
    if item["type"] == "too_short":
        return "expected at least " + ("one" if item["ctx"]["min_length"] == 1 else str(item["ctx"]["min_length"]))
    text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = text.replace("Input should be", "expected").replace("Input should", "expected to")
    given = item.get("input")
    if isinstance(given, str | int | float | bool) and quoted(given) not in text:
        text += f", got {quoted(given)}"
    return text


def _unknown_stage(path: str, given: str | None) -> Problem:
    """Return the problem of a step without a stage or with an unknown one."""
    if given is None:
        return Problem(
            "missing_key", path, "a step names the stage that it uses", f"one of {', '.join(usable_stages())}"
        )
    return Problem("unknown_stage", path, f"there is no stage {given}", nearest(given, usable_stages(), "one of"))


def nearest(given: str, known: Collection[str], otherwise: str, cutoff: float = 0.5) -> str:
    """Return the fix for an unknown name: the most similar known name, otherwise all known names."""
    matches = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f"did you mean {matches[0]}?" if matches else f"{otherwise} {', '.join(known)}"


def _unknown_key(dotted: str, key: str, classes: list[type[BaseModel]]) -> Problem:
    keys = sorted({field.alias or name for cls in classes for name, field in cls.model_fields.items()})
    if not difflib.get_close_matches(key, keys, n=1, cutoff=SURE) and (deeper := _deeper(key, classes)):
        suggestion = f"{dotted.removesuffix(key)}{deeper}"
        return Problem("unknown_key", dotted, "there is no such key here", f"did you mean {suggestion}?")
    return Problem("unknown_key", dotted, "there is no such key", nearest(key, keys, "known keys:"))


def _deeper(key: str, classes: list[type[BaseModel]]) -> str:
    """Return the shallowest dotted key below these classes whose last part is this key or the most similar one."""
    paths: list[list[str]] = []
    left: list[tuple[type[BaseModel], list[str], tuple[type[BaseModel], ...]]] = [(cls, [], ()) for cls in classes]
    while left:
        cls, path, trail = left.pop(0)
        for name, field in cls.model_fields.items():
            here = [*path, field.alias or name]
            paths.append(here)
            left += [
                (inner, here, (*trail, cls))
                for inner in _models(field.annotation)
                if inner not in trail and len(here) < DEEPEST and _values_of(field.annotation) is None
            ]
    nested = [path for path in paths if len(path) > 1]
    near = difflib.get_close_matches(key, [path[-1] for path in nested], n=1, cutoff=SURE)
    return next((".".join(path) for path in nested if near and path[-1] == near[0]), "")


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
        elif (values := _values_of(annotation)) is not None and "[" not in part:
            path.append(part)
            owners, annotation = [], values
            here = list(_models(annotation))
        elif len(here) > 1 and (tagged := _tagged(annotation, part)):
            here = tagged
        elif part in fields:
            path.append(part)
            owners = here
            annotation = fields[part].annotation
            here = list(_models(annotation))
        elif named := [cls for cls in _models(annotation) if cls.__name__ == part]:
            here = named
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


def _values_of(annotation: Any) -> Any:
    """The type of the values of a mapping with free keys; None for any other type."""
    if get_origin(annotation) in (dict, Mapping):
        return get_args(annotation)[1]
    return None


def _tagged(annotation: Any, tag: str) -> list[type[BaseModel]]:
    """The classes of a union that its tag, a key with one possible value, chooses."""
    return [
        cls
        for cls in _models(annotation)
        if any(get_args(field.annotation) == (tag,) for field in cls.model_fields.values())
    ]
