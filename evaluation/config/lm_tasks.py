"""lm-eval's own tasks by name: the YAML file that defines one, and suggestions for an unknown name.

lm-eval reads 14,000 YAML files to know its names, which takes it seven seconds of a fast core, and a minute from a cold
disk. Here their names are read off the text once for each version of lm-eval, and kept in ~/.cache/stemma.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem
from infra.io.json import read_own_json

_NAME = re.compile(r"""^["']?(task|group)["']?:[ \t]*["']?([^\s"'#\[{]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_TAGS = re.compile(r"""^["']?tag["']?:[ \t]*(\S[^\n#]*)?((?:\n[ \t]*-[ \t]*[^\n]+)*)""", re.MULTILINE)
_INCLUDE = re.compile(r"""^include:[ \t]*["']?([^\s"'#]+)""", re.MULTILINE)
_MOST_INCLUDES = 8
_WORD = re.compile(r"""[^\s,\[\]"'-][^\s,\[\]"']*""")


OTHER_NAMES = {"winograd": "wsc273", "winograd_wsc": "wsc273", "triviaqa_sm": "triviaqa", "nq": "nq_open"}
"""Other common names of tasks, for which spelling does not suggest lm-eval's name."""


def tasks_dir() -> Path:
    """The folder of lm-eval's YAML files, found without importing lm-eval, which takes seconds."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("lm_eval is not installed")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def known_tasks() -> dict[str, str]:
    """Every name that lm-eval knows, with the file that defines it, relative to `tasks_dir`; "" for a tag."""
    files: dict[str, str] = _names()["files"]
    return files


def folders_of(name: str) -> set[str]:
    """Return the folders, relative to `tasks_dir`, with all that lm-eval knows by a name: the folder of the YAML of a
    task or group, and for a tag those of all tasks that have it."""
    file = known_tasks().get(name)
    folders = {str(Path(file).parent)} if file else set()
    return folders | set(_names()["folders of tags"].get(name, []))


@cache
def _names() -> dict[str, Any]:
    kept = Path.home() / ".cache" / "stemma" / f"lm_eval_names-{importlib.metadata.version('lm_eval')}.json"
    with contextlib.suppress(OSError, ValueError):
        names = read_own_json(kept)
        if isinstance(names, dict) and names.get("files") and "folders of tags" in names:
            return names
    names = _read_names(tasks_dir())
    with contextlib.suppress(OSError):  # a home that cannot be written to costs a second each time
        kept.parent.mkdir(parents=True, exist_ok=True)
        hidden = kept.with_name(f".{kept.name}.{os.getpid()}")
        hidden.write_text(json.dumps(names), encoding="utf8")
        hidden.replace(kept)
    return names


def nearest(name: str, more: tuple[str, ...] = ()) -> list[str]:
    """Up to three names of lm-eval's tasks, or of `more`, that look like this one, the nearest first."""
    names = [*more, *known_tasks()]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    # Letters alone put openbook_qa's openbookqa behind longer names that share more of them.
    plain = letters_and_digits(name)
    same = [candidate for candidate in names if letters_and_digits(candidate) == plain and candidate not in near]
    return [*same, *near][:3]


def unknown_name(name: str, more: tuple[str, ...] = ()) -> str:
    """Suggest known task names for a name that is unknown."""
    near = [OTHER_NAMES[name]] if name in OTHER_NAMES else nearest(name, more)
    return f"did you mean {' or '.join(near)}?" if near else "python -m lm_eval ls tasks lists them"


def unknown_tasks(names: Sequence[str], path: str) -> list[Problem]:
    """A problem for each name that lm-eval does not know, with the nearest that it does."""
    return [
        Problem("unknown_task", path, f"lm-eval has no task {name!r}", unknown_name(name))
        for name in names
        if name not in known_tasks()
    ]


def check_names(names: Sequence[str], path: str = "--tasks") -> None:
    """Raise ConfigError `unknown_task` with all of `unknown_tasks`."""
    if problems := unknown_tasks(names, path):
        raise ConfigError(*problems)


def dataset_of(name: str) -> tuple[Path, str, str] | None:
    """Return (its YAML, the dataset that it reads, the dataset's configuration or "") of a task, read off the text;
    None for a group, a tag, and a task that makes its own data. What a YAML does not say itself it has from the one
    that it includes.
    """
    source = known_tasks().get(name)
    if not source:
        return None
    path = yaml_path = tasks_dir() / source
    config = ""
    for _ in range(_MOST_INCLUDES):
        text = yaml_path.read_text(encoding="utf8", errors="replace") if yaml_path.is_file() else ""
        if re.search(r"^group:", text, re.MULTILINE):
            return None
        name_match = re.search(r"^dataset_name:[ \t]*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
        config = config or (name_match[1] if name_match else "")
        if dataset := re.search(r"^dataset_path:[ \t]*[\"']?([^\s\"'#]+)", text, re.MULTILINE):
            return path, dataset[1], "" if config in ("null", "~") else config
        include = _INCLUDE.search(text)
        if include is None:
            return None
        yaml_path = yaml_path.parent / include[1]
    return None


def letters_and_digits(name: str) -> str:
    """Return a name in lower case without punctuation, as `arceasy` for `ARC-Easy`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_names(folder: Path) -> dict[str, Any]:
    files = sorted(
        (Path(directory) / name for directory, _, names in os.walk(folder) for name in names if name.endswith(".yaml")),
        key=lambda path: path.as_posix(),  # of two files with one name lm-eval takes the first in this order
    )
    paths_by_task: dict[str, str] = {}
    folders_by_tag: dict[str, set[str]] = {}

    @cache
    def text_of(path: Path) -> str:
        return path.read_text(encoding="utf8", errors="replace") if path.is_file() else ""

    def tags_of(path: Path, depth: int = 0) -> list[str]:
        """The tags that a file has itself, or else from the one that it includes."""
        if match := _TAGS.search(text_of(path)):
            return _WORD.findall((match[1] or "") + (match[2] or ""))
        include = _INCLUDE.search(text_of(path))
        return tags_of(path.parent / include[1], depth + 1) if include and depth < _MOST_INCLUDES else []

    for path in files:
        relative = path.relative_to(folder)
        for match in _NAME.finditer(text_of(path)):
            paths_by_task.setdefault(match[2], relative.as_posix())
        for tag in tags_of(path):
            folders_by_tag.setdefault(tag, set()).add(str(relative.parent))
    return {
        "files": {**dict.fromkeys(folders_by_tag, ""), **paths_by_task},
        "folders of tags": {tag: sorted(folders) for tag, folders in folders_by_tag.items()},
    }
