"""The artifacts of a root on an object store, s3://bucket/prefix, which any number of machines share.

<url>/format                                    the version of this layout
<url>/leases.json                               the PostgreSQL in which the leases are, see `infra.store.lease_place`
<url>/<stage>/<fingerprint>/manifest.json       makes an artifact: put last, and only if none is there
<url>/<stage>/<fingerprint>.<digest8>/manifest.json   of what a later build of the same address replaced
<url>/.files/<stage>/<fingerprint>/<build id>/  the files that the manifest of that build names
<url>/runs/<run id>.json                        the journal and the result of a pipeline run that ended
<url>/runs/going/<run id>.json                  a run that has not ended: its host, for `stemma gc`
<url>/pins.json                                 what `stemma gc --pin` keeps
<url>/promotions.json                           which registered models are promoted

No object is ever written over but manifest.json and promotions.json, and these only by a put on the condition that they
are what was read. So a build that ends midway, or loses a race, leaves files that no manifest names: they are no
artifact, and the next build of that address takes them away.

What a machine has seen of the manifests is kept in <cache>/.remote/<stage>/<name>.json, its ETag in the first line.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.errors import Cancelled, ConfigError, Problem, StageError, stage_error
from infra.files import sync
from infra.s3 import SCHEME, S3Object, download, list_folders, list_objects, persistently, read_object
from infra.s3_write import UploadStopped, etag_of, put, put_if, remove, remove_below, upload
from infra.store.layout import FORMAT, MANIFEST, MARKER, RESERVED
from infra.store.manifest import File, Manifest

FILES = ".files"
RUNS = "runs"
GOING = "going"
RUN_FILES = ("journal.jsonl", "result.json")
EXTRA = "in no manifest"
Stopped = Callable[[], bool]
AT_ONCE = 8
"""Requests side by side: most of the time of a small one is its way there and back."""
_FORMAT_LINE = f"{FORMAT}\n".encode()
_FIXES = {
    "missing_source": "make the bucket, or correct --root",
    "s3_credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a server of your own",
    "s3_refused": "look at the credentials and the bucket's policy: a root is listed, read and written",
}
_opened: set[tuple[str, str, bool]] = set()


class Remote:
    """The object store's side of a store. url: without a slash at its end. mirror: the folder of known manifests;
    scratch: one for files that are looked at and thrown away.

    Every call raises StageError as `infra.s3.persistently` does. stopped: asked before each request of many; where it
    says so Cancelled is raised.
    """

    def __init__(self, url: str, mirror: Path, scratch: Path) -> None:
        self.url = url
        self._mirror = mirror
        self._scratch = scratch

    def open(self, *, make: bool) -> None:
        """Looks once a process whether this is a root, and makes it one if it is empty and `make` says so.

        Raises ConfigError where the bucket is not there or does not let us in, for a place with anything else in it,
        for another format, and for a server that cannot put on a condition.
        """
        known = (self.url, os.environ.get("AWS_ENDPOINT_URL", ""), make)
        if known in _opened:
            return
        try:
            self._open(make)
        except StageError as error:
            (problem,) = error.problems
            if problem.code not in _FIXES:
                raise
            raise ConfigError(replace(problem, path="--root", fix=_FIXES[problem.code])) from None
        _opened.add(known)

    def _open(self, make: bool) -> None:
        place = f"{self.url}/{MARKER}"
        found = read_object(place)
        if found is None:
            if strange := _first_below(self.url):
                message = f"this is no root and not empty: it holds {strange}"
                raise ConfigError(Problem("not_a_store", self.url, message, "name a root, or an empty or new prefix"))
            if not make:
                return
            put_if(_FORMAT_LINE, place, None)
            if put_if(b"only if there is none", place, None):
                remove([_object(place)])
                message = "this server ignores `If-None-Match`: two machines could both commit one artifact there"
                fix = "AWS's S3 knows it, and servers of their own do in newer versions; or use a folder as --root"
                raise ConfigError(Problem("no_conditional_put", self.url, message, fix))
            found = read_object(place)
        if found is None or found[0] != _FORMAT_LINE:
            said = (found[0] if found else b"")[:20].decode(errors="replace").strip()
            message = f"this root has format {said!r}, this version of stemma reads format {FORMAT}"
            raise ConfigError(
                Problem("store_format", self.url, message, "use the version that wrote it, or another --root")
            )

    def find(self, stage: str, name: str) -> Manifest | None:
        """The manifest of an artifact as it is now; None if there is none that this version can read."""
        found = self._read(stage, name)
        return found[0] if found else None

    def stages(self) -> list[str]:
        return sorted(name for name in list_folders(self.url) if not name.startswith(".") and name not in RESERVED)

    def names(self, stage: str) -> list[str]:
        """The artifacts of a stage, replaced ones too: fingerprints, and those with a digest behind a dot."""
        return sorted(self._listed(stage))

    def all(self, stage: str) -> Iterator[tuple[str, Manifest]]:
        """Every artifact of a stage by its name, replaced ones too. Only manifests that are new here are read."""
        listed = self._listed(stage)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda name: self._known(stage, name, listed[name]), sorted(listed))
            for name, manifest in zip(sorted(listed), found, strict=True):
                if manifest is not None:
                    yield name, manifest

    def place(self, manifest: Manifest) -> str:
        """The URL of an artifact that stands at its own address."""
        return f"{self.url}/{manifest.stage}/{manifest.fingerprint}"

    def file_url(self, manifest: Manifest, path: str) -> str:
        return f"{self._files(manifest)}/{path}"

    def differences(self, manifest: Manifest) -> list[tuple[str, str]]:
        """(URL, what) of each file that is missing or of another size; none is read."""
        there = self._sizes(manifest)
        return [
            (self.file_url(manifest, file.path), "missing" if file.path not in there else "changed")
            for file in manifest.files
            if there.get(file.path) != file.size
        ]

    def verify(self, manifest: Manifest) -> list[tuple[str, str]]:
        """(URL, what) of each file that differs from the manifest, every byte read, and of each that it has not."""
        named = {file.path for file in manifest.files}
        extra = [(self.file_url(manifest, path), EXTRA) for path in self._sizes(manifest) if path not in named]
        known = self.differences(manifest)
        wrong = {url for url, _ in known}
        left = [file for file in manifest.files if self.file_url(manifest, file.path) not in wrong]
        known += [(self.file_url(manifest, file.path), "changed") for file in self._damaged(manifest, left)]
        return sorted([*known, *extra])

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

        found = zip(files, self._side_by_side(differs, files), strict=True)
        return [file for file, is_wrong in found if is_wrong]

    def fetch(self, manifest: Manifest, folder: Path, files: Iterable[File], stopped: Stopped = lambda: False) -> None:
        """Downloads files of an artifact to their places in a folder, each checked against its hash.

        Raises StageError `damaged_object` for one that differs, or is gone.
        """

        def fetch(file: File) -> None:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._download(manifest, file, target)
            sync(target)

        self._side_by_side(fetch, list(files), stopped)

    def commit(self, manifest: Manifest, folder: Path, check: Callable[[], None], stopped: Stopped) -> Manifest:
        """Uploads the files of a build and makes them the artifact of their address: what is it now, which is another
        where that one has the same payload, or where somebody else was first.

        One that was there and is whole stays under `<fingerprint>.<digest8>`. check: called before the last step, after
        an upload that may take hours. Raises what it raises, and StageError `upload_lost` where files are gone by then.
        """
        current = self._read(manifest.stage, manifest.fingerprint)
        if current and current[0].digest == manifest.digest and self._is_whole(current[0], folder):
            return self._settled(current[0])
        self._upload(manifest, folder, stopped)
        check()
        if lost := self.differences(manifest):
            raise stage_error("upload_lost", lost[0][0], f"it was uploaded, and is {lost[0][1]} now", "run again")
        if current is not None and current[0].digest != manifest.digest and not self.differences(current[0]):
            self._retire(current[0])
        if not self._put(manifest, manifest.fingerprint, current[1] if current else None):
            now = self._read(manifest.stage, manifest.fingerprint)
            if now is None:
                message = "its manifest changed while it was replaced, and is gone"
                raise stage_error("artifact_lost", self.place(manifest), message, "run again")
            return self._settled(now[0])
        return self._settled(manifest)

    def delete(self, manifest: Manifest, name: str) -> None:
        """Takes an artifact away: first its manifest, then its files, unless another of its address names them too.

        name: that of its folder. Only for who holds the lease of its address.
        """
        remove([_object(self._manifest_url(manifest.stage, name))])
        self._mirrored(manifest.stage, name).unlink(missing_ok=True)
        others = (
            self.find(manifest.stage, one)
            for one in self._listed(manifest.stage)
            if one.partition(".")[0] == manifest.fingerprint
        )
        if not any(one is None or one.build_id == manifest.build_id for one in others):
            remove_below(self._files(manifest))

    def change_aux(self, manifest: Manifest, path: str, source: Path, described: File) -> bool:
        """Puts a small file beside a finished artifact, in its manifest and outside of its digest. False where the
        artifact is another by now."""
        current = self._read(manifest.stage, manifest.fingerprint)
        if current is None or current[0].digest != manifest.digest:
            return False
        was, etag = current
        others = tuple(file for file in was.files if file.path != path)
        if described in was.files:
            return True
        # The manifest never names a file that differs: first without it, then with it.
        if len(others) < len(was.files):
            if not self._put(replace(was, files=others), was.fingerprint, etag):
                return False
            etag = self._etag(was)
        upload(source, self.file_url(was, path))
        files = tuple(sorted((*others, described), key=lambda file: file.path))
        return self._put(replace(was, files=files), was.fingerprint, etag)

    def put_run(self, folder: Path) -> None:
        """How a pipeline run ended and what it said, for machines that did not see it. folder: of its journal."""
        files = {name: (folder / name).read_text(encoding="utf8") for name in RUN_FILES}
        put(json.dumps(files).encode(), f"{self.url}/{RUNS}/{folder.name}.json")

    def run_begins(self, run_id: str, about: dict[str, str]) -> None:
        put(json.dumps(about).encode(), self._going(run_id))

    def run_ends(self, run_id: str) -> None:
        remove([_object(self._going(run_id))])

    def going(self, longest_s: float) -> list[dict[str, str]]:
        """What the runs that have not ended said when they began; one that did so longer ago is taken for dead."""
        found = []
        for item in list_objects(f"{self.url}/{RUNS}/{GOING}/"):
            if time.time() - item.modified < longest_s and (content := read_object(str(item))):
                found.append({"run_id": item.name.removesuffix(".json"), **json.loads(content[0])})
        return found

    def _going(self, run_id: str) -> str:
        return f"{self.url}/{RUNS}/{GOING}/{run_id}.json"

    def fetch_runs(self, runs: Path) -> None:
        """Brings the runs of other machines that ended to the folder of journals here."""

        def fetch(url: str) -> None:
            if (found := read_object(url)) is None:
                return
            folder = runs / url.rpartition("/")[2].removesuffix(".json")
            folder.mkdir(parents=True, exist_ok=True)
            for name in RUN_FILES:  # the result last: it stands for all of them
                hidden = folder / f".{name}.{os.getpid()}"
                hidden.write_text(json.loads(found[0])[name], encoding="utf8")
                hidden.replace(folder / name)

        beginning = f"{_key(self.url)}{RUNS}/"
        items = [item for item in list_objects(f"{self.url}/{RUNS}/") if "/" not in item.key.removeprefix(beginning)]
        new = [str(item) for item in items if not (runs / item.name.removesuffix(".json") / RUN_FILES[-1]).exists()]
        self._side_by_side(fetch, new)

    def _etag(self, manifest: Manifest) -> str:
        found = self._read(manifest.stage, manifest.fingerprint)
        return found[1] if found else ""

    def _is_whole(self, manifest: Manifest, folder: Path) -> bool:
        """Whether the payload of an artifact is that of a folder, to the byte: whoever builds it again by force may do
        so since a byte of it is wrong. Where an ETag does not tell, the object is read."""
        if self.differences(manifest):
            return False
        there = self._listed_files(manifest)
        payload = [file for file in manifest.files if file.is_payload]
        doubtful = {file.path for file in payload if there[file.path].etag != etag_of(folder / file.path)}
        return not self._damaged(manifest, [file for file in payload if file.path in doubtful])

    def _upload(self, manifest: Manifest, folder: Path, stopped: Stopped) -> None:
        """What an upload that was broken off left is kept: an object is there whole or not at all."""
        there = self._sizes(manifest)
        left = [file for file in manifest.files if there.get(file.path) != file.size]

        def put_file(file: File) -> None:
            with suppress(UploadStopped):  # asked again below
                upload(folder / file.path, self.file_url(manifest, file.path), stopped)

        self._side_by_side(put_file, left, stopped)

    def _retire(self, manifest: Manifest) -> None:
        name = f"{manifest.fingerprint}.{manifest.digest[:8]}"
        put_if(manifest.as_bytes(), self._manifest_url(manifest.stage, name), None)

    def _settled(self, manifest: Manifest) -> Manifest:
        """Takes away the files below an address that no manifest there names."""
        stage, fingerprint = manifest.stage, manifest.fingerprint
        named = [self.find(stage, name) for name in self._listed(stage) if name.partition(".")[0] == fingerprint]
        kept = {manifest.build_id, *(one.build_id for one in named if one)}
        below = f"{self.url}/{FILES}/{stage}/{fingerprint}"
        for build in list_folders(below) if all(named) else ():  # of one that cannot be read nobody knows its files
            if build not in kept:
                remove_below(f"{below}/{build}")
        return manifest

    def _put(self, manifest: Manifest, name: str, etag: str | None) -> bool:
        return put_if(manifest.as_bytes(), self._manifest_url(manifest.stage, name), etag)

    def _read(self, stage: str, name: str) -> tuple[Manifest, str] | None:
        url = self._manifest_url(stage, name)
        found = read_object(url)
        if found is None:
            return None
        self._remember(stage, name, *found)
        try:
            return Manifest.parse(found[0], url), found[1]
        except ValueError:
            return None

    def _known(self, stage: str, name: str, etag: str) -> Manifest | None:
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

    def _listed(self, stage: str) -> dict[str, str]:
        """The ETag of each manifest of a stage, by the artifact's name."""
        beginning = f"{_key(self.url)}{stage}/"
        found = {}
        for item in list_objects(f"{self.url}/{stage}/"):
            name, _, file = item.key.removeprefix(beginning).partition("/")
            if file == MANIFEST:
                found[name] = item.etag
        return found

    def _sizes(self, manifest: Manifest) -> dict[str, int]:
        return {path: item.size for path, item in self._listed_files(manifest).items()}

    def _listed_files(self, manifest: Manifest) -> dict[str, S3Object]:
        place = f"{self._files(manifest)}/"
        prefix = _object(place).key
        return {item.key.removeprefix(prefix): item for item in list_objects(place)}

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
            what = "is gone" if problem.code == "missing_source" else problem.message
            fix = f"build it again: stemma run CONFIG --force {manifest.step or manifest.stage}"
            message = f"a file of {manifest.stage}/{manifest.fingerprint}: {what}"
            raise stage_error("damaged_object", url, message, fix) from None

    @staticmethod
    def _side_by_side(call: Callable[[Any], Any], items: list[Any], stopped: Stopped = lambda: False) -> list[Any]:
        """What each call returned. The first error ends those that have not begun."""

        def go_on(item: Any) -> Any:
            if stopped():
                raise Cancelled
            found = call(item)
            if stopped():
                raise Cancelled
            return found

        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(go_on, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _object(url: str) -> S3Object:
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    return S3Object(bucket, key, 0, "")


def _key(url: str) -> str:
    """What the keys below a URL begin with."""
    key = _object(url).key
    return f"{key}/" if key else ""


def _first_below(url: str) -> str:
    """One of the keys below a URL, without asking for all of them; empty if there is none."""
    from infra.s3 import client

    place = _object(url)
    prefix = _key(url)
    found = persistently(url, lambda: client().list_objects_v2(Bucket=place.bucket, Prefix=prefix, MaxKeys=1))
    return next((str(row["Key"]) for row in found.get("Contents", [])), "")
