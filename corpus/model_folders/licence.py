"""Licence of a model folder, carried along to the models that are made from it.

It is in aux/licence/ of an artifact: the files, unchanged, and `licence.json` with what the folder's model card states.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

from infra.io.json import read_own_json
from infra.io.yaml import BadYaml, read_plain
from infra.store.layout import AUX

FOLDER = f"{AUX}/licence"
STATED = "licence.json"
_FILES = ("licen[cs]e*", "copying*", "notice*", "use_policy*")
_KEYS = ("license", "license_name", "license_link")
_MOST_BYTES = 1_000_000


def keep_licence(source: Path, out_dir: Path) -> list[str]:
    """Copy the licence of a downloaded folder, or of an artifact, to an artifact; return the names of its files."""
    folder = out_dir / FOLDER
    kept = carry_licence(source, out_dir)
    for path in sorted(source.iterdir()):
        if any(fnmatch(path.name.lower(), pattern) for pattern in _FILES) and _is_text(path, source):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)
            kept.append(path.name)
    if stated := _stated(source):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATED).write_text(json.dumps(stated), encoding="utf8")
    return kept


def carry_licence(source: Path, out_dir: Path) -> list[str]:
    """Copy the licence of an artifact to another one; return the names of its files."""
    if not (source / FOLDER).is_dir():
        return []
    shutil.copytree(source / FOLDER, out_dir / FOLDER, dirs_exist_ok=True)
    return [path.name for path in licence_files(source)]


def licence_files(folder: Path) -> list[Path]:
    """Return the licence's files of an artifact."""
    return [path for path in sorted((folder / FOLDER).glob("*")) if path.name != STATED]


def stated_licence(folder: Path) -> dict[str, str]:
    """Return what states an artifact's licence in model cards of the hub: license, license_name, license_link."""
    path = folder / FOLDER / STATED
    return read_own_json(path) if path.is_file() else {}


def _stated(source: Path) -> dict[str, str]:
    card = source / "README.md"
    if not _is_text(card, source):
        return {}
    start, mark, rest = card.read_text(encoding="utf8", errors="replace").partition("---\n")
    if start.strip() or not mark:
        return {}
    try:
        front = read_plain(rest.partition("\n---")[0])
    except BadYaml:
        return {}
    return {key: front[key] for key in _KEYS if isinstance(front.get(key), str)} if isinstance(front, dict) else {}


def _is_text(path: Path, source: Path) -> bool:
    is_inside = path.resolve().is_relative_to(source.resolve())
    return is_inside and path.is_file() and path.stat().st_size <= _MOST_BYTES
