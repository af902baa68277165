"""Descriptions of stages for people and programs: what each reads and produces, its keys, and a minimal config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from flows.config.problems import nearest
from infra.errors import ConfigError, Problem
from tasks.stage import Stage
from tasks.stages import INSTALLED, SECTIONS, usable_stages

Schema = Mapping[str, Any]


def stage_list() -> list[dict[str, Any]]:
    """Return a row for each stage that a step can use. Raises ConfigError for installed stages that cannot be used."""
    if INSTALLED.problems:
        raise ConfigError(*INSTALLED.problems)
    return [_row(stage) for stage in usable_stages().values()]


def described(name: str) -> dict[str, Any]:
    """Return the description of one stage. Raises ConfigError for an unknown one, and as `stage_list` does."""
    stage_list()
    stages = usable_stages()
    if name not in stages:
        problem = Problem("unknown_stage", name, f"there is no stage {name}", nearest(name, stages, "one of"))
        raise ConfigError(problem)
    stage = stages[name]
    return {
        **_row(stage),
        "function": stage.function,
        "shows": list(stage.shows),
        "inputs": [
            {
                "input": item.name,
                "kinds": list(item.takes),
                "optional": item.optional,
                "made_by": [other.name for other in stages.values() if other.makes in item.takes],
            }
            for item in stage.inputs
        ],
        "more_inputs": list(stage.more),
        "keys": list(_keys(stage)),
        "example": _example(stage),
    }


def _row(stage: Stage) -> dict[str, Any]:
    installed = stage.installed
    return {
        "stage": stage.name,
        "about": stage.about,
        "version": stage.version,
        "reads": [kind for item in stage.inputs if not item.optional for kind in item.takes[:1]],
        "makes": stage.makes,
        "section": stage.name in SECTIONS,
        "package": {"name": installed.name, "version": installed.version} if installed else None,
    }


def _keys(stage: Stage) -> Iterator[dict[str, Any]]:
    schema = stage.config.model_json_schema(by_alias=True)
    yield from _keys_of(schema, schema, "")


def _keys_of(group: Schema, root: Schema, prefix: str) -> Iterator[dict[str, Any]]:
    """Return a row for each key; the keys of a group follow the group itself."""
    for key, field in group.get("properties", {}).items():
        is_required = key in group.get("required", ())
        yield {
            "key": f"{prefix}{key}",
            "type": _type(field, root),
            "required": is_required,
            "default": None if is_required else field.get("default"),
            "description": " ".join(str(field.get("description", "")).split()),
        }
        choices = [_resolved(choice, root) for choice in _choices(field)]
        groups = [choice for choice in choices if "properties" in choice]
        if len(groups) == 1:
            yield from _keys_of(groups[0], root, f"{prefix}{key}.")


def _choices(field: Schema) -> list[Schema]:
    choices: list[Schema] = field.get("anyOf") or field.get("oneOf") or field.get("allOf") or [field]
    return choices


def _resolved(field: Schema, root: Schema) -> Schema:
    if "$ref" not in field:
        return field
    resolved: Schema = root["$defs"][field["$ref"].rpartition("/")[2]]
    return resolved


def _type(field: Schema, root: Schema) -> str:
    choices = _choices(field)
    if len(choices) > 1 or choices[0] is not field:
        return " or ".join(dict.fromkeys(_type(choice, root) for choice in choices))
    field = _resolved(field, root)
    if "enum" in field:
        return " or ".join(map(json.dumps, field["enum"]))
    if "const" in field:
        return json.dumps(field["const"])
    match field.get("type"):
        case "array":
            return f"list of {_type(field['items'], root)}" if field.get("items") else "list"
        case "object":
            return "group" if "properties" in field else "mapping"
        case None:
            return "any"
        case kind:
            return {"string": "text", "boolean": "true or false"}.get(str(kind), str(kind))


def _example(stage: Stage) -> str:
    """Return YAML with as few keys as the stage accepts: its section if it has one, otherwise a step."""
    schema = stage.config.model_json_schema(by_alias=True)
    given = _required(schema, schema)
    if stage.name in SECTIONS:
        return yaml.safe_dump({stage.name: given}, sort_keys=False)
    makers: dict[str, str] = {}
    for other in usable_stages().values():
        makers.setdefault(other.makes, other.name)
    inputs = {
        item.name: next((makers[kind] for kind in item.takes if kind in makers), "STEP")
        for item in stage.inputs
        if not item.optional
    }
    step = {"uses": stage.name, **({"inputs": inputs} if inputs else {}), **given}
    return yaml.safe_dump({"steps": {f"my_{stage.name}": step}}, sort_keys=False)


def _required(group: Schema, root: Schema) -> dict[str, Any]:
    """Return the keys without a default, with an example for each."""
    required: dict[str, Any] = {}
    for key in group.get("required", ()):
        field = group["properties"][key]
        inner = _resolved(_choices(field)[0], root)
        if "examples" in field:
            required[key] = field["examples"][0]
        elif "properties" in inner:
            required[key] = _required(inner, root)
        else:
            required[key] = f"<{_type(field, root)}>"
    return required
