"""Differences between runs, configs or models: settings, data, code, versions and figures, paired and over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from evaluation.results.artifacts import Artifact
from evaluation.results.comparison import Paired, paired_figures
from flows.compare.compared import Compared, ComparedStep
from flows.compare.measured import EVALUATIONS, NOT_THERE, unlike, warnings_of
from infra.fingerprint import canonical_json, flatten, same
from tasks.stages import STAGES

_BOUNDS = ("_low", "_high")


def compare(sides: Sequence[Compared]) -> dict[str, Any]:
    """{"compared", "seeds", "differences", "steps", "figures", "paired", "warnings"}; every list of values is in the
    order of `sides`.

    differences: {"key", "values"} for each setting that affects the result, source, stage version, code commit, lock
        and package version of common steps that is not the same for all. Differences between evaluations
        whose figures are compared come first, and `warnings` has an entry for each kind of these.
    steps: {"step", "values"} for each step that not all have: its key figure, or that it is missing.
    seeds: {"names", "seeds"}, those that differ in seeds alone.
    figures: {"figure", "values", "intervals", "spread"}; intervals: [low, high] or null; spread: {"names", "mean",
        "sd"} of each of `seeds`, sd with n - 1.
    paired: {"name", "figure", "unit", "difference", "low", "high", "shown"}: the difference from the first, over the
        same items; shown: true if the interval leaves zero out.
    """
    groups = _seed_groups(sides)
    evaluated = unlike([side.measured for side in sides])
    return {
        "compared": [
            {"name": side.name, "kind": side.kind, "headline": side.summary, "evaluations": sorted(side.measured)}
            for side in sides
        ],
        "seeds": [
            {"names": [side.name for side in group], "seeds": [_seeds_of(side, group) for side in group]}
            for group in groups
        ],
        "differences": [*chain.from_iterable(evaluated.values()), *_differences(sides)],
        "steps": list(_partial_steps(sides)),
        "figures": list(_figure_rows(sides, groups)),
        "paired": [row for other in sides[1:] for row in _paired(sides[0], other)],
        "warnings": [problem.as_json() for problem in warnings_of(evaluated)],
    }


def figures_of(sides: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the figures of `compare`, without spreads over seeds."""
    return list(_figure_rows(sides, ()))


def _differences(sides: Sequence[Compared]) -> Iterator[dict[str, Any]]:
    of_steps = [dict(_settings(side, sides)) for side in sides]
    seeds: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for row in [*_rows(of_steps), *_rows([_made_with(side) for side in sides])]:
        (seeds if row["key"].endswith(".seed") else others).append(row)
    if len(seeds) > 1 and all(row["values"] == seeds[0]["values"] for row in seeds):
        seeds = [{"key": f"seed of {len(seeds)} steps", "values": seeds[0]["values"]}]
    yield from [*seeds, *others]


def _rows(maps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys(chain.from_iterable(maps)):
        values = [mapping.get(key, NOT_THERE) for mapping in maps]
        if not all(same(values[0], value) for value in values[1:]):
            yield {"key": key, "values": values}


def _settings(side: Compared, sides: Sequence[Compared]) -> Iterator[tuple[str, Any]]:
    """Settings that affect the results of the steps that all sides have."""
    for name, step in side.steps.items():
        alike = [other.steps[name] for other in sides if name in other.steps]
        if len(alike) == len(sides):
            config = flatten(step.identity) | flatten(step.config)
            for key in sorted(set().union(*(flatten(other.identity) for other in alike))):
                yield f"{name}.{key}", config.get(key, NOT_THERE)
            yield f"{name}, stage version", step.version
            for key, digest in step.sources.items():
                yield f"{key}, content", digest[:12]


def _partial_steps(sides: Sequence[Compared]) -> Iterator[dict[str, Any]]:
    """Yield a row for each step that some sides have and others do not."""
    for name in dict.fromkeys(chain.from_iterable(side.steps for side in sides)):
        steps = [side.steps.get(name) for side in sides]
        if not all(steps):
            yield {"step": name, "values": [_came_of(step) if step else NOT_THERE for step in steps]}


def _came_of(step: ComparedStep) -> str:
    return (step.artifact.headline or "built") if step.artifact else "not built"


def _made_with(side: Compared) -> dict[str, str]:
    """Code, lock, device and package versions of what is built, each once; empty where nothing is."""
    versions: dict[str, dict[str, None]] = {}
    for step in side.steps.values():
        manifest = step.artifact.manifest if step.artifact else None
        if manifest is None:
            continue
        commit = str(manifest.code.get("commit") or "not recorded")[:10]
        made = {"code": commit + (" + uncommitted changes" if manifest.code.get("dirty") else "")}
        made |= {"lock": manifest.lock_hash[:10], "device": manifest.device, **manifest.versions}
        for key, value in made.items():
            if value:
                versions.setdefault(key, {})[value] = None
    return {key: ", ".join(values) for key, values in versions.items()}


def _seed_groups(sides: Sequence[Compared]) -> list[list[Compared]]:
    """Return groups of two or more sides that differ only in seeds."""
    groups: dict[str, list[Compared]] = {}
    for side in sides:
        settings = {
            name: [step.stage, step.version, dict(step.sources), _without_seeds(step)]
            for name, step in side.steps.items()
            if name not in STAGES or STAGES[name].makes not in ("page", "registration")
        }
        groups.setdefault(canonical_json(settings), []).append(side)
    return [group for group in groups.values() if any(_seeds_of(side, group) for side in group)]


def _without_seeds(step: ComparedStep) -> dict[str, Any]:
    return {key: value for key, value in flatten(step.identity).items() if key.split(".")[-1] != "seed"}


def _seeds_of(side: Compared, group: Sequence[Compared]) -> list[int]:
    """The seeds of the steps that not all of a group seed alike."""
    seeds = [
        {name: step.config["seed"] for name, step in side.steps.items() if "seed" in step.config} for side in group
    ]
    own_seeds = {name: step.config["seed"] for name, step in side.steps.items() if "seed" in step.config}
    return sorted({seed for name, seed in own_seeds.items() if any(other.get(name) != seed for other in seeds)})


def _figure_rows(sides: Sequence[Compared], groups: Sequence[Sequence[Compared]]) -> Iterator[dict[str, Any]]:
    alike = len({side.artifact.stage for side in sides if side.artifact}) == 1
    maps = [_figures(side, alike) for side in sides]
    for key in dict.fromkeys(chain.from_iterable(maps)):
        if key.endswith(_BOUNDS) or _is_repeated(key, maps):
            continue
        values = [figures.get(key) for figures in maps]
        bounds = [[figures.get(f"{key}{end}") for end in _BOUNDS] for figures in maps]
        spread = []
        for group in groups:
            of_group = [value for side, value in zip(sides, values, strict=True) if side in group and value is not None]
            if len(of_group) > 1:
                names = [side.name for side in group]
                spread.append({"names": names, "mean": fmean(of_group), "sd": stdev(of_group)})
        intervals = [None if None in bound else bound for bound in bounds]
        yield {"figure": key, "values": values, "intervals": intervals, "spread": spread}


def _is_repeated(key: str, maps: Sequence[Mapping[str, float]]) -> bool:
    """Return True for a figure of a task's score that is the same as that of the metric which it stands for."""
    task, score, end = key.rpartition("_score")
    metrics = (f"{task}_accuracy_normalised{end}", f"{task}_accuracy{end}") if score else ()
    return any(all(figures.get(metric) == figures.get(key) for figures in maps) for metric in metrics)


def _figures(side: Compared, with_own: bool) -> dict[str, float]:
    """Figures of one side: for runs and configs as `step.figure`, for artifacts those of their evaluations and, if
    `with_own`, their own."""
    if side.artifact is None:
        return {
            f"{name}.{figure}": value
            for name, step in side.steps.items()
            if step.artifact
            for figure, value in step.artifact.figures.items()
        }
    figures = dict(side.artifact.figures) if with_own else {}
    for evaluation in side.measured.values():
        figures |= evaluation.figures
    return figures


def _paired(first: Compared, other: Compared) -> Iterator[dict[str, Any]]:
    first_artifacts, two = _with_items(first), _with_items(other)
    for name, artifact in first_artifacts.items():
        if name not in two or two[name].folder == artifact.folder:
            continue
        # The figures of an artifact's own evaluations name by themselves what they belong to.
        before = "" if name in first.measured else f"{name}: "
        for pair in paired_figures(artifact, two[name]):
            yield {"name": other.name, **_row(f"{before}{pair.figure}", pair)}


def _with_items(side: Compared) -> dict[str, Artifact]:
    """Artifacts that may keep an outcome for each item: evaluations, and PPO's answers to held-out prompts."""
    stages = (*EVALUATIONS, "rlhf")
    built = {name: step.artifact for name, step in side.steps.items() if step.artifact}
    return {
        **side.measured,
        **{name: artifact for name, artifact in built.items() if artifact.stage.startswith(stages)},
    }


def _row(figure: str, pair: Paired) -> dict[str, Any]:
    of = pair.difference
    bounds = {"difference": of.value, "low": of.low, "high": of.high, "shown": not of.includes(0)}
    return {"figure": figure, "unit": pair.unit, **bounds}
