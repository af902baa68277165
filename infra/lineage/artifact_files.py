"""Puts files where the MLflow page looks for them, without sending bytes through its server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlparse

from infra.files import link_or_copy
from infra.lineage.tracking import artifacts_folder


def artifact_folder(root: Path, uri: str) -> Path:
    """The folder behind an address such as `mlflow-artifacts:/quickstart/1a2b/artifacts`.

    Raises ValueError for an address that lies anywhere else.
    """
    parsed = urlparse(uri)
    base = artifacts_folder(root)
    folder = base.joinpath(parsed.path.lstrip("/"))
    if parsed.scheme != "mlflow-artifacts" or base not in folder.parents or ".." in folder.parts:
        raise ValueError(f"{uri} does not lie among the artifacts of this store")
    return folder


def put_copies(paths: Iterable[str], folder: Path) -> None:
    """Copies small files; one that has gone meanwhile is left out."""
    for path in map(Path, paths):
        if path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _replace(path, folder / path.name, shutil.copyfile)


def put_links(source: Path, folder: Path) -> None:
    """Gives each payload file of an artifact a second name, or a copy on another file system.

    Raises FileNotFoundError if the artifact is gone.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"no such artifact: {source}")
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and relative.parts[0] != "aux":
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, target, link_or_copy)


def _replace(source: Path, target: Path, put: Callable[[Path, Path], object]) -> None:
    hidden = target.with_name(f".{target.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)
    put(source, hidden)
    hidden.replace(target)
