"""The lineage of artifacts as nodes and edges for programs and pages, with what was dropped on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.io.json import read_own_json
from infra.store.ancestry import AncestryMember, LineageGraph
from infra.store.branches import branch_of
from infra.store.layout import AUX
from infra.store.manifest import Manifest, SourceRecord, store_root
from infra.store.store import Store


def lineage_document(graph: LineageGraph, store: Store) -> dict[str, Any]:
    """{"nodes": [...], "edges": [{"from", "to", "name", "requires", "same_bytes"}]}; edges go from parent to child."""
    read = {
        row["source"]: row
        for member in graph.artifacts
        if member.folder
        if member.manifest
        for row in _records(store, member.manifest, member.folder, "sources.json") or []
    }
    return {
        "nodes": [_node(member, read, store) for member in graph.members.values()],
        "edges": [
            {
                "from": link.parent,
                "to": link.child,
                "name": link.name,
                "requires": link.requires,
                "same_bytes": link.same_bytes,
            }
            for link in graph.links
        ],
    }


def _node(member: AncestryMember, read: dict[str, dict[str, Any]], store: Store) -> dict[str, Any]:
    if member.source is not None:
        return {"id": member.id, "kind": "source", **_source(member.source, read)}
    if member.manifest is not None and member.folder is not None:
        return {"id": member.id, "kind": "artifact", **_artifact(store, member.folder, member.manifest)}
    assert member.input is not None
    missing = member.input
    return {
        "id": member.id,
        "kind": "gone",
        "stage": missing.stage,
        "fingerprint": missing.fingerprint,
        "digest": missing.digest,
    }


def _artifact(store: Store, folder: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "stage": manifest.stage,
        "step": manifest.step or manifest.stage,
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest,
        "path": str(folder),
        **({"url": store.location(manifest)} if store.remote else {}),
        "pipeline": manifest.pipeline,
        "headline": manifest.result.get("headline", ""),
        "figures": dict(manifest.result.get("figures", {})),
        **_losses(store, folder, manifest),
        "continues": branch.as_json() if (branch := branch_of(manifest, store_root(folder))) else None,
        "settings": dict(manifest.identity),
        "version": manifest.version,
        "package": manifest.package,
        "code": dict(manifest.code),
        "lock_hash": manifest.lock_hash,
        "finished": manifest.finished,
        "build_id": manifest.build_id,
        "flow_run_id": manifest.flow_run_id,
        "adopted": manifest.adopted,
    }


def _losses(store: Store, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Documents that a stage took out, by rule, and unreadable records that it put aside."""
    losses: dict[str, Any] = {}
    if any(file.path == f"{AUX}/counts.json" for file in manifest.files):
        counts = _records(store, manifest, folder, "counts.json") or {}
        if isinstance(counts.get("dropped"), dict):
            losses = {"read": counts.get("read"), "kept": counts.get("kept"), "dropped": counts["dropped"]}
    quarantined = manifest.result.get("figures", {}).get("quarantined")
    return losses if quarantined is None else {**losses, "quarantined": int(quarantined)}


def _source(record: SourceRecord, read: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """read: what ingest counted of each source, by config key."""
    counted = read.get(record.key, {})
    return {
        "key": record.key,
        "digest": record.digest,
        "files": [{"path": path, "sha256": sha256} for path, sha256 in sorted(record.files.items())],
        **{key: counted[key] for key in ("documents", "quarantined", "origins") if key in counted},
    }


def _records(store: Store, manifest: Manifest, folder: Path, name: str) -> Any:
    """A file of an artifact's aux/, None if it is gone: it is a help to the reader, not the record."""
    path = f"{AUX}/{name}"
    try:
        return read_own_json(store.peek(manifest, path, folder=folder) / path)
    except (FileNotFoundError, ValueError):
        return None
