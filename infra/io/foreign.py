"""Dangers in folders from outside: files that could run code, or lead elsewhere, when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.io.contained import bad_link, homes, names_outside
from infra.io.json import BadJson, read_own_json

CODE_KEYS = ("auto_map", "custom_pipelines")
"""Keys under which a model's config names classes in Python files next to it."""
CONVERT = (
    "where you trust it, load it with transformers and save its weights and tokenizer as an architecture that "
    "transformers ships (llama, qwen3, …), without its Python files"
)
ADAPTERS = "adapter_config.json"
"""PEFT's file. transformers loads a folder with it as the model that it names, wherever that is, with adapters."""
MERGE = (
    "merge them with PEFT, and give that folder: PeftModel.from_pretrained(base model, folder).merge_and_unload()"
    ".save_pretrained(new folder), with the tokenizer's files; adapters of this project are already merged in the "
    "model that they were exported from"
)
WRITES_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of transformers' classes that write text."""
UNOPENED = ("name_or_path", "_name_or_path", "special_tokens_map_file")
"""Former locations of a model, as recorded by save_pretrained: they are never opened."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz", ".npy")
"""Formats that run code when they are read, or may."""


@dataclass(frozen=True)
class Danger:
    """code: `foreign_code` for a model's own code, `adapter` for adapters, else `unsafe_file`. message: what is wrong.
    fix: what to do."""

    path: Path
    message: str
    code: str = "unsafe_file"
    fix: str = ""

    @property
    def runs_code(self) -> bool:
        return self.code == "foreign_code"


def dangers(folder: Path) -> Iterator[Danger]:
    """Yield the dangers: pickles, a model's own code, paths that leave the folder, and entries that are not files.

    Links, files that an index names, and files that a model's or tokenizer's config names may leave the folder.

    Links into the blobs of the Hugging Face cache that the folder itself belongs to are as good as files.
    """
    allowed_roots = homes(folder)
    for directory, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(directory, name)
            if path.is_symlink():
                if message := bad_link(path, allowed_roots):
                    yield Danger(path, message)
                    continue
            elif not path.is_file() and not path.is_dir():
                yield Danger(path, "neither a file nor a folder")
                continue
            if path.suffix.lower() in PICKLES:
                message = "a pickle can run code when it is read; take it out, weights belong into *.safetensors"
                yield Danger(path, message)
            elif name.endswith("index.json"):
                yield from (Danger(path, message) for message in _bad_names(path))
            elif name.endswith("config.json"):
                yield from _bad_settings(path)


def check_model(folder: Path, where: str = "") -> None:
    """Check a model's or tokenizer's folder before a library reads it; pickles next to safetensors are never opened.

    Args:
        where: the dotted key that names the folder.

    Raises StageError: `foreign_code` for a folder that contains code, `unsafe_file` for paths that leave it, `adapter`
    for a folder of adapters, which `stemma export --adapters` writes.
    """
    for danger in dangers(folder):
        if danger.path.suffix.lower() not in PICKLES:
            message = f"{danger.path.name} {danger.message}" if danger.runs_code else f"{danger.path}: {danger.message}"
            raise stage_error(danger.code, where or str(danger.path), message, danger.fix)


def _bad_names(index: Path) -> Iterator[str]:
    """Yield files outside the folder that an index of weights or shards names."""
    data, problems = _read(index)
    yield from problems
    for name in _named_files(data):
        if names_outside(str(name)):
            yield f"names {name}, which is outside of the folder"


def _bad_settings(config: Path) -> Iterator[Danger]:
    """Code that a model's or tokenizer's config names, and files that it names and that lie elsewhere."""
    data, problems = _read(config)
    yield from (Danger(config, problem) for problem in problems)
    if config.name == ADAPTERS:
        base = data.get("base_model_name_or_path") if isinstance(data, dict) else None
        message = f"the folder contains adapters of {_shortened(base) if base else 'a model'}, not a model"
        yield Danger(config, message, "adapter", MERGE)
        return
    for key, value in _settings(data):
        kernel = key.endswith("attn_implementation") and "/" in str(value)
        if value and (key in CODE_KEYS or kernel):
            told_code = f"names code of its own under {key} ({_shortened(value)}), which is never run here"
            yield Danger(config, told_code, "foreign_code", CONVERT)
        elif key not in UNOPENED and _is_file_key(key):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and names_outside(name):
                    yield Danger(config, f"names {name[:80]} under {key}, which is outside of the folder")


def _is_file_key(key: str) -> bool:
    """Return True for keys of files: `vocab_file`, `tokenizer_file`, `fast_tokenizer_files`, `source_spm`, … are
    opened, from wherever they are.
    """
    return key in ("vocab", "merges") or key.rpartition("_")[2] in ("file", "files", "spm", "path", "dir", "folder")


def _read(path: Path) -> tuple[Any, list[str]]:
    """The JSON in a file as the libraries that open it read it, and why it cannot be read."""
    try:
        return read_own_json(path), []
    except BadJson as error:
        return None, [f"cannot be read: {error}"]


def _settings(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth."""
    waiting = [data]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from node.items()
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _shortened(value: Any) -> str:
    return json.dumps(value)[:80]


def _named_files(data: Any) -> Iterator[Any]:
    """The values of `weight_map` (safetensors) and of every `basename` (MDS)."""
    for key, value in _settings(data):
        if key == "weight_map" and isinstance(value, dict):
            yield from map(str, value.values())
        elif key == "basename":
            yield value
