"""What differs between models of a store: settings, data and code of the families, figures, and paired differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.artifacts import Artifact, ancestors, read_artifacts
from evaluation.comparison import paired_accuracy, paired_toxicity
from evaluation.statistics import Interval
from infra.identity import flatten, same
from infra.store.manifest import Manifest
from infra.store.store import Store

KINDS = ("benchmarks", "safety")
ABSENT = "not there"


def compare(store: Store, models: Sequence[tuple[Path, Manifest]]) -> dict[str, Any]:
    """{"models", "differences", "figures", "paired"}, each later model against the first.

    differences: {"model", "key", "first", "other"} for each setting that bears on the result, source, stage version and
    code commit of the families that is not the same; a step that only one has is one row.
    figures: {"figure", "values"}, of the newest benchmarks and safety of each, and of the models themselves where all
    are of one stage. paired: {"model", "figure", "difference", "low", "high", "shown"}, the model less the first, over
    the same items; shown: whether the interval leaves zero out.
    """
    found = [read_artifacts({folder.parent.name: folder})[folder.parent.name] for folder, _ in models]
    measured = [_evaluations(store, manifest.digest) for _, manifest in models]
    names = [f"{manifest.stage}/{manifest.fingerprint}" for _, manifest in models]
    lines = [
        {one.manifest.step or one.stage: one.manifest for one in ancestors(model) if one.manifest} for model in found
    ]
    alike = len({one.stage for one in found}) == 1
    figures = [_figures(one if alike else None, evaluated) for one, evaluated in zip(found, measured, strict=True)]
    differences: list[dict[str, Any]] = []
    paired: list[dict[str, Any]] = []
    for name, line, evaluations in zip(names[1:], lines[1:], measured[1:], strict=True):
        differences += [{"model": name, **row} for row in _differences(lines[0], line)]
        paired += [{"model": name, **row} for row in _paired(measured[0], evaluations)]
    return {
        "models": [
            {"model": name, "headline": one.headline, "evaluations": sorted(evaluations)}
            for name, one, evaluations in zip(names, found, measured, strict=True)
        ],
        "differences": differences,
        "figures": [
            {"figure": key, "values": [one.get(key) for one in figures]}
            for key in dict.fromkeys(key for one in figures for key in one)
        ],
        "paired": paired,
    }


def _evaluations(store: Store, digest: str) -> dict[str, Artifact]:
    """The newest benchmarks and safety of the model with these bytes."""
    newest: dict[str, tuple[str, Path]] = {}
    for folder, manifest in store.manifests():
        kind = next((kind for kind in KINDS if manifest.stage.startswith(kind)), None)
        wanted = manifest.inputs.get("model")
        if kind and wanted and wanted.digest == digest and manifest.finished >= newest.get(kind, ("",))[0]:
            newest[kind] = (manifest.finished, folder)
    return read_artifacts({kind: folder for kind, (_, folder) in newest.items()})


def _differences(first: Mapping[str, Manifest], other: Mapping[str, Manifest]) -> Iterator[dict[str, Any]]:
    for step in dict.fromkeys((*first, *other)):
        a, b = first.get(step), other.get(step)
        if a is None or b is None:
            yield {"key": f"step {step}", "first": _headline(a), "other": _headline(b)}
        elif (a.stage, a.fingerprint) != (b.stage, b.fingerprint):
            yield from _of_step(step, a, b)


def _headline(one: Manifest | None) -> str:
    return str(one.result.get("headline") or "there") if one else ABSENT


def _of_step(step: str, a: Manifest, b: Manifest) -> Iterator[dict[str, Any]]:
    bearing = flatten(a.identity).keys() | flatten(b.identity).keys()
    before, after = flatten(a.config), flatten(b.config)
    rows = [(f"{step}.{key}", before.get(key, ABSENT), after.get(key, ABSENT)) for key in sorted(bearing)]
    rows.append((f"{step}, stage version", a.version, b.version))
    commits = [str(one.code.get("commit") or "not recorded") for one in (a, b)]
    rows.append((f"{step}, code", commits[0], commits[1]))
    sources = [{source.key: source.digest[:12] for source in one.sources} for one in (a, b)]
    for key in sorted(sources[0].keys() | sources[1].keys()):
        rows.append((f"{key}, content", sources[0].get(key, ABSENT), sources[1].get(key, ABSENT)))
    for key, one, other in rows:
        if not same(one, other):
            yield {"key": key, "first": one, "other": other}


def _figures(model: Artifact | None, evaluations: Mapping[str, Artifact]) -> dict[str, float]:
    """Figures by name; the bounds of intervals are left out."""
    found = dict(model.figures) if model else {}
    for one in evaluations.values():
        found |= one.figures
    return {name: value for name, value in found.items() if not name.endswith(("_low", "_high"))}


def _paired(first: dict[str, Artifact], other: dict[str, Artifact]) -> list[dict[str, Any]]:
    rows = []
    if "benchmarks" in first and "benchmarks" in other:
        for one in paired_accuracy(first["benchmarks"], other["benchmarks"]):
            rows.append(_row(f"{one.task} accuracy", one.difference))
    if "safety" in first and "safety" in other and (found := paired_toxicity(first["safety"], other["safety"])):
        rows.append(_row("expected maximum toxicity", found.worst))
        rows.append(_row("toxicity probability", found.toxic))
        rows.append(_row("characters a continuation", found.length))
    return rows


def _row(figure: str, of: Interval) -> dict[str, Any]:
    return {"figure": figure, "difference": of.value, "low": of.low, "high": of.high, "shown": not of.includes(0)}
