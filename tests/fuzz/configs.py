"""Targets: configs, `--set`, records of sweeps, and the arguments of every command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from flows.config.graph import graph
from flows.config.read import load
from flows.sweeps.definition import Wishes, define
from flows.sweeps.space import read_ablation, read_space
from infra.store.store import Store
from tests.fuzz import damage
from tests.fuzz.command import call
from tests.fuzz.harness import REPOSITORY, Target
from tests.support.pipelines import full_config

CONFIGS = ("quickstart.yaml", "small.yaml", "gpt-125m.yaml", "alternatives.yaml", "corpus.yaml")
STEPS = {
    "sft_2": {"uses": "sft", "inputs": {"model": "pretrain", "tokenizer": "tokenizer"}, "seed": 3},
    "longer": {"uses": "pretrain", "continues": {"step": "pretrain", "at": "last"}, "duration": "60 batches"},
    "judge": {"uses": "benchmarks", "inputs": {"model": "sft_2"}},
    "mixed": {"uses": "mix", "inputs": {"documents": "clean"}},
}
LAUNCH = {
    "device": "cpu", "threads": 1, "precision": "fp32", "ranks": 2, "retries": 1,
    "kubernetes": {"namespace": "n"}, "slurm": {"partition": "p"},
}  # fmt: skip


@cache
def whole_configs() -> list[dict[str, Any]]:
    read = [yaml.safe_load((REPOSITORY / "configs" / name).read_text()) for name in CONFIGS]
    full = full_config()
    return [full, {**full, "steps": STEPS}, {**full, "launch": LAUNCH, "lineage": {}}, *read]


@cache
def schema() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((REPOSITORY / "configs" / "schema.json").read_text())
    return content


def _resolved(part: Any) -> Any:
    while isinstance(part, dict) and "$ref" in part:
        part = schema()["$defs"][part["$ref"].rpartition("/")[2]]
    return part


@composite
def of_schema(draw: DrawFn, part: Any, depth: int = 0) -> Any:
    """A value that the schema allows, or nearly."""
    part = _resolved(part)
    if not isinstance(part, dict) or depth > 6 or not draw(st.integers(0, 14)):
        return draw(damage.wild(damage.YAML_RAW))
    for key in ("anyOf", "oneOf"):
        if key in part:
            return draw(of_schema(draw(st.sampled_from(part[key])), depth))
    if "const" in part:
        return part["const"]
    if "enum" in part:
        return draw(st.sampled_from(part["enum"]))
    match part.get("type"):
        case "object":
            properties = part.get("properties", {})
            names = list(part.get("required", ()))
            if properties:
                names += draw(st.lists(st.sampled_from(sorted(properties)), max_size=4, unique=True))
            value = {name: draw(of_schema(properties.get(name), depth + 1)) for name in dict.fromkeys(names)}
            if isinstance(part.get("additionalProperties"), dict) and draw(st.booleans()):
                value[draw(damage.texts())] = draw(of_schema(part["additionalProperties"], depth + 1))
            return value
        case "array":
            items = part.get("items", part.get("prefixItems", [{}])[0] if part.get("prefixItems") else {})
            return [draw(of_schema(items, depth + 1)) for _ in range(draw(st.integers(0, 2)))]
        case "string":
            return draw(
                st.sampled_from(
                    ("x", "30 batches", "1ep", "2 tokens", "a.b", "text.jsonl", "sft", "pretrain", "1e-3", "cosine")
                )
                | damage.texts()
            )
        case "integer":
            return draw(st.sampled_from((0, 1, 2, 8, 64, 1024, -1, 10**9, 2**40)) | st.integers())
        case "number":
            return draw(st.sampled_from((0, 1, 0.5, 1e-3, -1.0, 1e300)) | damage.numbers())
        case "boolean":
            return draw(st.booleans())
        case "null":
            return None
    return draw(damage.wild(damage.YAML_RAW))


@composite
def configs(draw: DrawFn) -> bytes:
    """A config: one of the project's, with edits, with sections as the schema has them, or with damaged bytes."""
    value = draw(damage.edited(whole_configs(), 3, damage.YAML_RAW))
    if not isinstance(value, dict):
        return draw(damage.damaged(damage.encoded(damage.as_yaml(value) + "\n"), 1))
    sections = schema()["properties"]
    for name in draw(st.lists(st.sampled_from(sorted(sections)), max_size=2, unique=True)):
        value[name] = draw(of_schema(sections[name]))
    text = damage.as_yaml(value) if draw(st.integers(0, 5)) else damage.as_json(value)
    content = damage.encoded(text + "\n")
    return draw(damage.damaged(draw(damage.recoded(content)), 1)) if not draw(st.integers(0, 3)) else content


def _folder(folder: Path) -> Path:
    if not (folder / "text.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.jsonl").write_text('{"text": "a"}\n')
        (folder / "base.yaml").write_text(yaml.safe_dump(full_config(), sort_keys=False))
        Store(folder / "store")
    return folder


def check_config(content: bytes, folder: Path) -> None:
    folder = _folder(folder)
    (folder / "config.yaml").write_bytes(content)
    graph(load(folder / "config.yaml", {}, lambda: folder / "store"))


def check_check(content: bytes, folder: Path) -> None:
    folder = _folder(folder)
    (folder / "config.yaml").write_bytes(content)
    call(["check", "config.yaml", "--root", "store", "--json", "--debug"], folder)


@cache
def _keys() -> tuple[str, ...]:
    """Dotted keys of the schema."""

    def below(part: Any, prefix: str, depth: int) -> Iterator[str]:
        part = _resolved(part)
        if not isinstance(part, dict) or depth > 4:
            return
        for choice in (*part.get("anyOf", ()), *part.get("oneOf", ())):
            yield from below(choice, prefix, depth)
        for name, inner in part.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from below(inner, f"{prefix}{name}.", depth + 1)
        if part.get("type") == "array":
            yield from below(part.get("items", {}), f"{prefix}0.", depth + 1)

    return tuple(sorted(set(below(schema(), "", 0))))


@composite
def keys(draw: DrawFn) -> str:
    key = draw(st.sampled_from(_keys()))
    if not draw(st.integers(0, 4)):
        parts = key.split(".")
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] = draw(
            st.sampled_from(("", "0", "-1", "999999999999", "²", "x", "sft_2", "1" * 5_000)) | damage.texts()
        )
        key = ".".join(parts)
    return key


@composite
def yaml_texts(draw: DrawFn) -> str:
    """A value as a person gives it on the command line."""
    match draw(st.integers(0, 3)):
        case 0:
            return draw(damage.texts())
        case 1:
            return damage.as_json(draw(damage.wild(damage.YAML_RAW)))
        case 2:
            return draw(
                st.sampled_from(
                    (
                        "1",
                        "0",
                        "-1",
                        "0.5",
                        "null",
                        "true",
                        "[]",
                        "{}",
                        "30 batches",
                        "1ep",
                        "x",
                        "[1, 2]",
                        "{a: 1}",
                        "from sweep s",
                        "1e-3",
                        "1..3",
                        "log 1..3",
                        "1,2",
                        "a,b",
                    )
                )
            )
    return damage.as_json(draw(of_schema(draw(st.sampled_from(list(schema()["properties"].values()))))))


def check_set(settings: list[tuple[str, str]], folder: Path) -> None:
    folder = _folder(folder)
    graph(load(folder / "base.yaml", dict(settings), lambda: folder / "store"))


SWEEP = {
    "sweep": "s", "measure": "pretrain.validation_loss", "maximise": False,
    "runs": [
        {"settings": {"pretrain.optimizer.learning_rate": rate, "pretrain.global_batch_tokens": 1024}, "value": value,
         "parameters": size, "tokens": 10 * size}
        for size in (100, 200, 400) for rate, value in ((1e-3, 3.0), (2e-3, 2.5), (4e-3, 2.9))
    ],
}  # fmt: skip


@composite
def sweeps(draw: DrawFn) -> tuple[bytes, str]:
    key = draw(st.sampled_from(("pretrain.optimizer.learning_rate", "pretrain.global_batch_tokens", "sft.seed")))
    return draw(damage.json_files([SWEEP], 3)), key


def check_sweep(value: tuple[bytes, str], folder: Path) -> None:
    from flows.config.carried import FILE

    folder, (content, key) = _folder(folder), value
    path = folder / "store" / "sweeps" / "s" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    graph(load(folder / "base.yaml", {key: "from sweep s"}, lambda: folder / "store"))


SPACES = (
    "1,2,3",
    "1e-4..1e-2",
    "log 1e-4..1e-2",
    "1..8 step 2",
    "a,b",
    "[1,2],[3]",
    "true,false",
    "1..",
    "..",
    ",",
    "1,,2",
)


@composite
def spaces(draw: DrawFn) -> tuple[list[str], list[str], int]:
    def space() -> str:
        text = draw(st.sampled_from(SPACES) | yaml_texts())
        equals = draw(st.sampled_from(("=", "=", "=", "", "==")))
        return draw(keys()) + equals + text

    ablations = [
        f"{draw(st.sampled_from(('a', 'b', '', 'base')) | damage.texts())}: {draw(keys())}={draw(yaml_texts())}"
        for _ in range(draw(st.integers(0, 2)))
    ]
    return [space() for _ in range(draw(st.integers(0, 2)))], ablations, draw(st.sampled_from((1, 2)))


def check_space(value: tuple[list[str], list[str], int], folder: Path) -> None:
    folder, (texts, ablations, seeds) = _folder(folder), value
    space = read_space(tuple(texts))
    named = dict(map(read_ablation, ablations))
    size = 1
    for values in space.values():
        size *= len(getattr(values, "values", ())) or 1
    if size <= 20:
        define(Wishes(folder / "base.yaml", {}, space, named, seeds, root=lambda: folder / "store"))


SKIPPED = frozenset({"completion"})
FILES = {
    "config.yaml": None,
    "broken.yaml": b"a: [",
    "data.jsonl": b'{"text": "a"}\n{"prompt": "q", "response": "r"}\n',
    "data.csv": b"text,a\nx,1\n",
    "empty": b"",
    "model/config.json": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
    "model/model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "odd \xe9 \n.txt": b"x",
}


@cache
def _commands() -> tuple[tuple[tuple[str, ...], click.Command], ...]:
    from cli.commands import COMMANDS, stemma

    commands: list[tuple[tuple[str, ...], click.Command]] = []
    context = click.Context(stemma)
    for name in COMMANDS:
        command = stemma.get_command(context, name)
        assert command is not None
        if name in SKIPPED:
            continue
        if isinstance(command, click.Group):
            commands += [((name, inner), part) for inner, part in command.commands.items()]
        else:
            commands.append(((name,), command))
    return tuple(commands)


WORDS = (
    "config.yaml", "store", "data.jsonl", "data.csv", "model", ".", "/", "/dev/null", "missing", "empty",
    "broken.yaml", "sft", "pretrain", "sft/0",
    "pretrain/ffff", "runs", "models", "1", "0", "-1", "1e9", "60s", "2h", "0 3 * * *", "a=b", "sft.seed=3",
    "steps.x.uses=sft", "http://127.0.0.1:1",
    "s3://b/k", "report", "llama-nano", "gpt-125m", "1B", "100 tokens", "8xh100", "2026-01-01", "{}", '{"a": 1}',
    "tree", "json", "bash",
)  # fmt: skip


@composite
def values(draw: DrawFn, kind: click.ParamType[Any]) -> str:
    """A value for an option or argument of this type."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damage.texts()).replace("\0", "")
    if isinstance(kind, click.Choice):
        return str(draw(st.sampled_from(list(kind.choices))))
    if isinstance(kind, click.IntRange | click.FloatRange) or kind in (click.INT, click.FLOAT):
        return str(
            draw(st.sampled_from((0, 1, 2, 3, 10, 1000, -1, 2**31, 10**20, 0.5, "nan", "inf", "1e400", "x", "1_0")))
        )
    return draw(st.sampled_from(WORDS))


@composite
def command_lines(draw: DrawFn) -> list[str]:
    names, command = draw(st.sampled_from(_commands()))
    words: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            count = draw(st.integers(0, 2)) if parameter.nargs != 1 else int(parameter.required or draw(st.booleans()))
            words += [draw(values(parameter.type)) for _ in range(count)]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    options = [option for option in options if not {"--follow", "--root", "--json", "--debug"} & set(option.opts)]
    if options:
        for option in draw(st.lists(st.sampled_from(options), max_size=4)):
            words.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
            if not option.is_flag:
                words += [draw(values(option.type)) for _ in range(option.nargs)]
    if not draw(st.integers(0, 9)):
        words.insert(draw(st.integers(0, len(words))), draw(damage.texts()).replace("\0", ""))
    if draw(st.integers(0, 9)):
        words += [
            "--root",
            draw(st.sampled_from(("store", "store", "store", "new", "empty", "/proc", "s3://", "a\nb"))),
        ]
    return [*names, *words, *(["--json"] if draw(st.booleans()) else [])]


def check_command(words: list[str], folder: Path) -> None:
    folder = _folder(folder)
    for name, content in FILES.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if content is not None else (folder / "base.yaml").read_bytes())
    has_debug = any(word == "--debug" for word in words) or words[0] in ("pause-schedule", "resume-schedule")
    call([*words, *([] if has_debug else ["--debug"])], folder)


TARGETS = (
    Target("config", configs, check_config),
    Target("config-check", configs, check_check),
    Target("set", lambda: st.lists(st.tuples(keys(), yaml_texts()), min_size=1, max_size=3), check_set),
    Target("sweep-record", sweeps, check_sweep),
    Target("sweep-space", spaces, check_space),
    Target("command", command_lines, check_command),
)
