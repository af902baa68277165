"""The store: finished artifacts by address, verified before they are trusted, committed by one rename.

The artifacts of a root on an object store are there (`infra.store.bucket.artifacts`), and the folder is a cache of
them: a folder at an artifact's address is a whole copy of it, and most artifacts have none. Look-ups request manifests
only; `fetch` downloads all files of an artifact, `peek` a few small ones.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from infra.errors import StageError, stage_error
from infra.fingerprint import NoStableForm, adopted_fingerprint, digest_files, fingerprint
from infra.io.files import give_usual_rights, sync
from infra.io.hashing import HashBook
from infra.io.s3 import Stopped
from infra.leases import place as lease_place
from infra.leases.lease import Leases
from infra.store.bucket.artifacts import EXTRA, Remote
from infra.store.bucket.root import open_root
from infra.store.layout import AUX, MANIFEST, MIRROR, RESERVED, Layout
from infra.store.manifest import File, InputArtifact, Manifest, glance_folder
from infra.store.states import CLOCK, STATE_FOLDER, STATES, kept_states, take_states, without_states

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}

GLANCE_BYTES = 64 << 20
"""Larger files are data: the metrics of a whole training are smaller. An artifact of this size is no wait either."""


@dataclass(frozen=True)
class Difference:
    """A file that differs from the manifest: `what` is missing, changed or unreadable. path: on an object store
    its URL."""

    path: Path | str
    what: str

    def __str__(self) -> str:
        return f"{self.path} is {self.what}"


class Store:
    """Artifacts under one root folder. See `infra.store.layout` for where things lie.

    reading: nothing is made; a store that is not there is an empty one, and hashes are remembered only in a book that
    is there already. Otherwise the root is made where it is not there yet.
    Raises ConfigError for a folder that is no store, StageError for one that cannot be written; of a root on an object
    store also ConfigError where that, or the leases, are not set up (`remote_root.open_root`,
    `lease_place.needs_server`).
    """

    def __init__(self, root: Path, *, reading: bool = False) -> None:
        self.layout = Layout(root)
        self.root = self.layout.root
        self.remote = (
            Remote(self.layout.url, self.root / MIRROR, self.root / ".work" / ".fetch") if self.layout.url else None
        )
        if self.remote is not None:
            open_root(self.layout.url, make=False)
            if not reading:
                lease_place.needs_server(self.layout)
                open_root(self.layout.url, make=True)
        if not reading:
            self.layout.create()
        self.hashes = HashBook(self.layout.state / "hashes.sqlite", reading=reading)
        if not reading and not lease_place.needs_server(self.layout):
            _ = self.leases

    @cached_property
    def leases(self) -> Leases:
        """The leases of the store. Raises StageError if they are out of reach, see `infra.leases.place`."""
        return Leases(lease_place.table(self.layout))

    def check_leases(self) -> None:
        """Raise StageError, or ConfigError, if a run could hold no lease now."""
        lease_place.check(self.layout)

    def being_built(self) -> list[str]:
        """Return `stage/fingerprint` of each artifact that is currently being built."""
        table = lease_place.existing(self.layout)
        living = Leases(table).living() if table is not None else []
        return [key for key in living if key.partition("/")[0] not in RESERVED]  # others are of `infra.store.at_work`

    @property
    def place(self) -> str:
        """The root as people name it: the URL of one on an object store, else the folder."""
        return self.layout.url or str(self.root)

    def find(self, stage: str, fingerprint: str) -> Manifest | None:
        """Return the manifest of a finished artifact, None if there is none; its files are not read."""
        return self.read(self.layout.artifact(stage, fingerprint))

    def read(self, folder: Path) -> Manifest | None:
        """Return the manifest of the artifact at a folder, None if there is no readable one: then it is no artifact."""
        if self.remote is not None and self._is_address(folder):
            return self.remote.find(folder.parent.name, folder.name)
        return _in_folder(folder)

    def stages(self) -> list[str]:
        """Return the stages that have artifacts."""
        return self.remote.stages() if self.remote else self.layout.stages()

    def folders(self, stage: str) -> list[Path]:
        """The folders of a stage's finished artifacts, replaced ones too, which need not be here; see `fetch`."""
        if self.remote is None:
            return list(self.layout.artifacts(stage))
        return [self.layout.artifact(stage, name) for name in self.remote.names(stage)]

    def manifests(self, stage: str | None = None) -> Iterator[tuple[Path, Manifest]]:
        """Return every finished artifact with its folder, replaced ones too."""
        for name in [stage] if stage else self.stages():
            if self.remote is not None:
                yield from (
                    (self.layout.artifact(name, folder_name), manifest)
                    for folder_name, manifest in self.remote.all(name)
                )
                continue
            for folder in self.layout.artifacts(name):
                if manifest := self.read(folder):
                    yield folder, manifest

    def path(self, manifest: Manifest) -> Path:
        """Return the folder of an artifact, which need not be here; see `fetch`."""
        return self.layout.artifact(manifest.stage, manifest.fingerprint)

    def runs(self) -> Path:
        """The folder of the journals of pipeline runs; on an object store with those of other machines that ended."""
        if self.remote is not None:
            self.remote.runs.fetch(self.layout.runs)
        return self.layout.runs

    def location(self, manifest: Manifest) -> str:
        """Location of an artifact, for people and records: its URL on an object store, else its folder."""
        return self.remote.place(manifest) if self.remote else str(self.path(manifest))

    def fetch(
        self,
        manifest: Manifest,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda message: None,
        stopped: Stopped = lambda: False,
        state: str = "",
    ) -> Path:
        """Return the folder of an artifact with all of its files.

        If the artifact is on an object store and this machine has no copy, its files are downloaded and each is checked
        against its hash. Kept states of a training, which are several times as large as its model, are not downloaded,
        except for a requested one.

        Args:
            folder: of a replaced artifact, which is not that of its address.
            say: called before a download.
            stopped: see `infra.store.bucket.artifacts.Remote`.
            state: digest of a state.

        Raises StageError `damaged_object`, `disk_full`, and as `infra.io.s3.persistently` does.
        """
        target = folder or self.path(manifest)
        if self.remote is None or not self._is_address(target):
            return target
        with self._locked(target):
            if is_new := not self._is_complete(target, manifest):
                self._make_room(target)
                self._download(self.remote, manifest, target, say, stopped)
            if state:
                self._download_state(self.remote, manifest, target, state, say, stopped)
        for before in manifest.inputs.values():
            if is_new and before.state:
                self._peek_state(before)
        return target

    def _peek_state(self, reference: InputArtifact) -> None:
        """Fetch the files that `infra.store.branches` reads of the training from which an artifact continues."""
        if (
            manifest := self.find(reference.stage, reference.fingerprint)
        ) is None or manifest.digest != reference.digest:
            return
        for state in kept_states(self.peek(manifest, STATES)):
            if state.digest == reference.state:
                self.peek(manifest, f"{STATE_FOLDER}/{state.folder.name}/{CLOCK}")

    def is_here(self, folder: Path, manifest: Manifest) -> bool:
        """Return True if the files of an artifact can be read without a download."""
        return self.remote is None or not self._is_address(folder) or self._is_complete(folder, manifest)

    def peek(self, manifest: Manifest, *paths: str, folder: Path | None = None) -> Path:
        """Return a folder that contains the given small files of an artifact, as far as it has them.

        This is the artifact's own folder, or one to which only these files are downloaded.
        """
        target = folder or self.path(manifest)
        if self.remote is None or self.is_here(target, manifest):
            return target
        glance = glance_folder(self.root, manifest)
        files = [file for file in manifest.files if file.path in paths]
        if not (glance / MANIFEST).exists() or any(not self._has(glance, [file]) for file in files):
            with self._locked(glance):
                self.remote.fetch(manifest, glance, [file for file in files if not self._has(glance, [file])])
                glance.mkdir(parents=True, exist_ok=True)
                manifest.rewrite(glance)
        return glance

    def glance(self, manifest: Manifest, folder: Path | None = None) -> Path:
        """Make all results of an artifact readable, as `peek` does: figures, records and pages. All of a small one."""
        if sum(file.size for file in without_states(manifest)) <= GLANCE_BYTES:
            return self.fetch(manifest, folder)
        return self.peek(manifest, *(file.path for file in manifest.files if _is_readable_text(file)), folder=folder)

    def _is_address(self, folder: Path) -> bool:
        """Return True if an artifact of this store may be at a folder."""
        path = folder.absolute()
        return path.parent.parent == self.root and not path.parent.name.startswith(".")

    def _is_complete(self, folder: Path, manifest: Manifest) -> bool:
        """Return True if the copy in a folder is complete. Files that were added to the artifact later, such as a card,
        may be missing from it."""
        copy = _in_folder(folder)
        if copy is None or (copy.digest, copy.build_id) != (manifest.digest, manifest.build_id):
            return False
        return self._has(folder, list(copy.files))

    def _has(self, folder: Path, files: list[File]) -> bool:
        try:
            actual = self.hashes.sha256([folder / file.path for file in files])
        except OSError:
            return False
        return all(actual[folder / file.path] == file.sha256 for file in files)

    def _download(
        self, remote: Remote, manifest: Manifest, target: Path, say: Callable[[str], None], stopped: Stopped
    ) -> None:
        """Download an artifact, resuming from the files of an earlier, interrupted download."""
        self.layout.create()  # a reader creates no store, but the cache of a store has to be marked as one
        work = self.layout.root / ".work" / ".fetch" / f"{manifest.stage}-{target.name}-{manifest.build_id}"
        work.mkdir(parents=True, exist_ok=True)
        copy = replace(manifest, files=without_states(manifest))
        pending = [file for file in copy.files if not self._has(work, [file])]
        self._report_download(manifest, pending, work, say)
        try:
            remote.fetch(manifest, work, pending, stopped)
            copy.write(work)
            sync(work / MANIFEST)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(work, target)
            sync(target.parent)
        except OSError as error:
            raise disk_error(error, f"the copy of {self.location(manifest)}", work) from error
        self.hashes.know({target / file.path: file.sha256 for file in copy.files})

    def _download_state(
        self,
        remote: Remote,
        manifest: Manifest,
        target: Path,
        digest: str,
        say: Callable[[str], None],
        stopped: Stopped,
    ) -> None:
        """Download a kept state into the copy of its artifact.

        Its files are put in place first, and only then into the copy's manifest. So an interrupted download is not part
        of the copy, and is resumed.
        """
        kept_state = next((state for state in kept_states(target) if state.digest == digest), None)
        copy = Manifest.read(target)
        new = [file for file in kept_state.files(manifest) if file not in copy.files] if kept_state else []
        if not new:
            return
        pending = [file for file in new if not self._has(target, [file])]
        self._report_download(manifest, pending, target, say)
        try:
            remote.fetch(manifest, target, pending, stopped)
            replace(copy, files=tuple(sorted((*copy.files, *new), key=lambda file: file.path))).rewrite(target)
        except OSError as error:
            raise disk_error(error, f"the copy of {self.location(manifest)}", target) from error
        self.hashes.know({target / file.path: file.sha256 for file in new})

    def _report_download(self, manifest: Manifest, files: list[File], folder: Path, say: Callable[[str], None]) -> None:
        size = sum(file.size for file in files)
        if size > shutil.disk_usage(folder).free:
            raise full_disk(f"the copy of {self.location(manifest)} ({size / 1e6:,.0f} MB)", folder)
        say(f"downloading {self.location(manifest)}, {size / 1e6:,.1f} MB")

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Hold a lock so that only one process downloads an artifact to this machine at a time."""
        locks = self.layout.state / "fetch"
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / f"{folder.parent.name}-{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def differences(self, folder: Path, manifest: Manifest, *, read_all: bool = False) -> list[Difference]:
        """Return every file of an artifact that is missing or differs, and a manifest that contradicts itself.

        Files in aux/ are part of the record and checked too. Files whose size, mtime and ctime are those of the last
        hashing are trusted unless `read_all`. On an object store each object of the right size is trusted, since
        objects are never incomplete; `read_all` downloads every byte.
        """
        if self.remote is not None and self._is_address(folder):
            differences = self._contradictions(folder, manifest)
            if read_all:
                wrong = [pair for pair in self.remote.verify(manifest) if pair[1] != EXTRA]
            else:
                wrong = self.remote.differences(manifest)
            return [*differences, *(Difference(url, kind) for url, kind in wrong)]
        expected = {folder / file.path: file for file in manifest.files}
        present = [path for path in expected if path.is_file()]
        differences = [Difference(path, "missing") for path in expected if path not in set(present)]
        differences += self._contradictions(folder, manifest)
        try:
            actual = self.hashes.sha256(present, read_all=read_all)
        except OSError as error:
            return [*differences, Difference(Path(error.filename or folder), f"unreadable: {error.strerror}")]
        differences += [Difference(path, "changed") for path, sha in actual.items() if sha != expected[path].sha256]
        return sorted(differences, key=lambda difference: str(difference.path))

    def verify(self, folder: Path, manifest: Manifest) -> list[Difference]:
        """Return every file that is missing, changed, unreadable or in no manifest; every byte is read."""
        if self.remote is not None and self._is_address(folder):
            differences = self._contradictions(folder, manifest)
            return [*differences, *(Difference(url, kind) for url, kind in self.remote.verify(manifest))]
        differences = self.differences(folder, manifest, read_all=True)
        listed_paths = {folder / file.path for file in manifest.files} | {folder / MANIFEST}
        extra = sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in listed_paths)
        return [*differences, *(Difference(path, "in no manifest") for path in extra)]

    def _contradictions(self, folder: Path, manifest: Manifest) -> list[Difference]:
        if self.content_digest(manifest.files) != manifest.digest:
            return [Difference(folder / MANIFEST, "changed: its digest is not that of the files it names")]
        if address_of(manifest) != manifest.fingerprint or folder.name.partition(".")[0] != manifest.fingerprint:
            return [Difference(folder / MANIFEST, "changed: the request that it records does not give its address")]
        return []

    def describe_files(self, folder: Path) -> tuple[File, ...]:
        """Hash every file under the folder of a build except its manifest, each once. Every reader of the store has to
        be able to read them all, so each file is first given the permissions of a new file."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
        give_usual_rights(folder, paths)
        hashes = self.hashes.sha256(paths)
        return tuple(File(path.relative_to(folder).as_posix(), path.stat().st_size, hashes[path]) for path in paths)

    def content_digest(self, files: tuple[File, ...]) -> str:
        """The digest that names an artifact as an input: its payload files only."""
        return digest_files((file.path, file.sha256) for file in files if file.is_payload)

    def commit(
        self,
        unfinished: Path,
        manifest: Manifest,
        check: Callable[[], None] = lambda: None,
        stopped: Stopped = lambda: False,
    ) -> Path:
        """Make a folder the artifact of its address, by one rename; its bytes are on disk before that.

        On an object store this is done by a put of its manifest, see `infra.store.bucket.artifacts`, and the folder
        becomes the local copy.

        A finished artifact at that address is kept if its payload is the same and its files are whole, and gets the
        states of its training that this build kept and it lacks; otherwise it moves to `<fingerprint>.<digest8>`, where
        lineage still finds it.

        Args:
            check: called after an upload, which may take hours; what it raises ends the commit.
            stopped: see `infra.store.bucket.artifacts.Remote`.
        """
        target = self.path(manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        last = max((earlier.order for _, earlier in self.manifests(manifest.stage)), default=0)
        manifest = replace(manifest, order=last + 1)
        try:
            manifest.write(unfinished)
            for file in manifest.files:
                sync(unfinished / file.path)
            sync(unfinished / MANIFEST)
            sync(unfinished)
        except OSError as error:
            raise disk_error(error, manifest.stage, unfinished) from error
        if self.remote is not None:
            return self._commit_remotely(self.remote, unfinished, manifest, check, stopped)
        old = self.read(target)
        if old is not None and old.digest == manifest.digest and not self.differences(target, old):
            take_states(target, old, unfinished, manifest)
            shutil.rmtree(unfinished)
            if manifest.versions != old.versions and (current := self.read(target)) is not None:
                replace(current, reproduced_with=manifest.versions).rewrite(target)
            return target
        if target.exists():
            self._retire(target, old)
        os.rename(unfinished, target)
        sync(target.parent)
        # A rename leaves each file's times alone, so what was hashed a moment ago is known under its new path too.
        self.hashes.moved(unfinished, target)
        return target

    def _commit_remotely(
        self, remote: Remote, unfinished: Path, manifest: Manifest, check: Callable[[], None], stopped: Stopped
    ) -> Path:
        target = self.path(manifest)
        in_force = remote.commit(manifest, unfinished, check, stopped)
        if in_force.build_id != manifest.build_id:
            shutil.rmtree(unfinished)
            return target
        with self._locked(target):
            self._make_room(target)
            os.rename(unfinished, target)
            sync(target.parent)
        self.hashes.moved(unfinished, target)
        return target

    def unfinished_commit(self, unfinished: Path, stage: str, fingerprint: str) -> Manifest | None:
        """The manifest of a build that was broken off while its files were uploaded: all that is left of it to do is
        `commit`. None on a local root, where a commit takes no time."""
        manifest = _in_folder(unfinished) if self.remote else None
        if manifest is None or (manifest.stage, manifest.fingerprint) != (stage, fingerprint):
            return None
        if address_of(manifest) != fingerprint or self.content_digest(manifest.files) != manifest.digest:
            return None
        return manifest if self._has(unfinished, list(manifest.files)) else None

    def put_beside(self, manifest: Manifest, source: Path, name: str) -> None:
        """Copy a small file to aux/<name> of a finished artifact, where it is in the manifest but not in the digest. Do
        nothing if it is there already, or while the artifact is being rebuilt."""
        folder, path = self.path(manifest), f"{AUX}/{name}"
        data = source.read_bytes()
        added = File(path, len(data), hashlib.sha256(data).hexdigest())
        if self.remote is not None:
            current = self.remote.find(manifest.stage, manifest.fingerprint)
            if current is None or added in current.files:
                return
        elif (folder / path).is_file() and (folder / path).read_bytes() == data and _lists(self.read(folder), path):
            return
        lease = self.leases.acquire(f"{manifest.stage}/{manifest.fingerprint}", stop_if=lambda: True)
        if lease is None:
            return
        try:
            if self.remote is not None and not self.remote.change_aux(manifest, path, source, added):
                return
            current = _in_folder(folder)
            if current is None or current.digest != manifest.digest:
                return
            # The manifest never names a file that differs: first without it, then with it.
            other_files = tuple(file for file in current.files if file.path != path)
            if len(other_files) < len(current.files):
                replace(current, files=other_files).rewrite(folder)
            (folder / AUX).mkdir(exist_ok=True)
            hidden = folder / AUX / f".{name}"  # of one name: what a kill left is written over
            hidden.write_bytes(data)
            sync(hidden)
            hidden.replace(folder / path)
            replace(current, files=tuple(sorted((*other_files, added), key=lambda file: file.path))).rewrite(folder)
        finally:
            lease.release()

    def discard(self, manifest: Manifest) -> None:
        """Move a damaged artifact aside, so that it is never reused."""
        target = self.path(manifest)
        if target.exists():
            self._retire(target, None)

    def remove(self, folder: Path, manifest: Manifest | None) -> None:
        """Take a folder of artifacts or of work out of the store; for who holds its lease. One that is renamed first is
        no reader's artifact while it is deleted.

        Args:
            manifest: of an artifact, which on an object store goes there.
        """
        if self.remote is not None and manifest is not None and self._is_address(folder):
            self.remote.delete(manifest, folder.name)
            if not folder.exists():  # most have no copy here
                return
        self._move_to_trash(folder)

    def _retire(self, target: Path, old: Manifest | None) -> None:
        """Rename an artifact away from its address. A damaged one, or a folder that is none, is removed for good."""
        if old is not None and not self.differences(target, old):
            kept = target.with_name(f"{target.name}.{old.digest[:8]}")
            if not kept.exists():
                os.rename(target, kept)
                self.hashes.moved(target, kept)
                return
        self._move_to_trash(target)

    def _make_room(self, target: Path) -> None:
        """A whole copy of what another build replaced goes to its name; one that is damaged, or known there, goes."""
        copy = _in_folder(target)
        kept = target.with_name(f"{target.name}.{copy.digest[:8]}") if copy else target
        if copy is not None and not kept.exists() and self._has(target, list(copy.files)):
            os.rename(target, kept)
            self.hashes.moved(target, kept)
        elif target.exists():
            self._move_to_trash(target)

    def _move_to_trash(self, target: Path) -> None:
        trash = (
            self.layout.root / ".work" / ".trash" / f"{target.parent.name}-{target.name}-{os.getpid()}-{time.time_ns()}"
        )
        try:
            trash.parent.mkdir(parents=True, exist_ok=True)
            os.rename(target, trash)
        except OSError as error:
            if not is_full(error):
                raise
            # No room for a folder: without its manifest it is no artifact either.
            (target / MANIFEST).unlink(missing_ok=True)
            trash = target
        shutil.rmtree(trash, ignore_errors=True)


def _is_readable_text(file: File) -> bool:
    return file.size <= GLANCE_BYTES and file.path.endswith((".json", ".jsonl", ".md", ".html", ".jinja"))


def _in_folder(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _lists(manifest: Manifest | None, path: str) -> bool:
    return manifest is not None and any(file.path == path for file in manifest.files)


def address_of(manifest: Manifest) -> str:
    """Return the fingerprint of the request that a manifest records; empty if it has none."""
    if manifest.adopted is not None:
        return adopted_fingerprint(manifest.stage, manifest.digest)
    inputs = {name: item.identity for name, item in manifest.inputs.items()}
    sources = {record.key: record.digest for record in manifest.sources}
    try:
        return fingerprint(manifest.stage, manifest.version, manifest.identity, inputs, sources)
    except NoStableForm:
        return ""


def is_full(error: BaseException) -> bool:
    """Return True for the error of a write to a full disk or with a used up quota, also through SQLite."""
    return getattr(error, "errno", None) in DISK_FULL or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def is_of_the_disk(error: BaseException) -> bool:
    """Return True if the disk is full, fails or is read-only now: the work itself meets that too, and reports it."""
    if is_full(error) or getattr(error, "errno", None) in (errno.EIO, errno.EROFS):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)


def disk_error(error: OSError | sqlite3.OperationalError, stage: str, folder: Path) -> Exception:
    """Return the error a user should read for a failed write: a full disk is named as such, other errors unchanged."""
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
