"""Which files a benchmark reads."""

from __future__ import annotations

from pathlib import Path

from infra.sources import expand, files_below
from infra.yaml import BadYaml, read_plain, read_text

DATA_DIR = Path(__file__).parents[1] / "data"
MIRRORED = frozenset({".parquet", ".jsonl", ".csv", ".arrow", ".gz"})
"""How files of a mirror end that hold questions."""
MIRROR_RECORD = "mirror.json"
"""What `stemma mirror` puts beside each dataset."""


def lm_eval_files(path: Path) -> tuple[Path, ...]:
    """The files an lm-eval task reads: its YAML files, the Python they include, and local data files, sorted."""
    folder = path if path.is_dir() else path.parent
    pattern = "**/*" if path.is_dir() else "*"
    if not path.exists():
        return (path,)
    files = {child for child in folder.glob(pattern) if child.suffix in {".yaml", ".yml", ".py"} and child.is_file()}
    for config in sorted(child for child in files if child.suffix != ".py"):
        files.update(expand(str(config.parent / name) for name in _data_files(config)))
    return tuple(sorted(files))


def mirrored_files(mirror: Path, task: str) -> tuple[Path, ...]:
    """The files that a task of lm-eval's own reads from a mirror, and its definition; of a group all of the mirror.

    Where there are none, or `stemma mirror` has put another configuration of the dataset there, where they would be.
    """
    from evaluation.lm_tasks import dataset_of

    if (found := dataset_of(task)) is None:
        return tuple(_data_below(mirror)) or (mirror,)
    definition, dataset, config = found
    folder = mirror / dataset
    if config and (folder / MIRROR_RECORD).is_file() and not (folder / config).is_dir():
        return definition, folder / config
    return definition, *(_data_below(folder) or [folder])


def _data_below(folder: Path) -> list[Path]:
    return sorted(path for path in files_below(folder) if path.suffix in MIRRORED)


def how_to_mirror(task: str, mirror: Path | None) -> str:
    """The command that puts the data of a task of lm-eval's own where they are looked for."""
    return f"stemma mirror {task} FROM --mirror {mirror or 'DIR'}, where FROM is a file or folder with its questions"


def _data_files(config: Path) -> list[str]:
    try:
        content = read_plain(read_text(config), tags=True)
    except (BadYaml, UnicodeDecodeError):
        return []  # lm-eval tells what is wrong with it when it reads it
    kwargs = content.get("dataset_kwargs") if isinstance(content, dict) else None
    named = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    values = named.values() if isinstance(named, dict) else [named]
    return [
        name for value in values for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)
    ]
