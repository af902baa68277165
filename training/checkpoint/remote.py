"""Checkpoints of one build on S3, where another machine finds them when this one is lost.

    <launch.checkpoint_remote>/<stage>/<fingerprint>/
        checkpoints/ba000000200.<name of the manifest>/rank0.safetensors, …, manifest.json
        states/, rollback/                              kept ones, and the one from before the first batch

A checkpoint's manifest records size and hash of its other files and is written last: a checkpoint without a manifest,
or with a file that does not match it, is invalid. The hash and size of the manifest are in the folder's name, so files
in a folder are never replaced by other bytes. `training.checkpoint.upload` writes these folders.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import xxhash

from infra.errors import Problem, StageError
from infra.io.contained import names_outside
from infra.io.files import sync
from infra.io.json import parse_own_json
from infra.io.s3 import S3Object, download, list_objects, open_object
from infra.store.states import state_name
from training.checkpoint.folder import MANIFEST, clean, unfinished
from training.core import ranks

CHECKPOINTS, STATES, ROLLBACK = "checkpoints", "states", "rollback"
HASH = "xxh3_128"
_REMOTE_FILE = re.compile(r"/(\w+)/ba(\d+)\.([0-9a-f]{16}-\d+)/([^/]+)$")
# Problems of a file on the server, not of the server: another checkpoint may be whole.
_DAMAGE = {"bad_checksum", "missing_source", "source_changed"}

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteCheckpoint:
    """One checkpoint in a listing.

    folder: checkpoints, states or rollback. manifest: its `manifest_name`. objects: S3 objects by file name.
    """

    folder: str
    batch: int
    manifest: str
    objects: Mapping[str, S3Object]

    @property
    def is_complete(self) -> bool:
        """True if the manifest, which is written last, exists and is not truncated."""
        return MANIFEST in self.objects and self.manifest.endswith(f"-{self.objects[MANIFEST].size}")

    @property
    def written(self) -> float:
        """Modification time of its manifest, in seconds."""
        return self.objects[MANIFEST].modified

    def in_order_of_removal(self) -> list[S3Object]:
        """All objects, manifest first, so that a partially removed checkpoint is incomplete."""
        return sorted(self.objects.values(), key=lambda item: item.name != MANIFEST)


def manifest_name(manifest: bytes) -> str:
    """Hash and size of a manifest, which distinguish a checkpoint's folder from others of the same batch."""
    return f"{xxhash.xxh3_64(manifest).hexdigest()}-{len(manifest)}"


def url_of(root_url: str, folder: str, batch: int, manifest: bytes) -> str:
    """URL of the folder with a checkpoint's files."""
    return f"{root_url}/{folder}/{state_name(batch)}.{manifest_name(manifest)}"


def remote_checkpoints(root_url: str) -> list[RemoteCheckpoint]:
    """Return all checkpoints at `root_url`, newest first, complete or not.

    Raises StageError like `infra.io.s3.list_objects`.
    """
    rows = []
    for item in list_objects(f"{root_url}/"):
        if match := _REMOTE_FILE.search(str(item)):
            folder, batch, manifest, name = match.groups()
            rows.append(((-int(batch), folder, manifest), name, item))
    rows.sort(key=lambda row: row[:2])
    return [
        RemoteCheckpoint(folder, -batch, manifest, {name: item for _, name, item in group})
        for (batch, folder, manifest), group in groupby(rows, key=lambda row: row[0])
    ]


def fetch_checkpoints(root_url: str, work_dir: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield complete checkpoints, newest first. Each is fetched lazily into the work folder's `checkpoints`, together
    with the `states` before it; every rank must call.

    Args:
        say: receives a message for each checkpoint skipped as incomplete or damaged.

    Raises StageError, on every rank, if the server keeps failing.
    """
    uploaded = everywhere(lambda: remote_checkpoints(root_url))
    for checkpoint in uploaded:
        fetched = _fetch(checkpoint, work_dir / CHECKPOINTS, say)
        if fetched is None:
            continue
        for state in uploaded:
            if state.folder == STATES and state.batch <= checkpoint.batch:
                is_there = ranks.from_first((work_dir / STATES / state_name(state.batch)).exists())
                if not is_there:
                    _fetch(state, work_dir / STATES, say)
        yield fetched


def _fetch(checkpoint: RemoteCheckpoint, into: Path, say: Callable[[str], None]) -> Path | None:
    """Fetch this rank's share of the files into the folder that all ranks share."""
    unfinished_path, path = into / unfinished(checkpoint.batch), into / state_name(checkpoint.batch)
    wrong = ""
    try:
        manifest = everywhere(lambda: _read_manifest(checkpoint))
        if ranks.is_first():
            clean(into)
            unfinished_path.mkdir(parents=True)
        ranks.wait_for_all()
        own_names = sorted(manifest)[ranks.rank() :: ranks.world_size()]
        everywhere(
            lambda: _download(checkpoint, unfinished_path, {name: manifest[name] for name in own_names}), all_ranks=True
        )
    except StageError as error:
        if not all(problem.code in _DAMAGE for problem in error.problems):
            raise
        wrong = error.problems[0].message
    if wrong:
        say(f"passing over the uploaded checkpoint of batch {checkpoint.batch:,}: {wrong}")
        return None
    if ranks.is_first():
        (unfinished_path / MANIFEST).write_text(json.dumps(manifest), encoding="utf8")
        sync(unfinished_path / MANIFEST)
        shutil.rmtree(path, ignore_errors=True)  # one that was passed over as damaged
        unfinished_path.rename(path)
        sync(into)
    ranks.wait_for_all()
    return path


def _read_manifest(checkpoint: RemoteCheckpoint) -> dict[str, tuple[int, str]]:
    if not checkpoint.is_complete:
        raise _damaged("its upload was not completed")
    with open_object(checkpoint.objects[MANIFEST]) as file:
        text = file.read()
    if manifest_name(text) != checkpoint.manifest:
        raise _damaged(f"{MANIFEST} has changed since it was written")
    files = {name: (int(size), str(digest)) for name, (size, digest) in parse_own_json(text).items()}
    for name, (size, _) in files.items():
        if names_outside(name):
            raise _damaged(f"{MANIFEST} names {name[:80]}, which leads out of the checkpoint")
        if name not in checkpoint.objects:
            raise _damaged(f"{name} is missing")
        if checkpoint.objects[name].size != size:
            raise _damaged(f"{name} is {'truncated' if checkpoint.objects[name].size < size else 'too long'}")
    return files


def _download(checkpoint: RemoteCheckpoint, folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    for name, (size, digest) in files.items():
        download(str(checkpoint.objects[name]), folder / name, size, HASH, digest)
        sync(folder / name)


def _damaged(message: str) -> StageError:
    return StageError(Problem("bad_checksum", "", message))


def everywhere(call: Callable[[], T], *, all_ranks: bool = False) -> T:
    """Return the result of `call` on rank 0, or on each rank with `all_ranks`. A StageError on one rank is raised on
    every rank; every rank must call."""
    result: T | None = None
    problems: Sequence[Problem] = ()
    if all_ranks or ranks.is_first():
        try:
            result = call()
        except StageError as error:
            problems = error.problems
    if all_ranks:
        problems = next((of_rank for of_rank in ranks.gather(problems) if of_rank), ())
    else:
        result, problems = ranks.from_first((result, problems))
    if problems:
        raise StageError(*problems)
    return result  # type: ignore[return-value]


def outdated(uploaded: Iterable[RemoteCheckpoint], keep: int, younger_than: float) -> list[RemoteCheckpoint]:
    """Return removable checkpoints, by the policy of the work folder: all complete ones in `checkpoints` except the
    newest `keep` and those written after `younger_than`, and incomplete ones older than the newest complete one."""
    rows = [checkpoint for checkpoint in uploaded if checkpoint.folder == CHECKPOINTS]
    complete = [checkpoint for checkpoint in rows if checkpoint.is_complete]
    old = [checkpoint for checkpoint in complete[keep:] if checkpoint.written < younger_than]
    return old + [
        checkpoint
        for checkpoint in rows
        if not checkpoint.is_complete and complete and checkpoint.batch < complete[0].batch
    ]
