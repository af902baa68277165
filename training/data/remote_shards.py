"""Shards on S3 (or a server with the same protocol), fetched on demand.

mosaicml-streaming requests files when they are needed, limits the space of fetched ones, and reads them. The download
is ours: it resumes after an interruption, verifies size and hash from the index, and raises named errors.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from streaming import Stream
from streaming.base.dataset import _ShardState

from corpus.tokens.remote import Checksum, checksums
from infra.errors import Problem, StageError, stage_error
from infra.io.json import read_own_json
from infra.io.s3 import download
from training.core import ranks
from training.data.shard_index import Split

SHARD_NOT_HERE = _ShardState.REMOTE
_FAILURE = "failure.json"
_LEAST_SHARDS = 4
"""Number of the largest shards for which streaming needs space."""


class RemoteStream(Stream):
    """One split of a remote shard artifact. local: where files are fetched to."""

    def __init__(self, split: Split, local: Path) -> None:
        super().__init__(remote=split.location, local=str(local))
        self._checksums: Mapping[str, Checksum] = checksums(split.shards)
        if ranks.local_rank() == 0:
            local.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(split.folder / "index.json", local / "index.json")
        ranks.wait_for_all()

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        target = Path(self.local) / (to_basename or from_basename)
        known = self._checksums[from_basename]
        download(f"{self.remote}/{from_basename}", target, known.size, known.algorithm, known.digest)
        return str(target)


def bytes_in_use(sources: Sequence[Sequence[Mapping[str, Any]]], shuffle_block: int) -> int:
    """Bytes of files that a shuffled order of reading needs at once, about. sources: the entries of index.json of
    each."""
    needed = 0
    for shards in sources:
        sizes = _sizes(shards)
        sequences = max(shard["samples"] for shard in shards)
        # Maximum distance by which streaming moves a sequence (py1e).
        needed += min(sum(sizes), (ceil(1.25 * shuffle_block / sequences) + 2) * max(sizes))
    return needed


def cache_bytes(split: Split, limit_gb: float | None, in_use: int) -> int | None:
    """Limit in bytes for fetched files of a split; None for no limit, or if all of them fit.

    in_use: bytes that an order of reading needs at once. Raises StageError `cache_too_small` if the limit is lower, so
    that files would be fetched repeatedly.
    """
    if limit_gb is None:
        return None
    sizes = _sizes(split.shards)
    # Streaming counts a file once it is there, while a thread may fetch another.
    limit, least = int(limit_gb * 1e9), max(_LEAST_SHARDS * max(sizes), in_use) + max(sizes)
    if limit >= sum(sizes):
        return None
    if limit < least:
        raise stage_error(
            "cache_too_small",
            "launch.shard_cache_gb",
            f"expected room for the {least / 1e9:.3g} GB that are in use at once, not {limit_gb:g}",
            "raise it, or lower pretrain.shuffle_block",
        )
    return limit - max(sizes)


def read_ahead(split: Split, batch_size: int, limit: int | None, in_use: int) -> int:
    """Sequences over which files are fetched ahead, so that fetching one hides behind training: a file's worth, or
    eight batches.

    limit: bytes that files may take, None for no bound. in_use: those that the order of reading needs at once. Files
    that do not fit beside these would push out some that are still read from, for which training then waits.
    """
    wanted = max(8 * batch_size, split.shards[0]["samples"])
    if limit is None:
        return wanted
    room = max(0, limit - in_use) // max(_sizes(split.shards)) * min(shard["samples"] for shard in split.shards)
    return max(batch_size, min(wanted, room))


def _sizes(shards: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes of each file, packed and unpacked together."""
    return [sum(shard[part]["bytes"] for part in ("raw_data", "zip_data") if shard[part]) for shard in shards]


def note_failure(local: Path, error: Exception) -> StageError:
    """Write the error that stopped reading to a file for the training process: loader workers and threads cannot raise
    it there."""
    if not isinstance(error, StageError):
        error = stage_error("bad_shards", str(local), f"{type(error).__name__}: {error}")
    local.mkdir(parents=True, exist_ok=True)
    aside = local / f"{_FAILURE}.{os.getpid()}.{threading.get_ident()}.tmp"
    aside.write_text(json.dumps([problem.as_json() for problem in error.problems]), encoding="utf8")
    aside.replace(local / _FAILURE)
    return error


def noted_failure(local: Path) -> StageError | None:
    try:
        problems = read_own_json(local / _FAILURE)
    except FileNotFoundError:
        return None
    return StageError(*(Problem(**problem) for problem in problems))
