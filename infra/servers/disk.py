"""What a store takes of its disk, by what it is for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTS = {".work": "unfinished_gb", "mlflow": "mlflow_gb", "servers": "servers_gb", "runs": "runs_gb"}
"""Folders of a store that are no artifacts; what is not listed counts as artifacts."""


def disk(root: Path) -> dict[str, float]:
    """GB (1e9 bytes) free and in all on a store's disk, and taken by its parts; a file with two names counts once."""
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    space = shutil.disk_usage(place)
    sizes = dict.fromkeys(("artifacts_gb", *PARTS.values()), 0)
    seen: set[tuple[int, int]] = set()
    for entry in os.scandir(root) if root.is_dir() else ():
        sizes[PARTS.get(entry.name, "artifacts_gb")] += _size(Path(entry.path), seen)
    return {
        "free_gb": round(space.free / 1e9, 1),
        "total_gb": round(space.total / 1e9, 1),
        **{name: round(size / 1e9, 6) for name, size in sizes.items()},
    }


def _size(path: Path, seen: set[tuple[int, int]]) -> int:
    """Bytes of a file, or of all files below a folder, without those seen before; what goes meanwhile is nothing."""
    total = 0
    places = [str(path)]
    while places:
        place = places.pop()
        try:
            if os.path.isdir(place) and not os.path.islink(place):
                places += [entry.path for entry in os.scandir(place)]
                continue
            found = os.lstat(place)
        except FileNotFoundError:
            continue
        if (found.st_dev, found.st_ino) not in seen:
            seen.add((found.st_dev, found.st_ino))
            total += found.st_size
    return total
