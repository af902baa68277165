"""The store: finished artifacts by address, verified before they are trusted, committed by one rename."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from infra.errors import StageError, stage_error
from infra.files import sync
from infra.hashing import HashBook
from infra.identity import NoStableForm, adopted_fingerprint, digest_files, fingerprint
from infra.store import lease_place
from infra.store.layout import AUX, MANIFEST, Layout
from infra.store.lease import Leases
from infra.store.manifest import File, Manifest

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Difference:
    """A file that is not what the manifest says: `what` is missing, changed or unreadable."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} is {self.what}"


class Store:
    """Artifacts under one root folder. See `infra.store.layout` for where things lie.

    reading: nothing is made; a store that is not there is an empty one, and hashes are remembered only in a book that
    is there already. Otherwise the root is made where it is not there yet.
    Raises ConfigError for a folder that is no store, StageError for one that cannot be written.
    """

    def __init__(self, root: Path, *, reading: bool = False) -> None:
        self.layout = Layout(root)
        self.root = self.layout.root
        if not reading:
            self.layout.create()
        self.hashes = HashBook(self.layout.state / "hashes.sqlite", reading=reading)
        if not reading and not lease_place.needs_server(self.layout):
            _ = self.leases

    @cached_property
    def leases(self) -> Leases:
        """Raises StageError where they are out of reach, see `infra.store.lease_place`."""
        return Leases(lease_place.table(self.layout), partial(lease_place.table, self.layout))

    def check_leases(self) -> None:
        """Raises StageError, or ConfigError, where a run could hold no lease now."""
        lease_place.check(self.layout)

    def being_built(self) -> list[str]:
        """`stage/fingerprint` of all that somebody builds right now."""
        table = lease_place.existing(self.layout)
        return Leases(table).living() if table is not None else []

    def find(self, stage: str, fingerprint: str) -> Manifest | None:
        """The manifest of a finished artifact, None if there is none; its files are not looked at."""
        return self.read(self.layout.artifact(stage, fingerprint))

    def read(self, folder: Path) -> Manifest | None:
        """The manifest in a folder, None if there is no readable one: such a folder is no artifact."""
        try:
            return Manifest.read(folder)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def manifests(self, stage: str | None = None) -> Iterator[tuple[Path, Manifest]]:
        """Every finished artifact with its folder, replaced ones too."""
        for name in [stage] if stage else self.layout.stages():
            for folder in self.layout.artifacts(name):
                if manifest := self.read(folder):
                    yield folder, manifest

    def path(self, manifest: Manifest) -> Path:
        return self.layout.artifact(manifest.stage, manifest.fingerprint)

    def differences(self, folder: Path, manifest: Manifest, *, read_all: bool = False) -> list[Difference]:
        """Every file of an artifact that is missing or differs, and a manifest that contradicts itself; aux/ is part of
        the record and checked too.

        Files whose size, mtime and ctime are those of the last hashing are trusted unless `read_all`.
        """
        expected = {folder / file.path: file for file in manifest.files}
        there = [path for path in expected if path.is_file()]
        found = [Difference(path, "missing") for path in expected if path not in set(there)]
        found += self._contradictions(folder, manifest)
        try:
            actual = self.hashes.sha256(there, read_all=read_all)
        except OSError as error:
            return [*found, Difference(Path(error.filename or folder), f"unreadable: {error.strerror}")]
        found += [Difference(path, "changed") for path, sha in actual.items() if sha != expected[path].sha256]
        return sorted(found, key=lambda difference: difference.path)

    def verify(self, folder: Path, manifest: Manifest) -> list[Difference]:
        """Every file that is missing, changed, unreadable or in no manifest; every byte is read."""
        found = self.differences(folder, manifest, read_all=True)
        named = {folder / file.path for file in manifest.files} | {folder / MANIFEST}
        extra = sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in named)
        return [*found, *(Difference(path, "in no manifest") for path in extra)]

    def _contradictions(self, folder: Path, manifest: Manifest) -> list[Difference]:
        if self.content_digest(manifest.files) != manifest.digest:
            return [Difference(folder / MANIFEST, "changed: its digest is not that of the files it names")]
        if address_of(manifest) != manifest.fingerprint or folder.name.partition(".")[0] != manifest.fingerprint:
            return [Difference(folder / MANIFEST, "changed: what it says was asked for does not give its address")]
        return []

    def describe_files(self, folder: Path) -> tuple[File, ...]:
        """Hashes every file under a folder but its manifest, each once."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
        hashes = self.hashes.sha256(paths)
        return tuple(File(path.relative_to(folder).as_posix(), path.stat().st_size, hashes[path]) for path in paths)

    def content_digest(self, files: tuple[File, ...]) -> str:
        """The digest that names an artifact as an input: its payload files only."""
        return digest_files((file.path, file.sha256) for file in files if file.is_payload)

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Makes a folder the artifact of its address, by one rename; its bytes are on disk before that.

        A finished artifact at that address is kept if its payload is the same and its files are whole; otherwise it
        moves to `<fingerprint>.<digest8>`, where lineage still finds it.
        """
        place = self.path(manifest)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            manifest.write(unfinished)
            for file in manifest.files:
                sync(unfinished / file.path)
            sync(unfinished / MANIFEST)
            sync(unfinished)
        except OSError as error:
            raise disk_error(error, manifest.stage, unfinished) from error
        old = self.read(place)
        if old is not None and old.digest == manifest.digest and not self.differences(place, old):
            shutil.rmtree(unfinished)
            return place
        if place.exists():
            self._retire(place, old)
        os.rename(unfinished, place)
        sync(place.parent)
        # A rename leaves each file's times alone, so what was hashed a moment ago is known under its new path too.
        self.hashes.moved(unfinished, place)
        return place

    def put_beside(self, manifest: Manifest, source: Path, name: str) -> None:
        """Copies a small file to aux/<name> of a finished artifact, where it is in the manifest and no part of the
        digest. Does nothing where it is there already, or while the artifact is built anew."""
        folder, path = self.path(manifest), f"{AUX}/{name}"
        data = source.read_bytes()
        if (folder / path).is_file() and (folder / path).read_bytes() == data and _lists(self.read(folder), path):
            return
        lease = self.leases.acquire(f"{manifest.stage}/{manifest.fingerprint}", stop_if=lambda: True)
        if lease is None:
            return
        try:
            current = self.read(folder)
            if current is None or current.digest != manifest.digest:
                return
            # The manifest never names a file that differs: first without it, then with it.
            others = tuple(file for file in current.files if file.path != path)
            if len(others) < len(current.files):
                replace(current, files=others).rewrite(folder)
            (folder / AUX).mkdir(exist_ok=True)
            hidden = folder / AUX / f".{name}"  # of one name: what a kill left is written over
            hidden.write_bytes(data)
            sync(hidden)
            hidden.replace(folder / path)
            added = File(path, len(data), hashlib.sha256(data).hexdigest())
            replace(current, files=tuple(sorted((*others, added), key=lambda file: file.path))).rewrite(folder)
        finally:
            lease.release()

    def discard(self, manifest: Manifest) -> None:
        """Puts a damaged artifact out of reach: moved aside, never reused."""
        place = self.path(manifest)
        if place.exists():
            self._retire(place, None)

    def _retire(self, place: Path, old: Manifest | None) -> None:
        """Renames an artifact away from its address; one that is damaged or no artifact is removed for good."""
        if old is not None and not self.differences(place, old):
            kept = place.with_name(f"{place.name}.{old.digest[:8]}")
            if not kept.exists():
                os.rename(place, kept)
                self.hashes.moved(place, kept)
                return
        trash = self.layout.root / ".work" / ".trash" / f"{place.parent.name}-{place.name}-{os.getpid()}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        os.rename(place, trash)
        shutil.rmtree(trash, ignore_errors=True)


def _lists(manifest: Manifest | None, path: str) -> bool:
    return manifest is not None and any(file.path == path for file in manifest.files)


def address_of(manifest: Manifest) -> str:
    """The fingerprint of what a manifest says was asked for; empty if that has none."""
    if manifest.adopted is not None:
        return adopted_fingerprint(manifest.stage, manifest.digest)
    inputs = {name: item.identity for name, item in manifest.inputs.items()}
    sources = {record.key: record.digest for record in manifest.sources}
    try:
        return fingerprint(manifest.stage, manifest.version, manifest.identity, inputs, sources)
    except NoStableForm:
        return ""


def is_full(error: BaseException) -> bool:
    """True for what a full disk, or a used up quota, makes of a write, through SQLite too."""
    return getattr(error, "errno", None) in DISK_FULL or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def disk_error(error: OSError | sqlite3.OperationalError, stage: str, folder: Path) -> Exception:
    """The error a user should read for a failed write: a full disk is named as such, anything else stays as it is."""
    if not is_full(error):
        return error
    return full_disk(stage, folder, str(getattr(error, "filename", None) or folder))


def full_disk(stage: str, folder: Path, path: str = "") -> StageError:
    free_mb = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6
    return stage_error(
        "disk_full",
        path or str(folder),
        f"the disk is full ({free_mb:.0f} MB free) while {stage} was being written",
        "free some space and run again: finished stages are reused",
    )
