"""Names for artifacts: the fingerprint of the request, and the digest of the result."""

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
    """A value was to be part of an identity, but has no form that is guaranteed to stay the same."""


def canonical(value: Any, where: str = "value", *, measuring: bool = False) -> Any:
    """Return the plain JSON form of a value that affects a result.

    A config keeps only the keys that affect the result and differ from their default, so that a new option does not
    re-address existing artifacts. `measuring`: the result is the measurement of a trained model, which the keys that
    are `measured_only` affect too.

    Raises NoStableForm, naming the place, for anything but None, bool, int, finite float, str, configs, lists, tuples
    and mappings with string keys.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NoStableForm(f"{where}: {value} has no JSON form; expected a finite number")
        return float(value)
    if isinstance(value, BaseModel):
        return {
            field.alias or name: canonical(getattr(value, name), f"{where}.{name}", measuring=measuring)
            for name, field in type(value).model_fields.items()
            if bears_on_result(field, measuring=measuring)
            and (_always_named(field) or not _is_default(type(value), name, getattr(value, name)))
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise NoStableForm(f"{where}: the key {key!r} is not a string")
        return {str(key): canonical(item, f"{where}.{key}", measuring=measuring) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, f"{where}.{index}", measuring=measuring) for index, item in enumerate(value)]
    raise NoStableForm(
        f"{where}: a {type(value).__name__} has no stable form; use numbers, strings, lists, mappings or configs"
    )


def same(value: Any, other: Any) -> bool:
    """Return True if two plain JSON values are equal: 1 equals 1.0, since a page's form writes 1 where YAML had 1.0,
    but 1 does not equal true."""
    return within(value, other) and within(other, value)


def within(part: Any, full: Any) -> bool:
    """Return True if every value of `part` equals the one in the same place of `full`.

    Mappings of `full` may have more keys.
    """
    if isinstance(part, Mapping) and isinstance(full, Mapping):
        return all(key in full and within(item, full[key]) for key, item in part.items())
    if isinstance(part, list | tuple) and isinstance(full, list | tuple):
        return len(part) == len(full) and all(map(within, part, full))
    if isinstance(part, bool) or isinstance(full, bool):
        return part is full
    return bool(part == full)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and lists to dotted keys: {"a": {"b": [1]}} → {"a.b.0": 1}.

    A section without keys stays {}, which differs from no section.
    """
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
    """Yield the dotted keys that affect the result and differ between two stored identities, with both values.

    The value of an absent key is None.

    Args:
        old_config, new_config: the whole configs, including keys at their default.
    """
    before, after = flatten(old), flatten(new)
    all_before, all_after = flatten(old_config), flatten(new_config)
    for key in sorted(before.keys() | after.keys()):
        old_value, new_value = before.get(key, all_before.get(key)), after.get(key, all_after.get(key))
        has_keys = any(name.startswith(f"{key}.") for name in before.keys() | after.keys())  # which show the difference
        if not same(old_value, new_value) and not has_keys:
            yield key, old_value, new_value


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value: keys sorted, no spaces, ASCII only."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(
    stage: str,
    version: int,
    config: BaseModel | Mapping[str, Any],
    inputs: Mapping[str, str],
    sources: Mapping[str, str],
) -> str:
    """Return the address of an artifact: a hash of the request, in 16 hex digits.

    Args:
        inputs: content digest of each input artifact, by input name.
        sources: content digest of each outside source, by the config key that names it.

    Raises NoStableForm.
    """
    identity = {"stage": stage, "version": version, "config": config, "inputs": inputs, "sources": sources}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:FINGERPRINT_LENGTH]


def adopted_fingerprint(stage: str, digest: str) -> str:
    """Return the address of an artifact that was made elsewhere, from its stage and its bytes."""
    return fingerprint(stage, 0, {"adopted": digest}, {}, {})


def digest_files(files: Iterable[tuple[str, str]]) -> str:
    """Return the content digest of a set of files, from (relative path, sha256) pairs in any order."""
    lines = sorted(f"{PurePosixPath(path)}\0{sha256}\n" for path, sha256 in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def bears_on_result(field: FieldInfo, *, measuring: bool = False) -> bool:
    """Return False for keys that do not affect the result.

    These are keys for where and how something runs, paths, for which only the bytes count, and unless `measuring` keys
    that are `measured_only`.
    """
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    outside = bool(extra.get(OUTSIDE_IDENTITY)) or (bool(extra.get(MEASURED_ONLY)) and not measuring)
    return not outside and SOURCE_PATH not in field.metadata and not _names_source_path(field.annotation)


def _always_named(field: FieldInfo) -> bool:
    """Return True for keys that stay even at their default.

    These are `in_identity` keys, and the key that distinguishes the kinds of a union, which could be equal without it.
    """
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
