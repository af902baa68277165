"""Artifacts that were made elsewhere: copied in with their provenance, and used unchanged from then on."""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from pathlib import Path

from infra.errors import ConfigError, Problem, stage_error
from infra.fingerprint import adopted_fingerprint, digest_files
from infra.lineage.messages import new_build_id
from infra.project import code_state, lock_hash, user_name
from infra.store.layout import AUX, MANIFEST
from infra.store.manifest import File, Manifest, SourceRecord, iso_time
from infra.store.store import Store, disk_error
from tasks.building.payloads import check_payload, describe
from tasks.stage import Node
from tasks.stages import STAGES

FOREIGN_MANIFEST = f"{AUX}/adopted_manifest.json"


def adopted_artifact(node: Node, store: Store, *, read_all: bool = False) -> Manifest:
    """The artifact that a config adopts for a step, verified. Raises StageError if it is missing or damaged."""
    stage, fingerprint = node.folder, node.adopted or ""
    manifest = store.find(stage, fingerprint)
    again = f"stemma adopt {stage} FOLDER imports it again"
    if manifest is None:
        raise stage_error(
            "adopted_missing",
            f"adopted.{node.id}",
            f"there is no artifact {stage}/{fingerprint} in {store.place}",
            again,
        )
    if damage := store.differences(store.path(manifest), manifest, read_all=read_all):
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise stage_error("adopted_damaged", f"adopted.{node.id}", f"its artifact is damaged: {damage[0]}{more}", again)
    return manifest


def adopt(store: Store, stage: str, folder: Path, note: str = "") -> tuple[Path, Manifest, bool]:
    """Copy a folder into the store as an artifact of a stage; return its path, its manifest, and True if it is new.

    The copy's address comes from the stage and the bytes, so that the same folder adopted twice is one artifact.
    Raises ConfigError naming everything that is not a valid payload of this stage, and StageError for a full disk.
    """
    source = folder.absolute()
    check_payload(stage, source)
    store.leases.check()
    work = store.layout.work(stage, f"adopt-{uuid.uuid4().hex[:12]}")
    unfinished = work / "artifact"
    started = time.time()
    try:
        try:
            origins = _copy(source, unfinished)
        except OSError as error:
            raise disk_error(error, f"the copy of {source}", store.root) from error
        files = store.describe_files(unfinished)
        digest = store.content_digest(files)
        _compare_with_own_manifest(source, unfinished, files)
        name = adopted_fingerprint(stage, digest)
        lease = store.leases.acquire(f"{stage}/{name}")
        assert lease is not None
        try:
            known = store.find(stage, name)
            if known and not store.differences(store.path(known), known, read_all=True):
                return store.path(known), known, False
            manifest = _manifest(stage, name, digest, source, note, files, origins, started)
            if known:
                store.discard(known)
            return store.commit(unfinished, manifest), manifest, True
        finally:
            lease.release()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy(source: Path, target: Path) -> dict[str, Path]:
    """Copy every file but hidden ones; return where each came from. Bytes, not links: the original may change."""
    origins = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        name = FOREIGN_MANIFEST if relative.as_posix() == MANIFEST else relative.as_posix()
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
        origins[name] = path
    return origins


def _compare_with_own_manifest(source: Path, copy: Path, files: tuple[File, ...]) -> None:
    """Check that an artifact of another store matches its own manifest."""
    if not (copy / FOREIGN_MANIFEST).exists():
        return
    try:
        manifest = Manifest.read(source)
    except (ValueError, TypeError, KeyError):
        return
    payload = [file for file in files if file.is_payload]
    if digest_files((file.path, file.sha256) for file in payload) != manifest.digest:
        message = "its files do not match its manifest"
        raise ConfigError(
            Problem(
                "damaged", str(source), message, "stemma verify, in the store that it comes from, lists the differences"
            )
        )


def _manifest(
    stage: str,
    fingerprint: str,
    digest: str,
    source: Path,
    note: str,
    files: tuple[File, ...],
    origins: dict[str, Path],
    started: float,
) -> Manifest:
    hashes = {file.path: file.sha256 for file in files if file.is_payload}
    finished = time.time()
    return Manifest(
        stage=stage,
        version=0,
        fingerprint=fingerprint,
        digest=digest,
        build_id=new_build_id(),
        config={},
        identity={},
        inputs={},
        requires={},
        # The original files are recorded as its sources, so that lineage leads from them to their descendants.
        sources=(SourceRecord("adopted", digest, {str(origins[name]): sha256 for name, sha256 in hashes.items()}),),
        files=files,
        result={"figures": {}, "headline": describe(source)},
        makes=STAGES[stage].makes,
        code=code_state(),
        lock_hash=lock_hash(),
        host=socket.gethostname(),
        started=iso_time(started),
        finished=iso_time(finished),
        seconds=round(max(0.0, finished - started), 3),
        adopted={
            "from": str(source),
            "host": socket.gethostname(),
            "user": user_name(),
            "when": iso_time(started),
            "note": note,
        },
    )
