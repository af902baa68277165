"""Evaluations of models to compare: for each kind the newest that were measured alike, else the newest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.results.artifacts import Artifact, read_artifacts
from infra.errors import Problem
from infra.fingerprint import canonical_json, flatten, same
from infra.store.manifest import Manifest
from infra.store.store import Store

EVALUATIONS = ("benchmarks", "safety")
NOT_THERE = "not there"
SHOWN = 4


@dataclass(frozen=True)
class Measurement:
    folder: Path
    manifest: Manifest

    @property
    def alike(self) -> str:
        """The same for two that were measured in the same way: by stage version, settings, sources and other inputs."""
        return canonical_json(measured_by(self.manifest))


def measured_by(manifest: Manifest) -> dict[str, Any]:
    """Everything but the model that affects an evaluation's figures: by setting, source and input."""
    settings = flatten(manifest.identity)
    sources = {f"{source.key.partition('.')[2]}, content": source.digest[:12] for source in manifest.sources}
    inputs = {f"{name}, content": source.digest[:12] for name, source in manifest.inputs.items() if name != "model"}
    return {"stage version": manifest.version, **settings, **sources, **inputs}


def alike_or_newest(store: Store, digests: Sequence[str]) -> list[dict[str, Artifact]]:
    """Return the evaluations to compare of the models with these digests, by kind, in order of the models.

    For each kind, the measurements that were made alike for all models that have any; among several such sets, the one
    whose oldest measurement is newest. Where there is no such set, the newest measurement of each model.
    """
    measurements: list[dict[str, list[Measurement]]] = [{} for _ in digests]
    evaluations = [(kind, stage) for stage in store.stages() for kind in EVALUATIONS if stage.startswith(kind)]
    for kind, stage in evaluations:
        for folder, manifest in store.manifests(stage):
            model = manifest.inputs.get("model")
            for of_model, digest in zip(measurements, digests, strict=True):
                if model and model.digest == digest:
                    of_model.setdefault(kind, []).append(Measurement(folder, manifest))
    chosen: list[dict[str, Measurement]] = [{} for _ in digests]
    for kind in EVALUATIONS:
        measured = [of_model[kind] for of_model in measurements if kind in of_model]
        which = iter(_alike(measured) or map(_newest, measured))
        for of_model, taken in zip(measurements, chosen, strict=True):
            if kind in of_model:
                taken[kind] = next(which)
    return [
        read_artifacts(
            {kind: store.fetch(measurement.manifest, measurement.folder) for kind, measurement in taken.items()}
        )
        for taken in chosen
    ]


def _alike(measured: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """One of each model, all measured alike; empty where there are none."""
    ways = [{measurement.alike: measurement for measurement in sorted(of_model, key=_when)} for of_model in measured]
    common = set.intersection(*map(set, ways)) if ways else set()
    if not common:
        return []
    way = max(common, key=lambda way: (min(_when(by_way[way]) for by_way in ways), way))
    return [by_way[way] for by_way in ways]


def _newest(measured: Sequence[Measurement]) -> Measurement:
    return max(measured, key=_when)


def _when(measurement: Measurement) -> str:
    return measurement.manifest.finished


def unlike(measured: Sequence[Mapping[str, Artifact]]) -> dict[str, list[dict[str, Any]]]:
    """Differences in each kind that all have: {"key", "values"} for all that affects the figures and is not the same
    for all."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in EVALUATIONS:
        manifests = [of_model[kind].manifest for of_model in measured if kind in of_model]
        ways = [measured_by(manifest) for manifest in manifests if manifest]
        if len(ways) < len(measured):
            continue
        settings = [flatten(manifest.config) | way for manifest, way in zip(filter(None, manifests), ways, strict=True)]
        for key in dict.fromkeys(key for way in ways for key in way):
            values = [mapping.get(key, NOT_THERE) for mapping in settings]
            if not all(same(values[0], value) for value in values[1:]):
                rows.setdefault(kind, []).append({"key": f"{kind}.{key}", "values": values})
    return rows


def warnings_of(differences: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Problem]:
    """A warning for each kind of `unlike`."""
    return [
        Problem(
            "measured_unlike",
            kind,
            f"none of these were measured in the same way, so that the newest are shown; different: {_listed(rows)}",
            "run them with the same settings, or ask all with one stemma eval",
        )
        for kind, rows in differences.items()
    ]


def _listed(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        f"{row['key'].partition('.')[2]} ({' | '.join(_short(value) for value in row['values'])})"
        for row in rows[:SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:19]}…"
