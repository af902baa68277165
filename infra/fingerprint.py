"""Names for artifacts: the fingerprint of what was asked for, and the digest of what came out."""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.config import IN_IDENTITY, MEASURED_ONLY, OUTSIDE_IDENTITY, normal_default
from infra.io.sources import SOURCE_PATH

FINGERPRINT_LENGTH = 16


class NoStableForm(TypeError):
    """A value was to be part of an identity, but nothing says that it will read the same tomorrow."""


def canonical(value: Any, where: str = "value", *, measuring: bool = False) -> Any:
    """The plain JSON form of a value that bears on a result.

    Of a config, only the keys that bear on the result and differ from their default stay, so that a new option does not
    re-address yesterday's artifacts. `measuring`: the result is the measurement of a trained model, on which the keys
    that are `measured_only` bear too.

    Raises NoStableForm, naming the place, for anything but None, bool, int, finite float, str, configs, lists, tuples
    and mappings with string keys.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NoStableForm(f"{where}: {value} has no JSON form; a finite number was expected")
        return float(value)
    if isinstance(value, BaseModel):
        return {
            name: canonical(getattr(value, name), f"{where}.{name}", measuring=measuring)
            for name, field in type(value).model_fields.items()
            if bears_on_result(field, measuring=measuring)
            and (_always_named(field) or not _is_default(type(value), name, getattr(value, name)))
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise NoStableForm(f"{where}: the key {key!r} is no string")
        return {str(key): canonical(item, f"{where}.{key}", measuring=measuring) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}.{index}", measuring=measuring) for index, item in enumerate(value)]
    raise NoStableForm(
        f"{where}: a {type(value).__name__} has no stable form; use numbers, strings, lists, mappings or configs"
    )


def same(one: Any, other: Any) -> bool:
    """Whether two plain JSON values are one: a page's form writes 1 where YAML had 1.0, but 1 is not true."""
    return within(one, other) and within(other, one)


def within(part: Any, whole: Any) -> bool:
    """Whether every value of `part` is that of `whole` in the same place; mappings of `whole` may hold more keys."""
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(key in whole and within(item, whole[key]) for key, item in part.items())
    if isinstance(part, list | tuple) and isinstance(whole, list | tuple):
        return len(part) == len(whole) and all(map(within, part, whole))
    if isinstance(part, bool) or isinstance(whole, bool):
        return part is whole
    return bool(part == whole)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as dotted keys: {"a": {"b": [1]}} → {"a.b.0": 1}; a section without keys is {}, which
    is not the same as none."""
    if isinstance(value, Mapping) and (value or not prefix):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def changed_settings(
    old: Mapping[str, Any], old_config: Mapping[str, Any], new: Mapping[str, Any], new_config: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys that bear on the result and differ between two stored identities, with both values.

    old_config, new_config: the whole configs, in which keys at their default stand as well; None for an absent key.
    """
    before, after = flatten(old), flatten(new)
    all_before, all_after = flatten(old_config), flatten(new_config)
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key, all_before.get(key)), after.get(key, all_after.get(key))
        has_keys = any(name.startswith(f"{key}.") for name in before.keys() | after.keys())  # which tell the difference
        if not same(one, other) and not has_keys:
            yield key, one, other


def canonical_json(value: Any) -> str:
    """The one text of a value: keys sorted, no spaces, ASCII only."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(
    stage: str,
    version: int,
    config: BaseModel | Mapping[str, Any],
    inputs: Mapping[str, str],
    sources: Mapping[str, str],
) -> str:
    """The address of an artifact: what was asked for, in 16 hex digits.

    inputs: content digest of each input artifact, by input name. sources: content digest of each outside source, by
    the config key that names it. Raises NoStableForm.
    """
    asked = {"stage": stage, "version": version, "config": config, "inputs": inputs, "sources": sources}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()[:FINGERPRINT_LENGTH]


def adopted_fingerprint(stage: str, digest: str) -> str:
    """The address of an artifact that was made elsewhere: its stage and its bytes."""
    return fingerprint(stage, 0, {"adopted": digest}, {}, {})


def digest_files(files: Iterable[tuple[str, str]]) -> str:
    """The content digest of a set of files, from (relative path, sha256) pairs in any order."""
    lines = sorted(f"{PurePosixPath(path)}\0{sha256}\n" for path, sha256 in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def bears_on_result(field: FieldInfo, *, measuring: bool = False) -> bool:
    """False for keys that say where and how something runs, for paths, of which only the bytes count, and unless
    `measuring` for keys that are `measured_only`."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    outside = bool(extra.get(OUTSIDE_IDENTITY)) or (bool(extra.get(MEASURED_ONLY)) and not measuring)
    return not outside and SOURCE_PATH not in field.metadata and not _names_source_path(field.annotation)


def _always_named(field: FieldInfo) -> bool:
    """True for keys that stay at their default too: `in_identity`, and the key that tells the kinds of a union apart,
    which could read the same without it."""
    if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get(IN_IDENTITY):
        return True
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _is_default(config: type[BaseModel], name: str, value: Any) -> bool:
    return not config.model_fields[name].is_required() and bool(value == normal_default(config, name))


def _names_source_path(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    if SOURCE_PATH in metadata:
        return True
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return False
    return any(_names_source_path(argument) for argument in get_args(annotation))
