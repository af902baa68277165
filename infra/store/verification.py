"""Reads every byte of an artifact again and compares it with its manifest, and the manifest with itself."""

from __future__ import annotations

from pathlib import Path

from infra.identity import digest_files, fingerprint
from infra.store.ancestry import Family, Member
from infra.store.layout import MANIFEST
from infra.store.manifest import Manifest
from infra.store.store import Difference, Store


def adopted_fingerprint(stage: str, digest: str) -> str:
    """The address of an artifact that was made elsewhere: its stage and its bytes."""
    return fingerprint(stage, 0, {"adopted": digest}, {}, {})


def verify(store: Store, folder: Path, manifest: Manifest) -> list[Difference]:
    """Every file that is missing, changed, unreadable or in no manifest, and a manifest that contradicts itself."""
    found = store.differences(folder, manifest, read_all=True)
    named = {folder / file.path for file in manifest.files} | {folder / MANIFEST}
    extra = sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in named)
    return [*found, *(Difference(path, "in no manifest") for path in extra), *_contradictions(folder, manifest)]


def gone(store: Store, family: Family) -> list[tuple[Member, Difference]]:
    """The ancestors whose bytes are not in the store any more."""
    missing = [member for member in family.members.values() if member.kind == "gone" and member.input]
    return [
        (member, Difference(store.root / member.input.path, "missing: no artifact with its bytes is there"))
        for member in missing
        if member.input
    ]


def _contradictions(folder: Path, manifest: Manifest) -> list[Difference]:
    payload = digest_files((file.path, file.sha256) for file in manifest.files if file.is_payload)
    if payload != manifest.digest:
        return [Difference(folder / MANIFEST, "changed: its digest is not that of the files it names")]
    if manifest.adopted is not None:
        expected = adopted_fingerprint(manifest.stage, manifest.digest)
    else:
        inputs = {name: item.digest for name, item in manifest.inputs.items()}
        sources = {record.key: record.digest for record in manifest.sources}
        expected = fingerprint(manifest.stage, manifest.version, manifest.identity, inputs, sources)
    if expected != manifest.fingerprint or folder.name.partition(".")[0] != manifest.fingerprint:
        return [Difference(folder / MANIFEST, "changed: what it says was asked for does not give its address")]
    return []
