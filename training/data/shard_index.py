"""The index of one side of packed shards, checked before anything is read by it: streaming ends in a traceback, or in
silence, where an index or a file is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from corpus.tokens.remote import location_of
from corpus.tokens.trained import split_fingerprint
from infra.errors import StageError, stage_error
from infra.io.json import BadJson, read_own_json

_FIX = "copy the shards again, or run the shard stage"
_META = ("sequence_length", "vocab_size")
"""Numbers of meta.json that every training reads."""


@dataclass(frozen=True)
class Split:
    """One side of packed shards, `train` or `validation`.

    folder: where its index.json lies, and its files unless they are remote.
    location: URL of its files on S3; None for files next to the index.
    index: content of index.json.
    """

    folder: Path
    location: str | None
    index: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Split:
        """Read the index of an MDS folder, whose files must be there and whole.

        Raises:
            StageError: `no_shards` without an index or any sequence; `bad_shards` for an index or a file that is
                damaged.
        """
        path = folder / "index.json"
        if not path.exists():
            raise stage_error("no_shards", str(folder), "expected an MDS folder with index.json", "run the shard stage")
        index = _read(path)
        shards = index.get("shards")
        if not isinstance(shards, list):
            raise _bad(path, "expected `shards`, a list")
        location = location_of(folder)
        for number, shard in enumerate(shards):
            _check_shard(shard, f"{path}: shards.{number}", None if location else folder)
        if not sum(shard["samples"] for shard in shards):
            raise stage_error(
                "no_shards", str(folder), "expected at least one sequence, found none", "provide more text for shard"
            )
        return cls(folder, location, index)

    @property
    def shards(self) -> list[dict[str, Any]]:
        """The entries of index.json, one a file."""
        shards: list[dict[str, Any]] = self.index["shards"]
        return shards

    @property
    def sequences(self) -> int:
        return sum(shard["samples"] for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the text, see `corpus.tokens.trained`."""
        return split_fingerprint(self.folder, dict(self.index))


def read_meta(shards: Path) -> dict[str, Any]:
    """The content of meta.json of shards. Raises StageError `no_shards` where there is none, `bad_shards` where it is
    damaged."""
    path = shards / "meta.json"
    if not path.exists():
        raise stage_error(
            "no_shards", str(shards), "expected the shard stage's folder with meta.json", "run the shard stage"
        )
    meta = _read(path)
    for key in _META:
        if not isinstance(meta.get(key), int):
            raise _bad(path, f"expected `{key}`, a number")
    return meta


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_own_json(path)
    except BadJson as error:
        raise _bad(path, f"not JSON: {error.problems[0].message}") from None
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise _bad(path, "expected an object")
    return content


def _check_shard(shard: Any, where: str, folder: Path | None) -> None:
    """Raise StageError if an entry lacks a required key, or if its file in `folder` does not match it."""
    if not isinstance(shard, dict) or not isinstance(shard.get("samples"), int) or shard["samples"] < 0:
        raise _bad(where, "expected `samples`, a number from 0")
    columns = shard.get("column_names")
    if not isinstance(columns, list) or "compression" not in shard:
        raise _bad(where, "expected `column_names`, a list, and `compression`")
    if (shard.get("format"), shard.get("version")) != ("mds", 2):
        raise _bad(where, "expected `format` mds and `version` 2")
    for key, kind in (("column_encodings", str), ("column_sizes", int | None)):
        values = shard.get(key)
        if not isinstance(values, list) or len(values) != len(columns) or not all(isinstance(v, kind) for v in values):
            raise _bad(where, f"expected `{key}`, a list with an entry for each of `column_names`")
    if other := [encoding for encoding in shard["column_encodings"] if not encoding.startswith("ndarray")]:
        raise _bad(where, f"expected columns of arrays in `column_encodings`, found {other[0]}")
    parts = [part for part in ("raw_data", "zip_data") if shard.get(part) is not None]
    for part in parts:
        entry = shard[part]
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("bytes"), int)
            or Path(str(entry.get("basename"))).name != entry.get("basename")
        ):
            raise _bad(f"{where}.{part}", "expected `basename`, a file's name, and `bytes`, a number")
    if "raw_data" not in parts or (shard["compression"] and "zip_data" not in parts) or "zip_data" not in shard:
        raise _bad(where, "expected `raw_data` and `zip_data`")
    if folder is not None:
        _check_file(folder, shard, "zip_data" if shard["compression"] else "raw_data")


def _check_file(folder: Path, shard: Mapping[str, Any], part: str) -> None:
    path, size = folder / shard[part]["basename"], shard[part]["bytes"]
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise _bad(path, "index.json names this file, which is missing") from None
    if found != size:
        raise _bad(path, f"expected the {size:,} bytes that index.json names, found {found:,}")
    if part == "raw_data":
        # An MDS file opens with its number of samples, and where each begins and the last ends.
        begins = np.fromfile(path, np.uint32, shard["samples"] + 2).astype(np.int64)
        if len(begins) < shard["samples"] + 2 or begins[0] != shard["samples"] or begins[-1] != size:
            raise _bad(path, "its header is not that of the file which index.json names")
        if (np.diff(begins[1:]) <= 0).any():
            raise _bad(path, "its header is damaged: samples do not follow each other")


def damaged_sequence(folder: Path, number: int) -> StageError:
    return _bad(folder, f"sequence {number:,} cannot be read: its bytes or their entry in index.json are damaged")


def _bad(where: Path | str, message: str) -> StageError:
    return stage_error("bad_shards", str(where), message, _FIX)
