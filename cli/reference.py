"""Reference pages of the documentation: every stage with its keys, and every command with its options.

python -m cli.reference FOLDER    writes Markdown pages into FOLDER, which `make docs` does before each build

The pages come from the config classes and from the commands themselves, so they cannot fall behind the code.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from cli.commands import COMMANDS, stemma
from flows.config.read import PipelineConfig
from infra.config import MEASURED_ONLY, OUTSIDE_IDENTITY
from infra.launch.config import LaunchConfig
from infra.store.measurements import MEASURE
from tasks.stage import Stage
from tasks.stages import OUR_STAGES, SECTIONS

Schema = Mapping[str, Any]


def pages() -> dict[str, str]:
    """Text of every page, by its path below the folder."""
    made = {"stages/index.md": _stages_page(), "commands/index.md": _commands_page()}
    made["stages/pipeline.md"] = _pipeline_page()
    made["stages/launch.md"] = _launch_page()
    for stage in OUR_STAGES.values():
        made[f"stages/{stage.name}.md"] = _stage_page(stage)
    context = click.Context(stemma, info_name="stemma")
    for name in COMMANDS:
        command = stemma.get_command(context, name)
        assert command is not None
        lines = list(_command_lines(command, click.Context(command, info_name=name, parent=context), level=1))
        made[f"commands/{name}.md"] = _text(lines)
    return made


def _stages_page() -> str:
    return _text(
        [
            "# Config keys",
            "",
            "A pipeline is one YAML file: a few keys at its top, a section for each stage, and `launch` for machines.",
            "These pages are generated from the config classes. [Stages](/docs/stages.md) describes what each stage is",
            "for, and how to add one.",
            "",
            *_toctree(["pipeline", "launch", *OUR_STAGES]),
        ]
    )


def _commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "These pages are generated from the commands. `stemma COMMAND --help` prints the same.",
        "",
    ]
    for name, (_, about) in COMMANDS.items():
        lines += [f"[`stemma {name}`]({name}.md)", f": {_escaped(about)}", ""]
    return _text([*lines, *_toctree(list(COMMANDS), hidden=True)])


def _pipeline_page() -> str:
    schema = PipelineConfig.model_json_schema(by_alias=True)
    heading = {key: value for key, value in schema["properties"].items() if key not in OUR_STAGES and key != "launch"}
    lines = ["# The top of the file", "", _prose(PipelineConfig.__doc__ or ""), ""]
    for key, value in heading.items():
        lines += _key_lines(key, value, schema, required=key in schema.get("required", ()))
    return _text(lines)


def _launch_page() -> str:
    about = "Where and how to run. This is the only section that describes machines."
    return _text(["# launch", "", about, "", *_config_lines("launch", LaunchConfig.model_json_schema(by_alias=True))])


def _stage_page(stage: Stage) -> str:
    lines = [f"# {stage.name}", "", _prose(stage.about), "", f"Makes\n: {stage.makes}, version {stage.version}", ""]
    if stage.inputs or stage.more:
        lines += ["Inputs"]
        for source in stage.inputs:
            kinds = " or ".join(source.takes)
            lines += [f": `{source.name}`: {kinds}{', optional' if source.optional else ''}", ""]
        if stage.more:
            lines += [f": any other name: {', '.join(stage.more)}", ""]
    if stage.name not in SECTIONS and not stage.name.startswith(MEASURE):
        lines += [f"Used under `steps`, by `uses: {stage.name}`; it has no section.", ""]
    if stage.name.startswith(MEASURE):
        trained = stage.name.removeprefix(MEASURE)
        lines += [f"It runs after each training by [`{trained}`]({trained}.md), whose keys it reads.", ""]
        return _text(lines)
    return _text([*lines, *_config_lines(stage.name, stage.config.model_json_schema(by_alias=True))])


def _config_lines(path: str, schema: Schema) -> Iterator[str]:
    """The keys of a config, then those of each group inside it, each under a separate heading."""
    yield from ["## Keys", ""]
    yield from _keys(path, schema, schema)
    shown = set()
    waiting = list(_groups(path, schema, schema))
    while waiting:
        key, name = waiting.pop(0)
        group = schema["$defs"][name]
        if (key, name) in shown or "properties" not in group:
            continue
        shown.add((key, name))
        kind = _kind(group)
        yield from [f"## {key}{f', {kind}' if kind else ''}", ""]
        if group.get("description"):
            yield from [_prose(group["description"]), ""]
        earlier = next((other for other, known in sorted(shown) if known == name and other != key), None)
        if earlier is not None:
            yield from [f"Its keys are those of `{earlier}`.", ""]
            continue
        yield from _keys(key, group, schema)
        waiting += _groups(key, group, schema)


def _kind(group: Schema) -> str:
    """The tag, such as `kind: files`, of one of several groups that a key may hold."""
    for name in ("kind", "uses"):
        value = group["properties"].get(name, {}).get("const")
        if value:
            return f"{name}: {value}"
    return ""


def _keys(path: str, group: Schema, root: Schema) -> Iterator[str]:
    if not group.get("properties"):
        yield from ["It has no keys.", ""]
    for key, value in group.get("properties", {}).items():
        yield from _key_lines(f"{path}.{key}", value, root, required=key in group.get("required", ()))


def _key_lines(path: str, value: Schema, root: Schema, required: bool) -> Iterator[str]:
    """A definition: the key, then its type and default, then its description."""
    facts = [_type(value, root)]
    if required:
        facts.append("required")
    elif "default" in value:
        facts.append(f"default {_code(_shown(value['default']))}")
    if value.get(OUTSIDE_IDENTITY):
        facts.append("not part of the identity")
    if value.get(MEASURED_ONLY):
        facts.append("part of the identity of the measurement alone")
    yield f"`{path}`"
    yield f": {'; '.join(facts)}"
    if value.get("description"):
        yield from ["", f"  {_prose(value['description'])}"]
    yield ""


def _groups(path: str, group: Schema, root: Schema) -> Iterator[tuple[str, str]]:
    """(dotted key, name of its class) of each group that a key of this one may hold."""
    for key, value in group.get("properties", {}).items():
        for suffix, name in _references(value):
            if "properties" in root["$defs"][name]:
                yield f"{path}.{key}{suffix}", name


def _references(value: Schema, suffix: str = "") -> Iterator[tuple[str, str]]:
    if _name(value):
        yield suffix, _name(value)
    for union in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for option in value.get(union, ()):
            yield from _references(option, suffix)
    if isinstance(value.get("items"), Mapping):
        yield from _references(value["items"], f"{suffix}.N")
    if isinstance(value.get("additionalProperties"), Mapping):
        yield from _references(value["additionalProperties"], f"{suffix}.NAME")


def _name(value: Schema) -> str:
    return str(value.get("$ref", "")).rpartition("/")[2]


_PLAIN = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "characters: at least",
    "maxLength": "characters: at most",
    "minItems": "items: at least",
    "maxItems": "items: at most",
}


def _type(value: Schema, root: Schema) -> str:
    if _name(value):
        group = root["$defs"][_name(value)]
        return "group" if "properties" in group else _type(group, root)
    if "const" in value:
        return _code(_shown(value["const"]))
    if "enum" in value:
        return "one of " + ", ".join(_code(_shown(option)) for option in value["enum"])
    for union in ("anyOf", "oneOf", "allOf"):
        if union in value:
            return " or ".join(dict.fromkeys(_type(option, root) for option in value[union]))
    kind = value.get("type")
    if kind == "array":
        inner = value.get("items")
        return f"list of {_type(inner, root)}".replace("list of group", "list of groups") if inner else "list"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"mapping of names to {_type(inner, root)}" if isinstance(inner, Mapping) else "mapping"
    bounds = [f"{word} {value[key]}" for key, word in _BOUNDS.items() if key in value]
    if "pattern" in value:
        bounds.append(f"matching {_code(value['pattern'])}")
    return ", ".join([_PLAIN.get(str(kind), "any value"), *bounds])


def _command_lines(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield from [f"{'#' * level} {context.command_path}", ""]
    yield from [*_help_lines(command.help or ""), ""]
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ["```text", usage, "```", ""]
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            yield from [f"`{record[0]}`", f": {_escaped(record[1]) or 'No description.'}", ""]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command_lines(inner, click.Context(inner, info_name=name, parent=context), level + 1)


def _help_lines(text: str) -> Iterator[str]:
    """Paragraphs as prose; those that click must not wrap, marked by a backspace, unchanged."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ["```text", paragraph.removeprefix("\b").strip("\n"), "```", ""]
        else:
            yield from [_prose(paragraph), ""]


def _toctree(names: list[str], hidden: bool = False) -> list[str]:
    return ["```{toctree}", ":hidden:" if hidden else ":maxdepth: 1", "", *names, "```", ""]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _prose(text: str) -> str:
    """Return a docstring as one paragraph of Markdown, with what would be markup escaped."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([*_<>\[\]|{}$\\])", r"\\\1", piece) for piece in pieces
    )


def _text(lines: list[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def write(folder: Path) -> None:
    """Write all pages into the folder, which holds nothing else afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in pages().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cli.reference FOLDER")
    write(Path(sys.argv[1]))
