"""Paths that stay inside a folder from outside.

An index in a folder from outside (a dataset card, a weight map, a task's YAML) names files, a pattern matches them, and
a link leads to them. All of these could name a private file of the user, whose text would then be trained on or
reported. Each reader of such a folder resolves paths here, and refuses what leads out.

The folder itself may be a link that the user made. A snapshot in the Hugging Face cache consists of links into the
`blobs` of the same repository; these count as inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from infra.errors import stage_error

COPY_IN = "put the file into the folder; cp -rL copies the targets of links"
MOST_WILDCARDS = 32
"""Wildcards of one pattern: the time for a match grows with a power of their number."""


def homes(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which paths of `folder` may end: itself, and the blobs of a snapshot in the Hugging Face
    cache (`<repository>/snapshots/<revision>/<file>` links to `<repository>/blobs/<hash>`)."""
    real = Path(os.path.realpath(folder))
    snapshots = next((parent for parent in (real, *real.parents) if parent.parent.name == "snapshots"), None)
    return (real, snapshots.parent.parent / "blobs") if snapshots else (real,)


def names_outside(name: str) -> bool:
    """Return whether a name in an index leads out of the folder by its text alone."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or "://" in name or name.startswith("~")


def bad_link(path: Path, inside: Sequence[Path]) -> str:
    """Return what is wrong with a path that holds a link, in words; "" if it ends in one of the folders `inside`."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop of links
        return f"a link to {_target(path)}, which does not exist"
    if any(target.is_relative_to(home) for home in inside):
        return ""
    return f"a link that leads out of the folder, to {_target(path)}; cp -rL copies the targets of links"


def contained(folder: Path, name: object, where: str) -> Path:
    """Return the path of a file or folder that an index in `folder` names; it need not exist.

    Args:
        folder: folder that the index describes.
        name: what the index holds as the name.
        where: the index with the key, for the error: `…/state.json: _data_files.0.filename`.

    Raises:
        StageError: `bad_index` for what is no name of a file, `unsafe_file` for what leads out of the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise stage_error("bad_index", where, f"expected the name of a file in the folder, found {_shortened(name)}")
    if names_outside(name):
        message = f"names {_shortened(name)}, which leads out of {folder}"
        raise stage_error("unsafe_file", where, message, COPY_IN)
    path = folder / name
    check_inside([path], homes(folder), where)
    return path


def contained_glob(folder: Path, pattern: object, where: str) -> list[Path]:
    """Return the files in `folder` that a pattern in one of its indices matches, sorted. Raises StageError as
    `contained`, also if one of the matches is a link that leads out."""
    contained(folder, pattern, where)
    text = str(pattern)
    if text.count("*") + text.count("?") + text.count("[") > MOST_WILDCARDS:
        raise stage_error("bad_index", where, f"expected at most {MOST_WILDCARDS} wildcards: {_shortened(text)}")
    try:
        paths = {path for path in folder.glob(text) if path.is_file()}
    except (ValueError, OSError, NotImplementedError) as error:
        raise stage_error("bad_index", where, f"not a pattern of file names: {_shortened(text)} ({error})") from None
    check_inside(paths, homes(folder), where)
    return sorted(paths)


def check_inside(paths: Iterable[Path], inside: Sequence[Path], where: str, fix: str = COPY_IN) -> None:
    """Check that these paths, all links resolved, end in one of the folders `inside`. Raises StageError `unsafe_file`
    naming the first that does not, `bad_index` for one that the system refuses."""
    for path in paths:
        try:
            real = Path(os.path.realpath(path))
            os.path.lexists(path)
        except (OSError, ValueError) as error:
            raise stage_error("bad_index", where, f"not a file name: {_shortened(path.name)} ({error})") from None
        if not any(real.is_relative_to(home) for home in inside):
            message = f"{path} is a link that leads out of {inside[0]}, to {real}"
            raise stage_error("unsafe_file", where, message, fix)


def _target(path: Path) -> str:
    return os.readlink(path) if path.is_symlink() else os.path.realpath(path)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
