"""Finished artifacts as their readers see them: manifest, figures, and the artifacts that they descend from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store.manifest import Manifest

FAMILY_ORDER = (
    "ingest", "validate", "clean", "dedupe", "benchmark_text", "decontaminate", "mix", "validate_clean", "tokenizer",
    "shard",
    "validate_shards", "corpus_report", "pretrain",
    "base_model", "instructions",
    "validate_instructions", "sft", "preferences", "validate_preferences", "reward_model", "rlhf",
)  # fmt: skip
"""How stages are told of where order is free: as the text flows."""


@dataclass(frozen=True)
class Artifact:
    """One finished artifact.

    id: the stage id in the pipeline, e.g. `benchmarks_sft`. manifest: None for a folder that no store made.
    """

    id: str
    folder: Path
    manifest: Manifest | None

    @property
    def stage(self) -> str:
        return self.manifest.stage if self.manifest else self.id

    @property
    def figures(self) -> dict[str, float]:
        """The figures of its result; empty without a manifest."""
        if self.manifest is None:
            return {}
        figures = self.manifest.result.get("figures", {})
        return {name: float(value) for name, value in figures.items()}

    @property
    def headline(self) -> str:
        return str(self.manifest.result.get("headline", "")) if self.manifest else ""

    def read_json(self, name: str) -> Any:
        """A JSON file of the artifact; None where there is none."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """A JSON-lines file of the artifact; empty where there is none."""
        path = self.folder / name
        if not path.is_file():
            return []
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]


def read_artifacts(inputs: Mapping[str, Path]) -> dict[str, Artifact]:
    """The artifacts by input name."""
    return {name: Artifact(name, folder, _manifest(folder)) for name, folder in inputs.items()}


def ancestors(artifact: Artifact) -> list[Artifact]:
    """What an artifact descends from, as far as it still lies in the store, the farthest first and itself last."""
    found: dict[tuple[str, str], Artifact] = {}
    for one in _walk(artifact):
        if one.manifest:
            found.setdefault((one.stage, one.manifest.fingerprint), one)
    order = {stage: place for place, stage in enumerate(FAMILY_ORDER)}
    return sorted(found.values(), key=lambda one: (order.get(one.stage, len(order)), one.id))


def _walk(artifact: Artifact) -> Iterator[Artifact]:
    yield artifact
    if artifact.manifest is None:
        return
    root = artifact.folder.parent.parent
    for wanted in artifact.manifest.inputs.values():
        manifest = _manifest(root / wanted.path)
        if manifest is not None and manifest.digest == wanted.digest:
            yield from _walk(Artifact(wanted.stage, root / wanted.path, manifest))


def _manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except FileNotFoundError:
        return None
