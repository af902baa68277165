"""Finished artifacts from the reader's side: manifest, figures, and the artifacts that they descend from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from evaluation.results.stage_order import FAMILY_ORDER
from infra.io.json import read_own_json, read_own_json_lines
from infra.store.branches import Branch, branch_of
from infra.store.manifest import Manifest, folder_of, known_manifest, store_root
from infra.store.measurements import is_measurement, measurement_of, newest_measurement


@dataclass(frozen=True)
class Artifact:
    """One finished artifact.

    id: the step's name in the pipeline, e.g. `benchmarks_sft`. manifest: None for a folder that no store made.
    measured: for a model, the measurement that belongs to it in the pipeline.
    """

    id: str
    folder: Path
    manifest: Manifest | None
    measured: Artifact | None = None

    @cached_property
    def measurement(self) -> Artifact | None:
        """Measurement of a model: the artifact in `measured`, otherwise the newest measurement in the store."""
        if self.measured is None and self.manifest is not None:
            newest = newest_measurement(store_root(self.folder), self.manifest)
            return Artifact(measurement_of(self.id), *newest) if newest else None
        return self.measured

    @property
    def stage(self) -> str:
        return self.manifest.stage if self.manifest else self.id

    @property
    def installed_kind(self) -> str:
        """The kind of what a stage of an installed package made; "" for the stages of this project, known by name."""
        return self.manifest.makes if self.manifest and self.manifest.package else ""

    @property
    def label(self) -> str:
        """The stage, followed by the step's name if it differs: `sft`, `sft (chat)`."""
        step = self.manifest.step if self.manifest else self.id
        return self.stage if step in ("", self.stage) else f"{self.stage} ({step})"

    @property
    def figures(self) -> dict[str, float]:
        """Figures of its result, for a model including those of its measurement; empty without a manifest."""
        if self.manifest is None:
            return {}
        figures = {name: float(value) for name, value in self.manifest.result.get("figures", {}).items()}
        return {**figures, **(self.measurement.figures if self.measurement else {})}

    @property
    def algorithm(self) -> str:
        """Method by which a model was aligned. For `rlhf`, the algorithm; if none was named, `PPO`, or `RLOO` with
        several answers per prompt. For `preference_tuning`, its loss: `DPO`."""
        config = self.manifest.config if self.manifest else {}
        if self.stage == "preference_tuning":
            return str(config.get("loss", "dpo")).upper()
        chosen = config.get("algorithm") or ("rloo" if config.get("answers_per_prompt", 1) > 1 else "ppo")
        return str(chosen).upper()

    @cached_property
    def branch(self) -> Branch | None:
        """State of another training run from which this one continued; None for all other artifacts."""
        return branch_of(self.manifest, store_root(self.folder)) if self.manifest else None

    @property
    def headline(self) -> str:
        """Key figure of its result; for a model with a measurement, the measurement's."""
        if self.manifest is None:
            return ""
        return self.measurement.headline if self.measurement else str(self.manifest.result.get("headline", ""))

    def _file(self, name: str) -> Path:
        """Return the path of a file of the artifact, or of its measurement if the artifact has no file of that name."""
        path = self.folder / name
        return path if path.is_file() or self.measurement is None else self.measurement.folder / name

    def read_json(self, name: str) -> Any:
        """Return a JSON file of the artifact; None if there is none."""
        path = self._file(name)
        return read_own_json(path) if path.is_file() else None

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Return a JSON-lines file of the artifact; empty if there is none."""
        path = self._file(name)
        return list(read_own_json_lines(path)) if path.is_file() else []


def snake_case(name: str) -> str:
    """Return a figure's name as gates and manifests spell it: letters and digits in lower case, the rest
    underscores."""
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())


def read_artifacts(inputs: Mapping[str, Path]) -> dict[str, Artifact]:
    """Return the artifacts by input name; a measurement is part of its model."""
    artifacts = {name: Artifact(name, folder, _manifest(folder)) for name, folder in inputs.items()}
    return {
        name: replace(artifact, measured=artifacts.get(measurement_of(name)))
        for name, artifact in artifacts.items()
        if not is_measurement(name, artifacts)
    }


def ancestors(artifact: Artifact) -> list[Artifact]:
    """Return the ancestors of an artifact that are still in the store, the artifact itself last.

    Every artifact follows its inputs; where that leaves a choice, the order is that in which the text flows.
    """
    visited: dict[tuple[str, str], Artifact] = {}
    pending = [artifact]
    while pending:
        current = pending.pop()
        if current.manifest and _address(current.manifest) not in visited:
            visited[_address(current.manifest)] = current
            pending += _parents(current)
    order = {stage: index for index, stage in enumerate(FAMILY_ORDER)}
    sorter = TopologicalSorter(
        {
            address: [
                key for parent in _parents(child) if parent.manifest and (key := _address(parent.manifest)) in visited
            ]
            for address, child in visited.items()
        }
    )
    sorter.prepare()
    ordered: list[Artifact] = []
    ready: list[Artifact] = []
    while sorter.is_active():
        ready += [visited[address] for address in sorter.get_ready()]
        ready.sort(key=lambda member: (order.get(member.stage, len(order)), member.id))
        next_ = ready.pop(0)
        ordered.append(next_)
        assert next_.manifest is not None
        sorter.done(_address(next_.manifest))
    return ordered


def _address(manifest: Manifest) -> tuple[str, str]:
    return manifest.stage, manifest.fingerprint


def _parents(artifact: Artifact) -> Iterator[Artifact]:
    if artifact.manifest is None:
        return
    root = store_root(artifact.folder)
    for reference in artifact.manifest.inputs.values():
        if (manifest := known_manifest(root, reference)) is not None:
            yield Artifact(reference.stage, folder_of(root, reference, manifest), manifest)


def _manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except FileNotFoundError:
        return None
