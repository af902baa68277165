"""The artifacts of a root on an object store, s3://bucket/prefix, which any number of machines share.

<url>/format                                    the version of this layout
<url>/leases.json                               the PostgreSQL in which the leases are, see `infra.leases.place`
<url>/<stage>/<fingerprint>/manifest.json       makes an artifact: put last, and only if none is there
<url>/<stage>/<fingerprint>.<digest8>/manifest.json   of what a later build of the same address replaced
<url>/.files/<stage>/<fingerprint>/<build id>/  the files that the manifest of that build names
<url>/runs/                                     what machines tell each other of runs, see `infra.store.bucket.runs`
<url>/pins.json                                 what `stemma gc --pin` keeps
<url>/promotions.json                           which registered models are promoted

No object is ever written over but manifest.json and promotions.json, and these only by a put on the condition that they
are what was read. So a build that ends midway, or loses a race, leaves files that no manifest names: they are no
artifact, and the next build of that address takes them away.

What a machine has seen of the manifests is kept in <cache>/.remote/<stage>/<name>.json, its ETag in the first line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from infra.errors import StageError, stage_error
from infra.io.files import sync
from infra.io.s3 import (
    AT_ONCE,
    S3Object,
    Stopped,
    download,
    list_folders,
    list_objects,
    object_at,
    read_object,
    side_by_side,
)
from infra.io.s3_write import UploadStopped, etag_of, put_if, remove, remove_below, upload
from infra.store.bucket.runs import RemoteRuns
from infra.store.layout import MANIFEST, RESERVED
from infra.store.manifest import File, Manifest
from infra.store.states import new_states

FILES = ".files"
EXTRA = "in no manifest"


class Remote:
    """The object store's side of a store. url: without a slash at its end. mirror: the folder of known manifests;
    scratch: one for files that are looked at and thrown away.

    Every call raises StageError as `infra.io.s3.persistently` does. stopped: asked before each request of many; where
    it says so Cancelled is raised.
    """

    def __init__(self, url: str, mirror: Path, scratch: Path) -> None:
        self.url = url
        self.runs = RemoteRuns(url)
        self._mirror = mirror
        self._scratch = scratch

    def find(self, stage: str, name: str) -> Manifest | None:
        """Return the current manifest of an artifact; None if there is none that this version can read."""
        stored = self._read(stage, name)
        return stored[0] if stored else None

    def stages(self) -> list[str]:
        return sorted(name for name in list_folders(self.url) if not name.startswith(".") and name not in RESERVED)

    def names(self, stage: str) -> list[str]:
        """The artifacts of a stage, replaced ones too: fingerprints, and those with a digest behind a dot."""
        return sorted(self._etags(stage))

    def all(self, stage: str) -> Iterator[tuple[str, Manifest]]:
        """Every artifact of a stage by its name, replaced ones too. Only manifests that are new here are read."""
        etags = self._etags(stage)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            manifests = pool.map(lambda name: self._read_cached(stage, name, etags[name]), sorted(etags))
            for name, manifest in zip(sorted(etags), manifests, strict=True):
                if manifest is not None:
                    yield name, manifest

    def place(self, manifest: Manifest) -> str:
        """The URL of an artifact that stands at its own address."""
        return f"{self.url}/{manifest.stage}/{manifest.fingerprint}"

    def file_url(self, manifest: Manifest, path: str) -> str:
        return f"{self._files(manifest)}/{path}"

    def differences(self, manifest: Manifest) -> list[tuple[str, str]]:
        """(URL, what) of each file that is missing or of another size; none is read."""
        sizes = self._sizes(manifest)
        return [
            (self.file_url(manifest, file.path), "missing" if file.path not in sizes else "changed")
            for file in manifest.files
            if sizes.get(file.path) != file.size
        ]

    def verify(self, manifest: Manifest) -> list[tuple[str, str]]:
        """(URL, what) of each file that differs from the manifest, every byte read, and of each that it has not."""
        listed_paths = {file.path for file in manifest.files}
        extra = [(self.file_url(manifest, path), EXTRA) for path in self._sizes(manifest) if path not in listed_paths]
        differences = self.differences(manifest)
        wrong = {url for url, _ in differences}
        remaining = [file for file in manifest.files if self.file_url(manifest, file.path) not in wrong]
        differences += [(self.file_url(manifest, file.path), "changed") for file in self._damaged(manifest, remaining)]
        return sorted([*differences, *extra])

    def _damaged(self, manifest: Manifest, files: list[File]) -> list[File]:
        """Those whose bytes are not what the manifest says."""
        self._scratch.mkdir(parents=True, exist_ok=True)

        def differs(file: File) -> bool:
            target = self._scratch / f"verified-{os.getpid()}-{threading.get_ident()}"
            try:
                self._download(manifest, file, target)
            except StageError as error:
                if error.problems[0].code != "damaged_object":
                    raise
                return True
            finally:
                target.unlink(missing_ok=True)
            return False

        results = zip(files, side_by_side(differs, files), strict=True)
        return [file for file, is_wrong in results if is_wrong]

    def fetch(self, manifest: Manifest, folder: Path, files: Iterable[File], stopped: Stopped = lambda: False) -> None:
        """Downloads files of an artifact to their places in a folder, each checked against its hash.

        Raises StageError `damaged_object` for one that differs, or is gone.
        """

        def fetch(file: File) -> None:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._download(manifest, file, target)
            sync(target)

        side_by_side(fetch, list(files), stopped)

    def commit(self, manifest: Manifest, folder: Path, check: Callable[[], None], stopped: Stopped) -> Manifest:
        """Upload the files of a build, make them the artifact at their address, and return the manifest there now.

        The returned manifest is another build's if that build has the same payload and every training state that this
        build kept, or if another machine was first. A whole artifact that was there before stays under
        `<fingerprint>.<digest8>`. check: called before the last step, after an upload that may take hours. Raises
        whatever `check` raises, and StageError `upload_lost` if files are gone by then.
        """
        current = self._read(manifest.stage, manifest.fingerprint)
        is_whole = current and current[0].digest == manifest.digest and self._is_whole(current[0], folder)
        if current and is_whole and not new_states(current[0], manifest):
            self._note_versions(*current, manifest)
            return self._remove_unreferenced(current[0])
        self._upload(manifest, folder, stopped)
        check()
        if lost := self.differences(manifest):
            raise stage_error("upload_lost", lost[0][0], f"it was uploaded, but is now {lost[0][1]}", "run again")
        is_other = current and current[0].digest != manifest.digest and not self.differences(current[0])
        if current and (is_whole or is_other):
            self._retire(current[0])
        if not self._put(manifest, manifest.fingerprint, current[1] if current else None):
            now = self._read(manifest.stage, manifest.fingerprint)
            if now is None:
                message = "its manifest changed while it was being replaced, and is gone"
                raise stage_error("artifact_lost", self.place(manifest), message, "run again")
            return self._remove_unreferenced(now[0])
        return self._remove_unreferenced(manifest)

    def delete(self, manifest: Manifest, name: str) -> None:
        """Takes an artifact away: first its manifest, then its files, unless another of its address names them too.

        name: that of its folder. Only for who holds the lease of its address.
        """
        remove([object_at(self._manifest_url(manifest.stage, name))])
        self._mirrored(manifest.stage, name).unlink(missing_ok=True)
        other_manifests = (
            self.find(manifest.stage, other_name)
            for other_name in self._etags(manifest.stage)
            if other_name.partition(".")[0] == manifest.fingerprint
        )
        if not any(other is None or other.build_id == manifest.build_id for other in other_manifests):
            remove_below(self._files(manifest))

    def change_aux(self, manifest: Manifest, path: str, source: Path, described: File) -> bool:
        """Puts a small file beside a finished artifact, in its manifest and outside of its digest. False where the
        artifact is another by now."""
        current = self._read(manifest.stage, manifest.fingerprint)
        if current is None or current[0].digest != manifest.digest:
            return False
        was, etag = current
        other_files = tuple(file for file in was.files if file.path != path)
        if described in was.files:
            return True
        # The manifest never names a file that differs: first without it, then with it.
        if len(other_files) < len(was.files):
            if not self._put(replace(was, files=other_files), was.fingerprint, etag):
                return False
            etag = self._etag(was)
        upload(source, self.file_url(was, path))
        files = tuple(sorted((*other_files, described), key=lambda file: file.path))
        return self._put(replace(was, files=files), was.fingerprint, etag)

    def _etag(self, manifest: Manifest) -> str:
        stored = self._read(manifest.stage, manifest.fingerprint)
        return stored[1] if stored else ""

    def _is_whole(self, manifest: Manifest, folder: Path) -> bool:
        """Return True if the payload of an artifact equals that of a folder byte for byte: a forced rebuild may be due
        to one wrong byte. If the ETag is inconclusive, the object is read."""
        if self.differences(manifest):
            return False
        objects = self._listed_files(manifest)
        payload = [file for file in manifest.files if file.is_payload]
        doubtful = {file.path for file in payload if objects[file.path].etag != etag_of(folder / file.path)}
        return not self._damaged(manifest, [file for file in payload if file.path in doubtful])

    def _upload(self, manifest: Manifest, folder: Path, stopped: Stopped) -> None:
        """Upload the missing files. Objects left by an interrupted upload are kept: an object exists whole or not at
        all."""
        sizes = self._sizes(manifest)
        pending = [file for file in manifest.files if sizes.get(file.path) != file.size]

        def put_file(file: File) -> None:
            with suppress(UploadStopped):  # asked again below
                upload(folder / file.path, self.file_url(manifest, file.path), stopped)

        side_by_side(put_file, pending, stopped)

    def _note_versions(self, kept: Manifest, etag: str, manifest: Manifest) -> None:
        """Records that other packages built the same, so that `--strict-versions` does not build it a third time."""
        if manifest.versions != kept.versions:
            self._put(replace(kept, reproduced_with=manifest.versions), kept.fingerprint, etag)

    def _retire(self, manifest: Manifest) -> None:
        name = f"{manifest.fingerprint}.{manifest.digest[:8]}"
        put_if(manifest.as_bytes(), self._manifest_url(manifest.stage, name), None)

    def _remove_unreferenced(self, manifest: Manifest) -> Manifest:
        """Remove the files below an address that no manifest there names, and return `manifest`."""
        stage, fingerprint = manifest.stage, manifest.fingerprint
        manifests = [self.find(stage, name) for name in self._etags(stage) if name.partition(".")[0] == fingerprint]
        kept = {manifest.build_id, *(other.build_id for other in manifests if other)}
        below = f"{self.url}/{FILES}/{stage}/{fingerprint}"
        for build in list_folders(below) if all(manifests) else ():  # the files of an unreadable manifest are not known
            if build not in kept:
                remove_below(f"{below}/{build}")
        return manifest

    def _put(self, manifest: Manifest, name: str, etag: str | None) -> bool:
        return put_if(manifest.as_bytes(), self._manifest_url(manifest.stage, name), etag)

    def _read(self, stage: str, name: str) -> tuple[Manifest, str] | None:
        url = self._manifest_url(stage, name)
        stored = read_object(url)
        if stored is None:
            return None
        self._remember(stage, name, *stored)
        try:
            return Manifest.parse(stored[0], url), stored[1]
        except ValueError:
            return None

    def _read_cached(self, stage: str, name: str, etag: str) -> Manifest | None:
        """The manifest with this ETag, from the mirror if it has it."""
        with suppress(OSError, ValueError):
            head, _, content = self._mirrored(stage, name).read_bytes().partition(b"\n")
            if head.decode() == etag:
                return Manifest.parse(content, self._manifest_url(stage, name))
        return self.find(stage, name)

    def _remember(self, stage: str, name: str, content: bytes, etag: str) -> None:
        path = self._mirrored(stage, name)
        hidden = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        with suppress(OSError):  # it saves a request the next time, no more
            path.parent.mkdir(parents=True, exist_ok=True)
            hidden.write_bytes(etag.encode() + b"\n" + content)
            hidden.replace(path)

    def _mirrored(self, stage: str, name: str) -> Path:
        return self._mirror / stage / f"{name}.json"

    def _etags(self, stage: str) -> dict[str, str]:
        """The ETag of each manifest of a stage, by the artifact's name."""
        beginning = object_at(f"{self.url}/{stage}/").key
        etags = {}
        for item in list_objects(f"{self.url}/{stage}/"):
            name, _, file = item.key.removeprefix(beginning).partition("/")
            if file == MANIFEST:
                etags[name] = item.etag
        return etags

    def _sizes(self, manifest: Manifest) -> dict[str, int]:
        return {path: item.size for path, item in self._listed_files(manifest).items()}

    def _listed_files(self, manifest: Manifest) -> dict[str, S3Object]:
        files_url = f"{self._files(manifest)}/"
        prefix = object_at(files_url).key
        return {item.key.removeprefix(prefix): item for item in list_objects(files_url)}

    def _files(self, manifest: Manifest) -> str:
        return f"{self.url}/{FILES}/{manifest.stage}/{manifest.fingerprint}/{manifest.build_id}"

    def _manifest_url(self, stage: str, name: str) -> str:
        return f"{self.url}/{stage}/{name}/{MANIFEST}"

    def _download(self, manifest: Manifest, file: File, target: Path) -> None:
        url = self.file_url(manifest, file.path)
        try:
            download(url, target, file.size, "sha256", file.sha256)
        except StageError as error:
            (problem,) = error.problems
            if problem.code not in ("bad_checksum", "missing_source"):
                raise
            reason = "is gone" if problem.code == "missing_source" else problem.message
            fix = f"rebuild it: stemma run CONFIG --force {manifest.step or manifest.stage}"
            message = f"a file of {manifest.stage}/{manifest.fingerprint}: {reason}"
            raise stage_error("damaged_object", url, message, fix) from None
