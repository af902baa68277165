"""A run, a config or an artifact that a person names to compare, as steps with settings, sources and artifacts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from evaluation.results.artifacts import Artifact, ancestors, read_artifacts
from flows.compare.measured import alike_or_newest
from flows.config.graph import graph
from flows.config.read import load
from flows.planning.plan import plan
from flows.runs.journal import RunJournal
from flows.runs.journal_forms import HAS_ARTIFACT
from infra.errors import ConfigError, Problem
from infra.fingerprint import canonical
from infra.store.ancestry import glance_at_ancestry
from infra.store.manifest import Manifest
from infra.store.measurements import measurement_of
from infra.store.reference import resolve
from infra.store.store import Store
from tasks.stage import Node
from tasks.stages import STAGES

_RUN = re.compile(r"\d{4}[0-9a-f-]*")


@dataclass(frozen=True)
class ComparedStep:
    """One step. identity: the settings that affect its result, without those at their default; config: all settings.

    sources: content digest of each outside source by its config key. artifact: None where it is not built.
    """

    stage: str
    version: int
    identity: Mapping[str, Any]
    config: Mapping[str, Any]
    sources: Mapping[str, str]
    artifact: Artifact | None


@dataclass(frozen=True)
class Compared:
    """One of the things that are compared.

    measured: of an artifact benchmarks and safety of the same bytes, the newest that were measured as those of the
    others; those of runs and configs are steps.
    own: the artifact that was named; None for runs and configs.
    """

    name: str
    kind: Literal["artifact", "run", "config"]
    summary: str
    steps: Mapping[str, ComparedStep]
    measured: Mapping[str, Artifact] = field(default_factory=dict)
    artifact: Artifact | None = None


def find(store: Store, texts: Sequence[str]) -> list[Compared]:
    """Resolve each text: a YAML file, the id of a run or its beginning, or an artifact as all commands take it.

    Raises ConfigError for a text that is none of these, and for artifacts mixed with runs or configs.
    """
    sides = [_find(store, text) for text in texts]
    artifacts = [side.name for side in sides if side.kind == "artifact"]
    if artifacts and len(artifacts) < len(sides):
        others = ", ".join(f"{side.name} is a {side.kind}" for side in sides if side.kind != "artifact")
        message = f"{artifacts[0]} is one artifact, {others}: these have no common steps"
        raise ConfigError(Problem("bad_comparison", texts[0], message, "compare artifacts, or runs and configs"))
    digests = [side.artifact.manifest.digest for side in sides if side.artifact and side.artifact.manifest]
    if len(digests) < len(sides):
        return sides
    return [
        replace(side, measured=measured) for side, measured in zip(sides, alike_or_newest(store, digests), strict=True)
    ]


class ModelOfStore(NamedTuple):
    """A model with its newest measurement, None where it has none."""

    folder: Path
    manifest: Manifest
    measurement: tuple[Path, Manifest] | None


def compared_models(store: Store, models: Sequence[ModelOfStore]) -> list[Compared]:
    """Return models to compare by their figures alone: without steps, which take most of the time of `find`."""
    sides = []
    for model in models:
        step = model.manifest.step or model.manifest.stage
        measured = Artifact(measurement_of(step), *model.measurement) if model.measurement else None
        artifact = Artifact(step, store.glance(model.manifest, model.folder), model.manifest, measured)
        name = f"{model.manifest.stage}/{model.folder.name}"
        sides.append(Compared(name, "artifact", artifact.headline or "no headline", {}, artifact=artifact))
    evaluations = alike_or_newest(store, [model.manifest.digest for model in models])
    return [replace(side, measured=measured) for side, measured in zip(sides, evaluations, strict=True)]


def _find(store: Store, text: str) -> Compared:
    if Path(text).suffix in (".yaml", ".yml"):
        return _config(store, text)
    if _RUN.fullmatch(text):
        return _run(store, text)
    makers = [name for name, stage in STAGES.items() if stage.makes_weights]
    return _artifact(store, *resolve(store, text, makers))


def _artifact(store: Store, folder: Path, manifest: Manifest) -> Compared:
    glance_at_ancestry(store, (folder, manifest))
    artifact = read_artifacts({manifest.step or manifest.stage: store.glance(manifest, folder)})[
        manifest.step or manifest.stage
    ]
    steps = {
        ancestor.manifest.step or ancestor.stage: _built(ancestor, ancestor.manifest)
        for ancestor in ancestors(artifact)
        if ancestor.manifest
    }
    name = f"{manifest.stage}/{manifest.fingerprint}"
    return Compared(name, "artifact", artifact.headline or "no headline", steps, artifact=artifact)


def _run(store: Store, text: str) -> Compared:
    runs = store.runs()
    ids = sorted(folder.name for folder in runs.iterdir()) if runs.is_dir() else []
    matches = [text] if text in ids else [id for id in ids if id.startswith(text)]
    if len(matches) != 1:
        message = f"{len(matches)} runs begin like this" if matches else f"no run of {store.root} begins like this"
        known = f"the newest are {', '.join(matches or ids[-3:])}" if ids else "run a pipeline first"
        raise ConfigError(Problem("unknown_run", text, message, known))
    journal = RunJournal(runs, matches[0])
    lines = {line["stage"]: line for line in journal.read() if line["kind"] == "stage"}
    # The store may have moved since: only the last two parts of a path are its own.
    paths = {name: Path(line["path"]) for name, line in lines.items() if line["status"] in HAS_ARTIFACT}
    folders = {name: store.root / path.parent.name / path.name for name, path in paths.items()}
    there = {name: store.glance(manifest, at) for name, at in folders.items() if (manifest := store.read(at))}
    steps = {
        name: _built(artifact, artifact.manifest)
        for name, artifact in read_artifacts(there).items()
        if artifact.manifest is not None
    }
    result = journal.result()
    lost = f", {len(folders) - len(steps)} artifacts no longer there" if len(steps) < len(folders) else ""
    summary = f"{result['status'] if result else 'not ended'}, {len(steps)} steps{lost}"
    return Compared(matches[0], "run", summary, steps)


def _config(store: Store, text: str) -> Compared:
    nodes = graph(load(Path(text), root=lambda: store.root))
    rows = plan(nodes, store)
    steps = {}
    for name, node in nodes.items():
        manifest, path = rows[name].manifest, rows[name].path
        if node.measures:
            continue
        measurement = rows.get(measurement_of(name))
        measured = (
            Artifact(measurement.node.id, measurement.path, measurement.manifest)
            if measurement and measurement.path
            else None
        )
        artifact = Artifact(name, path, manifest, measured) if manifest and path else None
        steps[name] = _built(artifact, manifest) if artifact and manifest else _unbuilt(node, store)
    built = sum(step.artifact is not None for step in steps.values())
    return Compared(text, "config", f"{built} of {len(steps)} steps built", steps)


def _built(artifact: Artifact, manifest: Manifest) -> ComparedStep:
    sources = {source.key: source.digest for source in manifest.sources}
    measured = artifact.measurement.manifest if artifact.measurement else None
    identity = measured.identity if measured else manifest.identity  # which has the keys of both
    return ComparedStep(manifest.stage, manifest.version, identity, manifest.config, sources, artifact)


def _unbuilt(node: Node, store: Store) -> ComparedStep:
    sources = store.hashes.digests(node.sources())
    identity, config = canonical(node.config, node.key, measuring=True), node.config.model_dump(mode="json")
    return ComparedStep(node.folder, node.stage.version, identity, config, sources, None)
