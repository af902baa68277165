"""A config as a form of the Prefect page: what its file sets comes first, and groups at their defaults are folded.

A folded group is `null` in the form, which a config reads as its defaults (infra/config.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from enum import IntEnum
from typing import Annotated, Any, TypeVar, get_args

from prefect import Flow
from pydantic import GetJsonSchemaHandler

from infra.config import OUTSIDE_IDENTITY, Config, is_group, normal_default

Schema = dict[str, Any]
F = TypeVar("F", bound=Flow[..., Any])


class KeyPlace(IntEnum):
    """Position of a key in its form."""

    SET = 0
    SET_GROUP = 1
    DEFAULT = 2
    RUNNING = 3
    """Keys at their defaults that do not affect the result."""
    GROUP = 4
    """A group at its defaults that may also be left out: folded, it would be."""
    FOLDED = 5


def renamed(flow: F, name: str) -> F:
    """The flow under another name, which has the same form. Prefect's `with_options` would compute the form again: 0.2
    s of processor time for a pipeline."""
    made = copy(flow)
    made.name = name
    return made


def with_form(flow: Flow[..., Any], config: Config, name: str) -> Flow[..., Any]:
    """The flow under another name, with a form for its parameter `config` that shows this one."""
    made = renamed(flow, name)
    signature = inspect.signature(made.fn, eval_str=True)
    shown = signature.parameters["config"].replace(annotation=Annotated[type(config), _PageForm(config)])
    # What Prefect reads the form's schema from.
    made.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[shown if parameter.name == "config" else parameter for parameter in signature.parameters.values()]
    )
    return made


def form_values(config: Config) -> dict[str, Any]:
    """Values that the form is filled with."""
    values = config.model_dump(mode="json", by_alias=True)
    for name, key, key_place in _keys(config):
        value = getattr(config, name)
        if key_place is KeyPlace.FOLDED:
            values[key] = None
        elif isinstance(value, Config):
            values[key] = form_values(value)
    return values


def _keys(config: Config) -> list[tuple[str, str, KeyPlace]]:
    """Return (attribute, key, place in the form) of each key."""
    keys = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        is_default = not field.is_required() and value == normal_default(type(config), name)
        if not is_default:
            key_place = KeyPlace.SET_GROUP if isinstance(value, Config) else KeyPlace.SET
        elif is_group(field.annotation) or (value is None and any(map(is_group, get_args(field.annotation)))):
            key_place = KeyPlace.FOLDED
        elif isinstance(value, Config):
            key_place = KeyPlace.GROUP
        else:
            extra = field.json_schema_extra
            key_place = (
                KeyPlace.RUNNING if isinstance(extra, Mapping) and extra.get(OUTSIDE_IDENTITY) else KeyPlace.DEFAULT
            )
        keys.append((name, field.alias or name, key_place))
    return keys


class _WithoutForm:
    """An almost empty form schema. Prefect computes the form of each flow twice when the flow is created, which takes
    half a second for a large config. Deployed flows get their form from `with_form`."""

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> Schema:
        return {"type": "object"}


WITHOUT_FORM = _WithoutForm()
"""Annotation of a flow's parameter: `Annotated[Config, WITHOUT_FORM]`. Values are validated as usual."""


class _PageForm:
    """Gives a config class the JSON schema that Prefect's page draws the form of one config from."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> Schema:
        return _arranged(handler(core), self._config, handler.resolve_ref_schema)


def _arranged(schema: Schema, config: Config, resolve: Callable[[Schema], Schema]) -> Schema:
    """The object schema of a config, its keys in their places, with the config's values as defaults."""
    arranged = deepcopy(resolve(schema))
    values = config.model_dump(mode="json", by_alias=True)
    for number, (name, key, key_place) in enumerate(_keys(config)):
        value, shown = getattr(config, name), arranged["properties"][key]
        title = shown.get("title") or key.replace("_", " ").capitalize()
        description = {"description": shown["description"]} if "description" in shown else {}
        if isinstance(value, Config):
            choices = [
                _arranged(choice, value, resolve) if resolve(choice).get("title") == type(value).__name__ else choice
                for choice in shown.get("anyOf", [shown])
            ]
            if key_place is KeyPlace.FOLDED:
                choices = [{"type": "null", "title": "defaults"}, {**choices[0], "title": "set here"}]
            shown = {"anyOf": choices} if len(choices) > 1 else choices[0]
        default = None if key_place is KeyPlace.FOLDED else values[key]
        position = 1000 * key_place + number
        arranged["properties"][key] = {**shown, **description, "title": title, "default": default, "position": position}
    return arranged
