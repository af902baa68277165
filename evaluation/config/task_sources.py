"""Files that a benchmark reads."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.io.contained import check_inside, homes, names_outside
from infra.io.sources import expand, files_below, glob_root
from infra.io.yaml import BadYaml, Function, read_plain, read_text

DATA_DIR = Path(__file__).parents[1] / "data"
MIRRORED = frozenset({".parquet", ".jsonl", ".csv", ".arrow", ".gz"})
"""Suffixes of the files of a mirror that contain questions."""
MIRROR_RECORD = "mirror.json"
"""File that `stemma mirror` writes next to each dataset."""


def lm_eval_files(path: Path) -> tuple[Path, ...]:
    """Return the files an lm-eval task reads: its YAML files, the Python they include, and local data files, sorted.

    Raises:
        StageError: `unsafe_file` for a YAML that names data, another YAML or Python outside of the folder, and for a
            link that leads there; `bad_index` for a YAML whose aliases or nesting have no end.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        return (path,)
    below = files_below(folder) if path.is_dir() else (child for child in folder.iterdir() if child.is_file())
    files = {child for child in below if child.suffix in {".yaml", ".yml", ".py"}}
    check_inside(files, homes(folder), str(folder))
    for config in sorted(child for child in files if child.suffix != ".py"):
        files.update(expand(str(file) for file in _named_files(folder, config)))
    return tuple(sorted(files))


def _named_files(folder: Path, config: Path) -> Iterator[Path]:
    """The data files that a YAML names. Raises StageError for a file, of whatever kind, that is not in the folder."""
    content = _read(config)
    if not isinstance(content, dict):
        return
    allowed_roots = homes(folder)

    def resolve_within(name: str, key: str) -> Path:
        path = config.parent / name
        real = Path(os.path.realpath(path if not glob.has_magic(name) else glob_root(path)))
        if "\0" in name or name.startswith("~") or not any(real.is_relative_to(home) for home in allowed_roots):
            message = f"names {name[:80]}, which is not in {folder}"
            fix = "move it there, or set path to a folder that contains both"
            raise stage_error("unsafe_file", f"{config}: {key}", message, fix)
        return path

    include = content.get("include")
    for name in include if isinstance(include, list) else [include]:
        if isinstance(name, str):
            resolve_within(name, "include")
    dataset = content.get("dataset_path")
    if isinstance(dataset, str) and names_outside(dataset):
        resolve_within(dataset, "dataset_path")
    for key, function in _functions(content):
        resolve_within(f"{function.rpartition('.')[0].replace('.', '/')}.py", key)
    kwargs = content.get("dataset_kwargs")
    for option in ("data_files", "data_dir"):
        option_value = kwargs.get(option) if isinstance(kwargs, dict) else None
        values = option_value.values() if isinstance(option_value, dict) else [option_value]
        for value in values:
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    path = resolve_within(name, f"dataset_kwargs.{option}")
                    yield from [path] if option == "data_files" else []


def _functions(content: Any) -> Iterator[tuple[str, str]]:
    """Every key whose value is a function in Python beside the YAML, `!function utils.score`, with that name."""
    waiting = [("", content)]
    while waiting:
        key, node = waiting.pop()
        if isinstance(node, Function):
            yield key, node.name
        elif isinstance(node, dict):
            waiting += [(str(name), value) for name, value in node.items()]
        elif isinstance(node, list):
            waiting += [(key, value) for value in node]


def mirrored_files(mirror: Path, task: str) -> tuple[Path, ...]:
    """The files that a task of lm-eval's own reads from a mirror, and its definition; of a group all of the mirror.

    Where there are none, or `stemma mirror` has put another configuration of the dataset there, where they would be.
    """
    from evaluation.config.lm_tasks import dataset_of

    if (source := dataset_of(task)) is None:
        # A folder of the mirror may be a link into the hub's cache; `evaluation.mirror.local` checks each before it is
        # read.
        return tuple(_data_below(mirror, follow_links=True)) or (mirror,)
    definition, dataset, config = source
    folder = mirror / dataset
    if config and (folder / MIRROR_RECORD).is_file() and not (folder / config).is_dir():
        return definition, folder / config
    return definition, *(_data_below(folder) or [folder])


def _data_below(folder: Path, follow_links: bool = False) -> list[Path]:
    return sorted(path for path in files_below(folder, follow_links) if path.suffix in MIRRORED)


def how_to_mirror(task: str, mirror: Path | None) -> str:
    """The command that puts the data of a task of lm-eval's own where they are looked for."""
    return f"stemma mirror {task} FROM --mirror {mirror or 'DIR'}, where FROM is a file or folder with its questions"


def _read(config: Path) -> Any:
    """The content of a YAML. Raises StageError `bad_index` for one that cannot be read: lm-eval could read other names
    in it than are checked here."""
    try:
        return read_plain(read_text(config), tags=True)
    except (BadYaml, UnicodeDecodeError) as error:
        line = f":{error.line}" if isinstance(error, BadYaml) and error.line else ""
        message = f"expected a task of lm-eval: {error}"
        raise stage_error("bad_index", f"{config}{line}", message, "correct it, or move it elsewhere") from None
