"""Plan of a run before anything runs: each stage as reuse or build, and why."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from corpus.config import READS_RECORDS
from flows.config.graph import Graph, ancestors
from infra.errors import MissingUpstream, Problem, StageError, StemmaError
from infra.project import default_root
from infra.store.manifest import Manifest
from infra.store.store import Store
from tasks.building.adopted import adopted_artifact
from tasks.building.build import build_request
from tasks.building.explain import Change, changes, find, made_by_others, unreadable
from tasks.building.promoted import held_against
from tasks.stage import Node

NAMED_UPSTREAM = 4
"""Stages that a stage waits for which are named; `stemma check --needs` lists all that it reads."""


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan. fingerprint is None while it depends on a stage that is yet to be built.

    because: what changed; for a stage that waits for others, which of them will be built.
    made_by: of what is reused, the versions that made it and are not those that are installed.
    """

    node: Node
    status: Literal["build", "reuse"]
    because: tuple[Change, ...] = ()
    fingerprint: str | None = None
    manifest: Manifest | None = None
    path: Path | None = None
    made_by: tuple[Change, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.node.id,
            "uses": self.node.stage.name,
            "status": self.status,
            "because": [str(change) for change in self.because],
            "changes": [
                {"what": change.what, "key": change.key, "old": change.old, "new": change.new}
                for change in self.because
            ],
            "fingerprint": self.fingerprint,
            "digest": self.manifest.digest if self.manifest else None,
            "artifact": f"{self.manifest.stage}/{self.manifest.fingerprint}" if self.manifest else None,
            "path": str(self.path) if self.path else None,
            "made_by": [str(change) for change in self.made_by],
            "seconds": self.manifest.seconds if self.manifest else None,
            "mlflow_run_id": self.manifest.mlflow_run_id if self.manifest else None,
        }


def plan(
    nodes: Graph,
    store: Store,
    force: tuple[str, ...] = (),
    *,
    read_all: bool = False,
    look: bool = False,
    strict_versions: bool = False,
) -> dict[str, PlannedStage]:
    """Every stage's row. Raises StageError with every missing source.

    Args:
        look: whether to read the first records of the sources of what is to be built too, and raise what is wrong
            there.
        strict_versions: whether what other versions of packages made is built again.
    """
    rows: dict[str, PlannedStage] = {}
    problems: list[Problem] = []
    for node in nodes.values():
        try:
            rows[node.id] = _row(node, rows, store, node.id in force, read_all, strict_versions)
        except StemmaError as error:
            problems += map(node.relocated, error.problems)
            rows[node.id] = PlannedStage(node, "build", (Change("none", "a source is missing"),))
        if look and rows[node.id].status == "build":
            problems += map(node.relocated, _of_first_records(node))
    if problems:
        # What names a source's files is read for its digest and for its first records.
        raise StageError(*dict.fromkeys(problems))
    return rows


def _of_first_records(node: Node) -> list[Problem]:
    if not isinstance(node.config, READS_RECORDS):
        return []
    from corpus.recognition.first_records import first_record_problems

    return first_record_problems(node.config)


def _row(
    node: Node, rows: dict[str, PlannedStage], store: Store, forced: bool, read_all: bool, strict_versions: bool
) -> PlannedStage:
    if node.adopted:
        taken = adopted_artifact(node, store, read_all=read_all)
        return PlannedStage(node, "reuse", (), node.adopted, taken, store.path(taken))
    waits_for = [name for name in dict.fromkeys(node.inputs.values()) if rows[name].manifest is None]
    if waits_for:
        store.hashes.digests(node.sources())  # reports now what is missing, not when its turn comes
        more = len(waits_for) - NAMED_UPSTREAM
        message = ", ".join(waits_for if more <= 1 else waits_for[:NAMED_UPSTREAM])
        message += f" and {more} others" if more > 1 else ""
        return PlannedStage(
            node, "build", (Change("upstream", f"{message} will be built; reused if its bytes are the same"),)
        )
    inputs = {key: rows[name].manifest for key, name in node.inputs.items()}
    there = {key: manifest for key, manifest in inputs.items() if manifest}
    node = held_against(node, there, store)
    request = build_request(node, there, store)
    manifest = find(node, request, store)
    if manifest is None and (message := unreadable(request, store)):
        return PlannedStage(node, "build", (Change("damaged", message),), request.fingerprint)
    if manifest is None:
        because = tuple(changes(request, (other for _, other in store.manifests(node.folder))))
        return PlannedStage(node, "build", because, request.fingerprint)
    folder = store.path(manifest)
    if damage := store.differences(folder, manifest, read_all=read_all):
        message = f"its artifact is damaged: {damage[0]}"
        return PlannedStage(node, "build", (Change("damaged", message),), request.fingerprint)
    if forced:
        return PlannedStage(node, "build", (Change("forced", "forced"),), request.fingerprint, None, None)
    others = tuple(made_by_others(node, manifest))
    if others and strict_versions:
        return PlannedStage(node, "build", others, request.fingerprint)
    return PlannedStage(node, "reuse", (), manifest.fingerprint, manifest, folder, others)


def run_command(config_path: str, store: Store, *words: str) -> str:
    """The command, as a shell takes it, that runs a config on this store."""
    root = [] if store.root == default_root() else ["--root", store.place]
    return shlex.join(["stemma", "run", config_path, *words, *root])


def locate_upstream(nodes: Graph, chosen: list[str], store: Store, config_path: str) -> dict[str, Manifest]:
    """The artifacts that the chosen stages need from stages that are not chosen.

    Raises MissingUpstream with, for each that does not exist, the command that builds it.
    """
    needed = {up for name in chosen for up in nodes[name].upstream if up not in chosen}
    if not needed:
        return {}
    rows = plan(nodes, store)
    missing: dict[str, Problem] = {}
    manifests: dict[str, Manifest] = {}
    for name in nodes:
        if name not in needed:
            continue
        manifest = rows[name].manifest
        if manifest is None:
            user = next(other for other in chosen if name in nodes[other].upstream)
            missing[name] = Problem(
                "missing_upstream",
                name,
                f"{user} needs the artifact of {name}, which does not exist ({rows[name].because[0]})",
                run_command(config_path, store, "--until", name),
            )
        else:
            manifests[name] = manifest
    # The command that builds one also builds what that one needs: no need to name those too.
    implied = {up for name in missing for up in ancestors(nodes, [name]) if up != name}
    if missing:
        raise MissingUpstream(*(problem for name, problem in missing.items() if name not in implied))
    return manifests
