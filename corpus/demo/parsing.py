"""Docstrings of installed packages, parsed in two processes and kept in ~/.cache/stemma.

Several stages read them: what one has parsed the others read. It belongs to the SHA-256 of the files, which their
packages' RECORDs name, to this parser and to the Python that parsed. Where it cannot be kept all is as it would be,
only slower.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context
from pathlib import Path

from corpus.demo.docstrings import Docstring, InstalledFile, Unparsed, installed_files, parse_file
from infra.io.json import parse_own_json

VERSION = 1
"""Raised when `parse_file` gives other docstrings for the same bytes."""
PROCESSES = 2
# Below this, starting processes takes longer than the parsing.
SEQUENTIAL_BYTES = 6_000_000
CHUNK_BYTES = 1_500_000
UNREAD_DAYS = 30
"""Cached docstrings that were not read for this number of days belong to older packages and are removed."""


def read_docstrings(
    packages: Iterable[str] | None = None, exclude: Iterable[str] = ()
) -> Iterator[Docstring | Unparsed]:
    """Every docstring of the selected packages once: inherited copies of a text are left out.

    Two processes parse ahead by a few chunks; the order is that of `installed_files`, whatever the machine.
    """
    seen: set[bytes] = set()
    for item in _parsed(installed_files(packages, exclude)):
        if isinstance(item, Docstring):
            key = hashlib.sha256(item.text.encode()).digest()[:12]
            if key in seen:
                continue
            seen.add(key)
        yield item


def _parsed(files: list[InstalledFile]) -> Iterator[Docstring | Unparsed]:
    few = sum(file.size for file in files) <= SEQUENTIAL_BYTES
    ahead: deque[Future[list[Docstring | Unparsed]]] = deque()
    pool: ProcessPoolExecutor | None = None
    try:
        for chunk in _chunks(files):
            parsed = parse_files(chunk) if few else _read(_cache_path(chunk))
            if parsed is None:
                # Spawned, since the process that runs a stage has threads, and a forked copy of their locks may never
                # open.
                pool = pool or ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))
                ahead.append(pool.submit(parse_files, chunk))
            else:
                ahead.append(Future())
                ahead[-1].set_result(parsed)
            if len(ahead) > 2 * PROCESSES:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        if pool:
            pool.shutdown(wait=True, cancel_futures=True)


def parse_files(files: Sequence[InstalledFile]) -> list[Docstring | Unparsed]:
    """All docstrings of these files in their order, parsed here or as another process kept them.

    What another process is parsing just then is waited for.
    """
    cache = _cache_path(files)
    parsed = _read(cache)
    if cache is None or parsed is not None:
        return _parse(files) if parsed is None else parsed
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            parsed = _read(cache)
            if parsed is None:
                parsed = _parse(files)
                _keep(cache, parsed)
    except OSError:  # a home that cannot be written to, or that knows no locks
        return _parse(files) if parsed is None else parsed
    return parsed


def _parse(files: Iterable[InstalledFile]) -> list[Docstring | Unparsed]:
    return [item for file in files for item in parse_file(file)]


def _cache_path(files: Sequence[InstalledFile]) -> Path | None:
    """Return the path of the cached docstrings of these files; None where a file has no hash, or the user no home."""
    if not all(file.sha256 for file in files):
        return None
    known = "\n".join([f"{VERSION} {sys.version_info[:2]}", *(f"{file.name},{file.sha256}" for file in files)])
    try:
        folder = Path.home() / ".cache" / "stemma" / "docstrings"
    except RuntimeError:
        return None
    return folder / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"


def _read(cache: Path | None) -> list[Docstring | Unparsed] | None:
    if cache is None:
        return None
    try:
        rows = parse_own_json(cache.read_bytes())
        os.utime(cache)
        return [Unparsed(*row) if len(row) == 3 else Docstring(*row) for row in rows]
    except (OSError, ValueError, TypeError):  # not there, or damaged
        return None


def _keep(cache: Path, parsed: list[Docstring | Unparsed]) -> None:
    """Write results to a file, completely or not at all, and remove files that are no longer read."""
    with tempfile.NamedTemporaryFile("w", dir=cache.parent, prefix=".", suffix=".tmp", delete=False) as file:
        json.dump([astuple(item) for item in parsed], file)
    os.replace(file.name, cache)
    for other in cache.parent.iterdir():
        if time.time() - other.stat().st_mtime > UNREAD_DAYS * 86400:
            other.unlink(missing_ok=True)


def _chunks(files: Iterable[InstalledFile]) -> Iterator[list[InstalledFile]]:
    chunk: list[InstalledFile] = []
    for file in files:
        chunk.append(file)
        if sum(file.size for file in chunk) >= CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
