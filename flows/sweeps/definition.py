"""Definition of a sweep: its arms, seeds and measured figure, checked as a whole before anything is spent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flows.config.graph import Graph, ancestors, graph, known, with_measurements
from flows.config.read import PipelineConfig, dump, load
from flows.sweeps.space import Choices, Range, Space, grid, settings_text
from infra.errors import ConfigError, Problem
from infra.fingerprint import canonical, canonical_json
from infra.project import default_root
from infra.store.measurements import MEASURE
from tasks.stage import Node
from training.config import TrainerConfig

Sampler = Literal["grid", "random", "tpe"]
Pruner = Literal["none", "median", "hyperband"]

MEASURED = {
    "pretrain": "validation_loss",
    "sft": "heldout_loss_sft",
    "reward_model": "heldout_accuracy",
    "preference_tuning": "win_rate",
    "distill": "divergence_fall",
    "rlhf": "reward_gain",
}
"""The figure of a training stage that a sweep is judged by, where it names none."""
_MORE_IS_BETTER = (
    *("accuracy", "acc", "gain", "win_rate", "reward", "margin", "score", "mfu", "per_s", "verified", "judge"),
    *(
        "improvement",
        "divergence_fall",
        "agreement",
        "ends_share",
        "prefers_chosen",
        "chosen_rise",
        "exact_match",
        "pass_",
        "f1",
        "bleu",
        "rouge",
        "chrf",
        "bytes_per_token",
        "stereoset_icat",
        "stereoset_lms",
    ),
)
_LESS_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "failure_rate", "stereotype_score", "honest_score", "apart")
"""Less is better for figures with one of these in the name, whatever else is in it, such as a task:
accounting_bits_per_byte."""
BASE = "base"
"""The arm of an ablation that changes nothing."""


@dataclass(frozen=True)
class Arm:
    """One choice of settings. name: of an ablation's; empty for others."""

    settings: Mapping[str, Any]
    name: str = ""


@dataclass(frozen=True)
class Wishes:
    """The command line's request. given: `--set` values. measure: empty for the default of the stage.

    ablations: settings by name. trials: number of settings to draw; None in a grid. root: returns the store of sweeps
        that the config takes values over from.
    """

    config: Path
    given: Mapping[str, str]
    space: Space
    ablations: Mapping[str, Mapping[str, Any]]
    seeds: int = 1
    measure: str = ""
    maximise: bool | None = None
    sampler: Sampler | None = None
    pruner: Pruner = "none"
    trials: int | None = None
    root: Callable[[], Path] = default_root


@dataclass(frozen=True)
class Sweep:
    """A sweep that can run. arms: in the order of their trials, empty where a sampler draws them.

    step, figure: what is measured. seed_keys: the keys that a trial's seed goes to; none where there is one seed.
    """

    config: Path
    given: Mapping[str, str]
    base: PipelineConfig
    space: Space
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    seed_keys: tuple[str, ...]
    step: str
    figure: str
    maximise: bool
    sampler: Sampler
    pruner: Pruner
    trials: int
    root: Callable[[], Path] = default_root

    @property
    def measure(self) -> str:
        return f"{self.step}.{self.figure}"

    @cached_property
    def id(self) -> str:
        """Identity of the sweep: the same command continues the same sweep."""
        identity = {
            "config": {key: value for key, value in dump(self.base).items() if key not in ("launch", "lineage")},
            "space": {key: vars(one) for key, one in self.space.items()},
            "arms": [[arm.name, arm.settings] for arm in self.arms],
            "measure": self.measure,
            "maximise": self.maximise,
            "seeds": self.seeds,
            "sampler": [self.sampler, self.pruner, self.trials if self.sampler != "grid" else 0],
        }
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]

    def pipeline(self, settings: Mapping[str, Any], seed: int) -> PipelineConfig:
        """The pipeline of one trial, as `stemma run --set` would have it."""
        seeds = {key: str(seed) for key in self.seed_keys}
        return load(self.config, {**self.given, **settings_text(settings), **seeds}, self.root)


def more_is_better(figure: str) -> bool:
    """Return True if a figure's name implies that more is better; --maximise and --minimise decide it for any other."""
    return any(part in figure for part in _MORE_IS_BETTER) and not any(part in figure for part in _LESS_IS_BETTER)


def define(wishes: Wishes) -> Sweep:
    """The sweep that was asked for. Raises ConfigError with everything that is wrong: unknown keys with the nearest
    names, values that a config does not take, and keys that bear on nothing that is measured."""
    _check(wishes)
    base = load(wishes.config, wishes.given, wishes.root)
    sampler = wishes.sampler or ("tpe" if _has_ranges(wishes.space) else "grid")
    arms: tuple[Arm, ...] = ()
    if wishes.ablations:
        arms = (Arm({}, BASE), *(Arm(settings, name) for name, settings in wishes.ablations.items()))
    elif sampler == "grid":
        arms = tuple(Arm(settings) for settings in grid(wishes.space))
    tried = arms or tuple(Arm(settings) for settings in grid(wishes.space))
    graphs = _graphs(wishes, [arm.settings for arm in tried])
    whole = graph(base)
    step, figure = _measure(wishes, whole, graphs)
    problems = _idle(wishes, whole, tried, graphs, step)
    needed = [whole[name] for name in whole if name in ancestors(whole, [step])]
    trainings = [
        node for node in needed if isinstance(node.config, TrainerConfig) and not node.adopted and not node.measures
    ]
    seed_keys = tuple(f"{node.key}.seed" for node in trainings) if wishes.seeds > 1 else ()
    problems += [
        Problem("contradiction", f"--key {key}", "--seeds already sweeps the seed", "leave one of the two out")
        for key in wishes.space
        if key in seed_keys
    ]
    if wishes.seeds > 1 and not trainings:
        problems.append(Problem("no_seed", "--seeds", f"no training comes before {step}", "leave --seeds out"))
    if problems:
        raise ConfigError(*problems)
    first = trainings[0].config.seed if trainings and isinstance(trainings[0].config, TrainerConfig) else base.seed
    maximise = wishes.maximise
    if maximise is None:
        maximise = more_is_better(figure)
    return Sweep(
        wishes.config,
        wishes.given,
        base,
        wishes.space,
        arms,
        tuple((first + more) % 2**31 for more in range(wishes.seeds)),
        seed_keys,
        step,
        figure,
        maximise,
        sampler,
        wishes.pruner,
        len(arms) or int(wishes.trials or 0),
        wishes.root,
    )


def _has_ranges(space: Space) -> bool:
    return any(isinstance(one, Range) for one in space.values())


def _check(wishes: Wishes) -> None:
    """Check the options against each other."""
    found = []
    drawn = wishes.sampler in ("random", "tpe") or (wishes.sampler is None and _has_ranges(wishes.space))
    if not wishes.space and not wishes.ablations:
        found.append(("--key", "a sweep varies at least one key", "--key KEY=VALUES, --ablate or --ablations"))
    if wishes.space and wishes.ablations:
        found.append(("--ablate", "a sweep has keys or ablations, not both", "leave one of the two out"))
    if wishes.ablations and wishes.seeds < 2:
        found.append(("--seeds", "differences are measured over seeds: expected at least two", "--seeds 3"))
    if wishes.sampler == "grid" and _has_ranges(wishes.space):
        found.append(("--sampler", "a grid has no ranges", "list values, or --sampler tpe with --trials"))
    if drawn and not wishes.trials:
        found.append(("--trials", "expected the number of settings to draw", "e.g. --trials 16"))
    if wishes.trials and not drawn:
        found.append(("--trials", "a grid tries every combination", "leave it out, or --sampler random"))
    if wishes.pruner != "none" and not drawn:
        found.append(("--pruner", "a grid is not pruned", "--sampler tpe or random"))
    if wishes.pruner != "none" and wishes.seeds > 1:
        found.append(("--pruner", "a pruner judges settings by one run of each", "leave --seeds or --pruner out"))
    if BASE in wishes.ablations:
        found.append((f"--ablate {BASE}", "this is the name of the unchanged config", "choose another name"))
    if found:
        raise ConfigError(*(Problem("bad_sweep", path, message, fix) for path, message, fix in found))


def _graphs(wishes: Wishes, tried: Sequence[Mapping[str, Any]]) -> list[Graph]:
    """The graph of each of the settings. Raises ConfigError with each thing that is wrong, once."""
    problems: dict[Problem, None] = {}
    found = []
    for settings in tried:
        try:
            found.append(graph(load(wishes.config, {**wishes.given, **settings_text(settings)}, wishes.root)))
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise ConfigError(*problems)
    return found


def _measure(wishes: Wishes, whole: Graph, graphs: Sequence[Graph]) -> tuple[str, str]:
    """(step, figure): the first training that the sweep changes, where none is named."""
    if wishes.measure:
        step, dot, figure = wishes.measure.partition(".")
        if not dot:
            fix = "such as pretrain.validation_loss"
            raise ConfigError(Problem("bad_measure", f"--measure {step}", "expected STEP.FIGURE", fix))
        known(whole, [step], "--measure")
        return step, figure
    changed = {name for nodes in graphs for name in _changed(whole, nodes, set(whole))}
    below = [
        name
        for name, node in whole.items()
        if node.stage.name in MEASURED and changed.intersection(ancestors(whole, with_measurements(whole, [name])))
    ]
    if not below:
        below = [name for name, node in whole.items() if node.stage.name in MEASURED]
    if not below:
        fix = "--measure STEP.FIGURE, such as tokenizer.bytes_per_token"
        raise ConfigError(Problem("no_measure", "--measure", "the pipeline has no training step to measure", fix))
    return below[0], MEASURED[whole[below[0]].stage.name]


def _idle(wishes: Wishes, whole: Graph, arms: Sequence[Arm], graphs: Sequence[Graph], step: str) -> list[Problem]:
    """Keys, or arms of an ablation, that would not change any stage that the measured figure depends on."""
    needed = ancestors(whole, with_measurements(whole, [step]))
    found = []
    for arm, nodes in zip(arms, graphs, strict=True):
        if arm.name and arm.settings and not _changed(whole, nodes, needed):
            others = _changed(whole, nodes, set(whole))
            found.append(_bears_on_nothing(f"--ablate {arm.name}", next(iter(arm.settings)), step, others))
    for key, one in wishes.space.items():
        values = one.values if isinstance(one, Choices) else (one.low, one.high)
        alone = _graphs(wishes, [{key: value} for value in values]) if len(wishes.space) > 1 else list(graphs)
        if any(_changed(whole, nodes, needed) for nodes in alone):
            continue
        if len(wishes.space) > 1 and _matters_beside(key, arms, graphs, needed):
            continue
        others = {name for nodes in alone for name in _changed(whole, nodes, set(whole))}
        found.append(_bears_on_nothing(f"--key {key}", key, step, others))
    return found


def _matters_beside(key: str, arms: Sequence[Arm], graphs: Sequence[Graph], needed: set[str]) -> bool:
    """Return True if two arms that differ in this key alone lead to different stages."""
    groups: dict[str, list[Graph]] = {}
    for arm, nodes in zip(arms, graphs, strict=True):
        others = {name: value for name, value in arm.settings.items() if name != key}
        groups.setdefault(canonical_json(others), []).append(nodes)
    return any(_changed(group[0], nodes, needed) for group in groups.values() for nodes in group[1:])


def _bears_on_nothing(path: str, key: str, step: str, others: set[str]) -> Problem:
    others = {name.removeprefix(MEASURE) for name in others}
    if others:
        listed = ", ".join(sorted(others))
        message = f"affects nothing that {step} depends on: it only changes {listed}"
        return Problem("bears_on_nothing", path, message, f"--measure a figure of {sorted(others)[0]}")
    why = "it sets where to run, not what is computed" if key.startswith("launch.") else "no stage changes"
    return Problem("bears_on_nothing", path, f"has no effect: {why}; nothing was started", "sweep another key")


def _changed(one: Graph, other: Graph, among: set[str]) -> set[str]:
    """Steps among these whose identity is not the same in both, or that one of the two does not have."""
    return {
        name
        for name in among
        if (name in one) != (name in other) or (name in one and _identity(one[name]) != _identity(other[name]))
    }


def _identity(node: Node) -> Any:
    sources = [(source.key, source.paths, source.objects, source.recipe) for source in node.sources()]
    return (
        canonical(node.config, node.key, measuring=node.measures),
        dict(node.inputs),
        sources,
        node.adopted,
        node.continues_at(),
    )
