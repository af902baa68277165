"""Files: a second name, the rights of a new one, and the way to the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name; make a copy if the file system supports no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def give_usual_rights(folder: Path, paths: Iterable[Path]) -> None:
    """Give these files the permissions of a new file in this folder: some libraries, including safetensors, make the
    files that they write readable by the owner only, regardless of the umask."""
    probe = folder / f".rights.{os.getpid()}.{os.urandom(4).hex()}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        usual = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    for path in paths:
        mode = path.stat().st_mode & 0o777
        if mode & usual != usual:
            with suppress(OSError):  # a file system without permissions
                path.chmod(mode | usual)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_text(text, encoding="utf8")
        sync(hidden)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def shorten(log: Path, most_bytes: int) -> None:
    """Empty a log that has grown beyond a size, after a copy of it as `<name>.1`.

    The program that writes it, which must have opened it for appending, goes on writing. Lines that it writes between
    the copy and the cut, within milliseconds, are lost.
    """
    if log.stat().st_size > most_bytes:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
