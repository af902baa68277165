"""A folder of checkpoints: each is written to a temporary folder, hashed, synced and renamed, so it is whole or absent.

ba000000200/manifest.json    size and xxh3-128 of every other file; written last
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from infra.errors import stage_error
from infra.io.files import sync
from infra.io.json import read_own_json
from infra.store.states import state_name
from training.core import ranks

MANIFEST = "manifest.json"
_NAME = re.compile(r"ba(\d+)")
_UNFINISHED = "unfinished"
# The words for a full disk in the messages of Python and of safetensors.
_DISK_FULL = ("No space left", "StorageFull", "Disk quota exceeded", "QuotaExceeded")


def batch_of(path: Path) -> int:
    """Number of batches completed when a checkpoint was written."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def unfinished(batch: int) -> str:
    """Name of the folder in which a checkpoint is assembled."""
    return f"{_UNFINISHED}.{state_name(batch)}"


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, newest first, whole or not."""
    paths = [path for path in folder.glob("ba*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=batch_of, reverse=True)


def damage(path: Path) -> str:
    """Describe the damage of a checkpoint in a few words; empty for a whole one. Reads every byte."""
    try:
        files = read_own_json(path / MANIFEST)
        for name, (size, digest) in files.items():
            if (path / name).stat().st_size != size:
                return f"{name} is truncated" if (path / name).stat().st_size < size else f"{name} is too long"
            if _digest(path / name) != digest:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return ""


def whole_checkpoints(folders: Sequence[Path], say: Callable[[str], None] = lambda message: None) -> Iterator[Path]:
    """Yield whole checkpoints, newest first; `say` receives a message for each one skipped. The same on every rank."""
    paths = [path for folder in folders for path in checkpoints(folder)]
    for path in ranks.from_first(sorted(paths, key=batch_of, reverse=True)):
        wrong = ranks.from_first(damage(path) if ranks.is_first() else "")
        if wrong:
            say(f"passing over the checkpoint of batch {batch_of(path):,}: {wrong}")
        else:
            yield path


def write(folder: Path, batch: int, write_files: Callable[[Path], Sequence[Path]]) -> Path:
    """Write the checkpoint of `batch`; every rank must call.

    Raises StageError `disk_full` or `checkpoint_failed` on every rank if writing fails on one; older checkpoints stay.

    Args:
        write_files: writes this rank's files into a folder and returns them.
    """
    unfinished_path, path = folder / unfinished(batch), folder / state_name(batch)
    # Every rank writes into a folder with another name, which is never read.
    if ranks.is_first():
        clean(folder)
        unfinished_path.mkdir(parents=True)
    ranks.wait_for_all()
    sums: dict[str, tuple[int, str]] = {}
    failure = ""
    try:
        for file in write_files(unfinished_path):
            sync(file)
            sums[file.name] = file.stat().st_size, _digest(file)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    # The folder gets its name only if all ranks succeeded, after the manifest and all files are on disk.
    everyone = ranks.gather((sums, failure))
    failure = next((failure for _, failure in everyone if failure), "")
    if ranks.is_first() and not failure:
        try:
            files = {name: entry for sums, _ in everyone for name, entry in sums.items()}
            (unfinished_path / MANIFEST).write_text(json.dumps(files), encoding="utf8")
            sync(unfinished_path / MANIFEST)
            sync(unfinished_path)
            shutil.rmtree(path, ignore_errors=True)  # one that was passed over as damaged
            unfinished_path.rename(path)
            sync(folder)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
    # All ranks raise the same error.
    failure = ranks.from_first(failure)
    if failure:
        if ranks.is_first():
            clean(folder)
        full = any(word in failure for word in _DISK_FULL)
        raise stage_error(
            "disk_full" if full else "checkpoint_failed",
            str(path),
            "the disk is full: no checkpoint could be written" if full else f"no checkpoint was written: {failure}",
            "free some space and run again: it continues from the previous checkpoint",
        )
    return path


def clean(folder: Path) -> None:
    """Remove the leftovers of a killed or failed writer."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def retain(folder: Path, count: int, hours: float, *, first: bool = False) -> None:
    """Remove all but the newest `count` checkpoints and those younger than `hours`.

    Args:
        first: True to keep a checkpoint from before the first batch as well.
    """
    oldest = time.time() - hours * 3600
    for path in checkpoints(folder)[count:]:
        if path.stat().st_mtime < oldest and not (first and batch_of(path) == 0):
            _remove(path)


def drop_after(folder: Path, batch: int) -> None:
    """Remove the checkpoints of batches after `batch`; every rank must call."""
    if ranks.is_first():
        for path in checkpoints(folder):
            if batch_of(path) > batch:
                _remove(path)
    ranks.wait_for_all()


def _remove(path: Path) -> None:
    # Renamed first: a partially removed checkpoint must not look like a damaged one.
    removed = path.with_name(f"{_UNFINISHED}.{path.name}")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
