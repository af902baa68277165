"""Files outside the store that a stage reads: named in its config, known to identity by their bytes."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

FOLDER = "folder"


class _SourcePathMark:
    """Marks a config field as a path outside the store: identity counts its bytes, not its name."""


SOURCE_PATH = _SourcePathMark()


def _absolute(value: str, info: ValidationInfo) -> str:
    """Paths in a config are relative to the config file's folder, which the loader gives as validation context."""
    try:
        expanded = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a path; there is no user {value.split('/')[0]!r}") from None
    folder = (info.context or {}).get(FOLDER)
    return str(Path(folder) / expanded) if folder else str(expanded)


SourcePath = Annotated[str, SOURCE_PATH, AfterValidator(_absolute)]


@dataclass(frozen=True)
class Source:
    """One thing that a stage reads from outside the store.

    key: the dotted config key that names it, for error messages, e.g. `ingest.sources.0`.
    paths: its files; a path that does not exist is kept, so that whoever reads it can say so.
    derive: finds the content digest of a source that has no files of its own (the docstrings of installed packages).
    recipe: what `derive` does, in words that change when its answer may.
    watched: files that stay the same, in size and times, as long as the answer of `derive` does.
    """

    key: str
    paths: tuple[Path, ...] = ()
    derive: Callable[[], str] | None = None
    recipe: str = ""
    watched: tuple[Path, ...] = ()


def expand(patterns: Iterable[str]) -> tuple[Path, ...]:
    """The files behind paths, folders and globs, sorted; a pattern that matches nothing stands for itself."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found.update(child for child in path.rglob("*") if child.is_file())
        elif path.exists():
            found.add(path)
        else:
            found.update([Path(name) for name in glob.glob(pattern, recursive=True)] or [path])
    return tuple(sorted(found))
