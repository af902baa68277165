"""Reads every byte of an artifact again and compares it with its manifest, and the manifest with itself."""

from __future__ import annotations

from pathlib import Path

from infra.store.ancestry import Family, Member
from infra.store.layout import MANIFEST
from infra.store.manifest import Manifest
from infra.store.store import Difference, Store


def verify(store: Store, folder: Path, manifest: Manifest) -> list[Difference]:
    """Every file that is missing, changed, unreadable or in no manifest, and a manifest that contradicts itself."""
    found = store.differences(folder, manifest, read_all=True)
    named = {folder / file.path for file in manifest.files} | {folder / MANIFEST}
    extra = sorted(path for path in folder.rglob("*") if not path.is_dir() and path not in named)
    return [*found, *(Difference(path, "in no manifest") for path in extra)]


def gone(store: Store, family: Family) -> list[tuple[Member, Difference]]:
    """The ancestors whose bytes are not in the store any more."""
    missing = [member for member in family.members.values() if member.kind == "gone" and member.input]
    return [
        (member, Difference(store.root / member.input.path, "missing: no artifact with its bytes is there"))
        for member in missing
        if member.input
    ]
