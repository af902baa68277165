"""The lineage of an artifact, from manifests alone: its ancestors and its descendants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.store.manifest import InputArtifact, Manifest, SourceRecord
from infra.store.store import Difference, Store


@dataclass(frozen=True)
class AncestryMember:
    """One node of a lineage graph: an artifact, a source outside the store, or an artifact that is not there any more.

    id: of an artifact its place in the store, `clean/2f20dd552d78493b`; of a source `source/` and its cut digest.
    """

    id: str
    kind: Literal["artifact", "source", "gone"]
    folder: Path | None = None
    manifest: Manifest | None = None
    source: SourceRecord | None = None
    input: InputArtifact | None = None
    """For an artifact that is gone: the input record that names it."""
    stand_in: Manifest | None = None
    """For an artifact that is gone: another artifact at the same address, made from the same inputs."""


@dataclass(frozen=True)
class Link:
    """`child` was made from `parent`.

    name: what the child calls it. requires: it had to exist first, but its bytes do not affect the child. same_bytes:
    the child was built from another artifact, whose bytes are identical to the parent's.
    """

    parent: str
    child: str
    name: str
    requires: bool = False
    same_bytes: bool = False


@dataclass
class LineageGraph:
    """Members by id, the one that was asked about first, and the links between them."""

    members: dict[str, AncestryMember] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)

    @property
    def artifacts(self) -> list[AncestryMember]:
        return [member for member in self.members.values() if member.kind == "artifact"]

    def add(self, member: AncestryMember) -> bool:
        """Add a member. Return False if it is known already."""
        if member.id in self.members:
            return False
        self.members[member.id] = member
        return True


def artifact_member(store: Store, folder: Path, manifest: Manifest) -> AncestryMember:
    """An artifact of this store, or of another folder, as a node of a lineage graph."""
    path = folder.absolute()
    is_in_store = path.is_relative_to(store.root)
    return AncestryMember(
        path.relative_to(store.root).as_posix() if is_in_store else str(path), "artifact", path, manifest
    )


def locate(store: Store, reference: InputArtifact) -> tuple[Path, Manifest] | None:
    """Return the artifact with an input's exact bytes: at its address, or where a later build of it moved them."""
    path = store.root / reference.path
    for folder in (path, path.with_name(f"{path.name}.{reference.digest[:8]}")):
        manifest = store.read(folder)
        if manifest is not None and manifest.digest == reference.digest:
            return folder, manifest
    return None


def ancestry(store: Store, starts: Iterable[tuple[Path, Manifest]]) -> LineageGraph:
    """Return these artifacts, their ancestors and all that they require, with outside sources as leaves."""
    graph = LineageGraph()
    parents: dict[tuple[str, str], AncestryMember] = {}

    def parent_of(reference: InputArtifact) -> AncestryMember:
        key = (reference.path, reference.digest)
        if key not in parents:
            located = locate(store, reference)
            parents[key] = artifact_member(store, *located) if located else _missing_member(store, reference)
        return parents[key]

    queue = deque(artifact_member(store, folder, manifest) for folder, manifest in starts)
    while queue:
        child = queue.popleft()
        manifest = child.manifest or child.stand_in
        if not graph.add(child) or manifest is None:
            continue
        for name, reference, requires in _inputs(manifest):
            parent = parent_of(reference)
            graph.links.append(Link(parent.id, child.id, name, requires))
            queue.append(parent)
        for record in manifest.sources:
            source = source_member(record)
            graph.add(source)
            graph.links.append(Link(source.id, child.id, record.key))
    return graph


def glance_at_ancestry(store: Store, start: tuple[Path, Manifest]) -> None:
    """Fetch each ancestor's results, but not its data, to this machine, if the store is on an object store."""
    if store.remote is not None:
        for member in ancestry(store, [start]).artifacts:
            if member.manifest is not None:
                store.glance(member.manifest, member.folder)


def missing(store: Store, graph: LineageGraph) -> list[tuple[AncestryMember, Difference]]:
    """Return the ancestors whose bytes are no longer in the store."""
    return [
        (member, Difference(store.root / member.input.path, "missing: no artifact with its bytes is there"))
        for member in graph.members.values()
        if member.kind == "gone" and member.input
    ]


Reader = tuple[Path, Manifest, str, InputArtifact, bool]
"""An artifact that has another as an input: its folder and manifest, the name and record of the input, and whether it
only required the input."""
Readers = Mapping[tuple[str, str], Sequence[Reader]]
"""Readers of each artifact, by its stage and digest."""


def readers_of(manifests: Iterable[tuple[Path, Manifest]]) -> Readers:
    """Return the artifacts that read each artifact."""
    readers: dict[tuple[str, str], list[Reader]] = {}
    for folder, manifest in manifests:
        for name, reference, requires in _inputs(manifest):
            reader = (folder, manifest, name, reference, requires)
            readers.setdefault((reference.stage, reference.digest), []).append(reader)
    return readers


def descent(store: Store, start: AncestryMember, readers: Readers | None = None) -> LineageGraph:
    """Return everything that descends from the bytes of an artifact or outside source, wherever those bytes are.

    Args:
        readers: of the whole store, where they are known.
    """
    graph = LineageGraph()
    graph.add(start)
    if readers is None:
        readers = readers_of(store.manifests())
    queue = deque([start])
    for folder, manifest in store.manifests() if start.source else ():
        for record in manifest.sources:
            if start.source and _share_bytes(start.source, record):
                child = artifact_member(store, folder, manifest)
                graph.links.append(Link(start.id, child.id, record.key))
                if graph.add(child):
                    queue.append(child)
    while queue:
        parent = queue.popleft()
        if parent.manifest is None:
            continue
        parent_manifest = parent.manifest
        of_parent = readers.get((parent_manifest.stage, parent_manifest.digest), [])
        for folder, manifest, name, reference, requires in of_parent:
            child = artifact_member(store, folder, manifest)
            same_bytes = reference.fingerprint != parent_manifest.fingerprint
            graph.links.append(Link(parent.id, child.id, name, requires, same_bytes))
            if graph.add(child):
                queue.append(child)
    return graph


def _missing_member(store: Store, reference: InputArtifact) -> AncestryMember:
    folders = store.folders(reference.stage)
    same_address = (store.read(folder) for folder in folders if folder.name.partition(".")[0] == reference.fingerprint)
    stand_in = next((manifest for manifest in same_address if manifest is not None), None)
    return AncestryMember(f"{reference.path}.{reference.digest[:8]}", "gone", input=reference, stand_in=stand_in)


def source_member(record: SourceRecord) -> AncestryMember:
    return AncestryMember(f"source/{record.digest[:16]}", "source", source=record)


def file_member(path: str, sha256: str) -> AncestryMember:
    """A file outside the store; path or sha256 empty where it is not known."""
    return AncestryMember(f"source/{sha256[:16] or path}", "source", source=SourceRecord("", sha256, {path: sha256}))


def _share_bytes(sought: SourceRecord, record: SourceRecord) -> bool:
    """True if one of the wanted files was read, by its path then or by its bytes."""
    if sought.digest == record.digest:
        return True
    hashes = set(record.files.values())
    return any(path in record.files or sha256 in hashes for path, sha256 in sought.files.items())


def _inputs(manifest: Manifest) -> list[tuple[str, InputArtifact, bool]]:
    return [
        *((name, reference, False) for name, reference in manifest.inputs.items()),
        *((name, reference, True) for name, reference in manifest.requires.items()),
    ]
