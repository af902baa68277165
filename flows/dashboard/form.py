"""The form "change a setting and run again": the keys that a deployment declares, with the types of Prefect's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flows.config.forms import KeyPlace
from flows.config.pipeline_config import dump
from flows.config.read import PipelineConfig, parse, set_value
from flows.dashboard.steering import RefusedError, Steering
from flows.runs.journal import PIPELINE, new_run_id
from infra.errors import ConfigError, Problem

Kind = Literal["integer", "number", "switch", "choice", "text", "yaml"]
NOT_CHANGED = frozenset({"name", "description", "adopted"})
"""Keys that name a pipeline and do not affect what it computes, and artifacts that are chosen by fingerprint."""


@dataclass(frozen=True)
class Field:
    """One key.

    key: dotted, as `--set` takes it. value: as the field shows it. is_set: the config file sets the key.
    """

    key: str
    title: str
    kind: Kind
    value: str
    about: str = ""
    is_set: bool = True
    choices: tuple[str, ...] = ()
    may_be_empty: bool = False
    position: int = 0

    @property
    def section(self) -> str:
        return self.key.partition(".")[0] if "." in self.key else "pipeline"

    def as_yaml(self, text: str) -> str:
        """Return what a person typed as YAML: a text stays a text even if it looks like a number."""
        if not text and self.may_be_empty:
            return "null"
        return json.dumps(text) if self.kind in ("text", "choice") else text


class FormChange:
    """A run that is to be started again with other settings, and the deployment whose form that takes.

    Raises RefusedError for a run that no whole pipeline's deployment has started.
    """

    def __init__(self, steering: Steering, flow_run: str) -> None:
        self._steering = steering
        self._run = steering.flow_run(flow_run)
        if not self._run.get("deployment_id"):
            raise RefusedError(
                "this run belongs to no deployment; `stemma run CONFIG --set KEY=VALUE` changes a setting"
            )
        self._deployment = steering.deployment(self._run["deployment_id"])
        if self._deployment["name"] != PIPELINE:
            raise RefusedError(
                f"this run is of the single stage {self._deployment['name']}; its form is on the Prefect page"
            )
        self._values: dict[str, Any] = self._run["parameters"]["config"]
        declared = self._deployment["parameters"].get("config", {})
        self.fields = fields_of(self._deployment["parameter_openapi_schema"], declared, self._values)

    def start(self, settings: Mapping[str, str]) -> tuple[str, str]:
        """Start the changed run; return its id and that of its flow run. Raises ConfigError as `changed` does."""
        parameters: dict[str, Any] = self._run["parameters"]
        config = changed(self.fields, self._values, settings, str(parameters.get("config_path", "")))
        run_id = new_run_id()
        parameters = {**parameters, "config": dump(config), "run_id": run_id}
        variables = self._run.get("job_variables") or {}
        return run_id, self._steering.start(self._deployment["id"], parameters, variables)


def fields_of(schema: Mapping[str, Any], declared: Mapping[str, Any], values: Mapping[str, Any]) -> list[Field]:
    """Return the fields of a pipeline's form.

    Args:
        schema: of a deployment's parameters, whose `config` is the pipeline's.
        declared: the deployment's own value of `config`; groups that it leaves at their defaults are null, and omitted.
        values: config of the run that is to be changed.
    """
    definitions = schema.get("definitions", {})
    config = _resolved(schema.get("properties", {}).get("config", {}), definitions)
    fields = _walk("", config, declared, values, definitions, True)
    kept = (field for field in fields if field.key.partition(".")[0] not in NOT_CHANGED)
    return [replace(field, position=position) for position, field in enumerate(kept)]


def changed(
    fields: list[Field], values: Mapping[str, Any], settings: Mapping[str, str], config_path: str
) -> PipelineConfig:
    """Return the config of a run with other settings.

    Args:
        settings: text by key, as typed.
        config_path: the file whose folder relative paths begin at.

    Raises ConfigError with every problem, each at the key of its field where it has one.
    """
    data: dict[str, Any] = deepcopy(dict(values))
    by_key = {field.key: field for field in fields}
    problems = []
    for key, text in settings.items():
        if key not in by_key:
            problems.append(Problem("bad_setting", key, "the form of this pipeline has no such key"))
        else:
            problems += set_value(data, key, by_key[key].as_yaml(text))
    if problems:
        raise ConfigError(*problems)
    return parse(data, Path(config_path).absolute().parent)


def by_field(problems: tuple[Problem, ...], fields: list[Field]) -> tuple[dict[str, str], list[str]]:
    """Return the messages of problems by the field beside which they are shown, and those of no field."""
    keys, messages, others = [field.key for field in fields], dict[str, str](), []
    for problem in problems:
        message = f"{problem.message}{f' ({problem.fix})' if problem.fix else ''}"
        paths = (problem.path, f"steps.{problem.path}", problem.path.removeprefix("--set "))
        key = next((key for key in keys for path in paths if key == path or path.startswith(f"{key}.")), None)
        if key is None:
            others.append(f"{problem.path}: {message}")
        else:
            messages[key] = f"{messages[key]}; {message}" if key in messages else message
    return messages, others


def _walk(
    prefix: str,
    schema: Mapping[str, Any],
    declared: Mapping[str, Any],
    values: Mapping[str, Any],
    definitions: Mapping[str, Any],
    is_set: bool,
) -> Iterator[Field]:
    properties = schema.get("properties", {})
    for key in sorted(declared, key=lambda key: properties.get(key, {}).get("position", 0)):
        shown = properties.get(key, {})
        key_place = shown.get("position", 0) // 1000
        if declared[key] is None and key_place in (KeyPlace.FOLDED, KeyPlace.GROUP):
            continue
        of_key = is_set and key_place in (KeyPlace.SET, KeyPlace.SET_GROUP)
        value, path = values.get(key, declared[key]), f"{prefix}{key}"
        if value and isinstance(value, Mapping) and isinstance(declared[key], Mapping):
            group = _resolved(_choice(shown, value, definitions), definitions)
            yield from _walk(f"{path}.", group, declared[key], value, definitions, of_key)
        else:
            yield _field(path, shown, value, definitions, of_key)


def _field(path: str, shown: Mapping[str, Any], value: Any, definitions: Mapping[str, Any], is_set: bool) -> Field:
    schema = _resolved(_choice(shown, value, definitions), definitions)
    title, about = str(shown.get("title") or path.rpartition(".")[2]), str(shown.get("description", ""))
    choices = tuple(map(str, schema.get("enum", ())))
    kind: Kind = "yaml"
    if choices and isinstance(value, str):
        kind = "choice"
    elif isinstance(value, bool):
        kind = "switch"
    elif isinstance(value, int | float):
        kind = "integer" if schema.get("type") == "integer" else "number"
    elif isinstance(value, str):
        kind = "text"
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    may_be_empty = any(option.get("type") == "null" for option in shown.get("anyOf", ()))
    return Field(path, title, kind, text, about, is_set, choices if kind == "choice" else (), may_be_empty)


def _choice(schema: Mapping[str, Any], value: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of several that a value is for."""
    options = [_resolved(option, definitions) for option in schema.get("anyOf", schema.get("oneOf", ()))]
    if not options:
        return schema
    names = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}
    types = names.get(type(value), ("object",))
    for option in options:
        if option.get("type") in types and ("enum" not in option or value in option["enum"]):
            return option
    return {}


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref") or (schema["allOf"][0].get("$ref") if len(schema.get("allOf", ())) == 1 else None)
    if not reference:
        return schema
    return {
        **definitions.get(str(reference).rpartition("/")[2], {}),
        **{k: v for k, v in schema.items() if k != "$ref"},
    }
