"""A power loss: takes back what was not on the disk, as a file system with a journal may after a crash.

The layer (layer.c) notes each change below a folder. Names (files made, renamed, removed) reach the disk in order, and
every fsync takes all earlier ones there; after the last fsync any number of them may be lost. The bytes of a file
are safe only if that file was synced after they were written.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<IIQqqIIII")
_KEPT_SHARE = 0.3
"""Share of the files whose unsynced bytes reached the disk by chance."""


@dataclass(frozen=True)
class Note:
    """One change. kind: W (bytes), S (fsync), C (made), R (renamed), U (removed), M, D (folders made, removed)."""

    kind: str
    inode: int
    offset: int
    before: int
    first: Path
    second: str
    data: bytes


def notes_of(path: Path) -> list[Note]:
    """All notes; one that a kill cut short is the last."""
    return list(_parsed(path.read_bytes())) if path.exists() else []


def _parsed(content: bytes) -> Iterator[Note]:
    index = 0
    while index + _HEAD.size <= len(content):
        size, kind, inode, offset, before, first, second, data, _ = _HEAD.unpack_from(content, index)
        if size < _HEAD.size or index + size > len(content):
            return
        at = index + _HEAD.size
        texts = content[at : at + first].decode(errors="surrogateescape"), content[at + first : at + first + second]
        rest = content[at + first + second : at + first + second + data]
        yield Note(chr(kind), inode, offset, before, Path(texts[0]), os.fsdecode(texts[1]), rest)
        index += size


def lose_power(notes: list[Note], folder: Path, graves: Path, chance: random.Random) -> dict[str, int]:
    """Take back what was not durable. Every process that writes below `folder` must be gone.

    Returns the number of files whose bytes were lost, and of names.
    """
    synced = {note.inode: index for index, note in enumerate(notes) if note.kind == "S"}
    last_sync = max(synced.values(), default=-1)
    lost: dict[int, list[Note]] = {}
    for index, note in enumerate(notes):
        if note.kind == "W" and index > synced.get(note.inode, -1):
            lost.setdefault(note.inode, []).append(note)
    paths = _by_inode(folder, graves)
    files = 0
    for inode in sorted(lost):
        if inode in paths and chance.random() >= _KEPT_SHARE:
            files += 1
            for note in reversed(lost[inode]):
                _restore(paths[inode], note)
    names = [index for index, note in enumerate(notes) if note.kind in "CRUMD" and index > last_sync]
    kept = chance.randint(0, len(names))
    for index in reversed(names[kept:]):
        with suppress(OSError):
            _undo(notes[index])
    return {"files": files, "names": len(names) - kept}


def _by_inode(*folders: Path) -> dict[int, Path]:
    paths = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                with suppress(OSError):
                    paths[path.lstat().st_ino] = path
    return paths


def _restore(path: Path, note: Note) -> None:
    """The bytes and the length before a change."""
    with suppress(OSError), open(path, "r+b") as file:
        file.seek(note.offset)
        file.write(note.data)
        file.truncate(note.before)


def _undo(note: Note) -> None:
    match note.kind:
        case "C":
            note.first.unlink()
        case "R":
            target, grave = Path(note.second), os.fsdecode(note.data)
            os.rename(target, note.first)
            if grave:
                os.link(grave, target)
        case "U":
            if note.second:
                os.link(note.second, note.first)
        case "M":
            shutil.rmtree(note.first)
        case "D":
            note.first.mkdir()
