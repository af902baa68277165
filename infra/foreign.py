"""Folders from outside: what in them could run code, or lead somewhere else, when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz", ".npy")
"""Formats that run code when they are read, or may."""


def dangers(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, what is wrong) for pickles, links and indexes that lead out of the folder, and files that are none.

    Links into the blobs of the Hugging Face cache that the folder itself belongs to are as good as files.
    """
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent)
    for place, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(place, name)
            if path.is_symlink():
                if told := _bad_link(path, homes):
                    yield path, told
                    continue
            elif not path.is_file() and not path.is_dir():
                yield path, "neither a file nor a folder"
                continue
            if path.suffix.lower() in PICKLES:
                yield path, "a pickle can run code when it is read; take it out, weights belong into *.safetensors"
            elif name.endswith("index.json"):
                yield from ((path, told) for told in _bad_names(path))


def _bad_link(path: Path, homes: list[Path]) -> str:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return f"a link to {os.readlink(path)}, which is not there"
    if any(target.is_relative_to(home) for home in homes):
        return ""
    return f"a link that leads out of the folder, to {os.readlink(path)}; cp -rL copies what links name"


def _bad_names(index: Path) -> Iterator[str]:
    """Files that an index of weights or shards names and that lie elsewhere."""
    try:
        data = json.loads(index.read_text(encoding="utf8"))
    except ValueError:
        return  # whoever reads it says so
    for name in _named(data):
        path = PurePosixPath(str(name))
        if path.is_absolute() or ".." in path.parts or "\\" in str(name):
            yield f"names {name}, which lies outside of the folder"


def _named(data: Any) -> Iterator[Any]:
    """The values of `weight_map` (safetensors) and of every `basename` (MDS)."""
    if isinstance(data, dict):
        weights = data.get("weight_map")
        yield from set(weights.values()) if isinstance(weights, dict) else ()
        yield from [data["basename"]] if "basename" in data else ()
        for value in data.values():
            yield from _named(value)
    elif isinstance(data, list):
        for item in data:
            yield from _named(item)
