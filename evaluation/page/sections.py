"""The sections of the report, each from what the pipeline has; a section without anything to say is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from evaluation.page.family import Family
from evaluation.page.lineage import lineage_picture
from evaluation.page.plots import Level, Line, Mark, Row, interval_plot, line_chart, smoothed
from evaluation.page.words import (
    between,
    between_percent,
    compact,
    fixed,
    interval_of,
    p_value,
    percent,
    seconds,
    signed,
    size,
    whole_percent,
)
from evaluation.statistics import Interval

LONG_NAMES = {"base": "base model", "sft": "SFT model", "rlhf": "RLHF model"}


@dataclass(frozen=True)
class Figure:
    """A drawing with what it means and where it is weak."""

    title: str
    svg: Markup
    means: str
    weak: str
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table; numeric columns are aligned to the right. `folded` hides it behind its title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False
    numeric: Sequence[int] = ()
    mono: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[dict[str, Any]] = ()
    folded: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return bool(self.lead or self.figures or self.tables or self.samples or self.folded)


def sections(family: Family, samples: int, command: str) -> list[Section]:
    """Every section that has something to say, in reading order."""
    made = [
        _pretraining(family),
        _tuning(family),
        _alignment(family),
        _benchmarks(family),
        _samples(family, samples),
        _toxicity(family),
        _bias(family),
        _memorisation(family),
        _data(family),
        _stages(family),
        _lineage(family),
        _reproduce(family, command),
    ]
    return [section for section in made if section]


def _legend(models: Sequence[str]) -> list[tuple[str, str]]:
    return [(LONG_NAMES[name], name) for name in models]


def _loss_lines(points: list[tuple[float, float]], label: str = "training") -> list[Line]:
    if not points:
        return []
    half_life = max(1.0, len(points) / 40)
    return [
        Line(f"{label}, each batch", points, "train", faint=True),
        Line(label, smoothed(points, half_life), "train"),
    ]


def _pretraining(family: Family) -> Section:
    figures = family.figures("pretrain")
    train, validation = family.curve("pretrain", "train/loss"), family.curve("pretrain", "validation/loss")
    drawn = []
    levels = [Level(name, figures[f"{name}_loss"]) for name in ("unigram", "bigram") if f"{name}_loss" in figures]
    chart = line_chart(
        "loss over batches",
        [*_loss_lines(train), Line("validation", validation, "validation")],
        x_label="batch",
        y_label="loss (nats a token)",
        levels=levels,
    )
    if chart:
        drawn.append(
            Figure(
                "Loss",
                chart,
                _loss_sentence(train, validation, figures),
                "One seed: another would give slightly other figures, and the interval covers the choice of validation "
                "text only.",
                [("training, smoothed", "train"), ("validation", "validation"), ("n-gram baselines", "level")],
            )
        )
    rate = family.curve("pretrain", "train/lr")
    chart = line_chart(
        "learning rate",
        [Line("learning rate", rate, "train")],
        x_label="batch",
        y_label="learning rate",
        from_zero=True,
    )
    if chart:
        peak = max(value for _, value in rate)
        at = next(step for step, value in rate if value == peak)
        drawn.append(
            Figure(
                "Learning rate",
                chart,
                f"It rises to {peak:.2g} by batch {compact(at)} and ends at {rate[-1][1]:.2g}.",
                "The peak was set in the config, not searched for.",
            )
        )
    lead = []
    if "parameters" in figures:
        tokens = figures.get("tokens", math.nan)
        per_parameter = tokens / figures["parameters"]
        lead.append(
            f"{compact(figures['parameters'])} parameters saw {compact(tokens)} tokens, {per_parameter:.2g} each."
        )
        if per_parameter < 15:
            lead.append(
                "Chinchilla's rule is about 20 tokens a parameter: this model is undertrained for its size, and more "
                "text would better it."
            )
    if "bits_per_byte" in figures:
        perplexity = figures.get("validation_perplexity", math.nan)
        lead.append(f"{fixed(figures['bits_per_byte'], 3)} bits per byte, perplexity {fixed(perplexity, 1)}.")
    if "tokens_per_s" in figures:
        lead.append(f"{compact(figures['tokens_per_s'])} tokens a second.")
    return Section("pretraining", "Pretraining", " ".join(lead), drawn)


def _loss_sentence(
    train: list[tuple[float, float]], validation: list[tuple[float, float]], figures: dict[str, float]
) -> str:
    said = []
    if len(validation) > 1:
        best = min(validation, key=lambda point: point[1])
        last = validation[-1]
        if best[0] == last[0]:
            said.append(f"Validation loss still falls at the end ({fixed(last[1], 3)}).")
        else:
            said.append(
                f"Validation loss was lowest at batch {compact(best[0])} ({fixed(best[1], 3)}) and ends at "
                f"{fixed(last[1], 3)}."
            )
    if train and validation:
        tail = [value for _, value in train[-max(1, len(train) // 20) :]]
        gap = validation[-1][1] - sum(tail) / len(tail)
        word = "overfitting is small" if gap < 0.3 else "the model fits its training text markedly better"
        said.append(f"Its distance from the training loss at the end is {signed(gap)}: {word}.")
    if "bigram_loss" in figures and validation:
        below = [step for step, value in validation if value < figures["bigram_loss"]]
        said.append(
            f"It is below the bigram model from batch {compact(below[0])} on."
            if below
            else "It never gets below the bigram model."
        )
    return " ".join(said) or "Training loss only; no validation text was measured."


def _tuning(family: Family) -> Section:
    figures = family.figures("sft")
    drawn = []
    chart = line_chart(
        "SFT loss",
        [
            *_loss_lines(family.curve("sft", "train/loss")),
            Line("held-out", family.curve("sft", "validation/loss"), "validation"),
        ],
        x_label="batch",
        y_label="loss of the answers (nats a token)",
    )
    if chart:
        before, after = figures.get("heldout_loss_base", math.nan), figures.get("heldout_loss_sft", math.nan)
        drawn.append(
            Figure(
                "SFT loss",
                chart,
                f"On held-out instructions the loss went from {fixed(before)} to {fixed(after)} nats a token.",
                "A lower loss on the reference answers is not the same as better answers; read the samples.",
                [("training, smoothed", "train")],
            )
        )
    chart = line_chart(
        "reward model loss",
        _loss_lines(family.curve("reward_model", "train/loss")),
        x_label="batch",
        y_label="loss (nats a pair)",
        levels=[Level("guessing", math.log(2))],
    )
    accuracy = interval_of(family.figures("reward_model"), "heldout_accuracy")
    if chart:
        means = "Guessing gives log 2 = 0.69 nats a pair."
        if accuracy:
            p = family.figures("reward_model").get("p_value")
            means += f" Held-out pairs ordered rightly: {percent(accuracy.value)} {between_percent(accuracy)}"
            means += f", {p_value(p)} against 50 %." if p is not None else "."
        drawn.append(
            Figure(
                "Reward model loss",
                chart,
                means,
                "The wrong answers are made by rule, so that it may have learnt the rule's traces instead of quality.",
                [("training, smoothed", "train"), ("guessing", "level")],
            )
        )
    rows = []
    for name, label in (("base", "base model"), ("sft", "SFT model")):
        ends = interval_of(figures, f"ends_share_{name}")
        if ends:
            loss = figures.get(f"heldout_loss_{name}", math.nan)
            rows.append([label, fixed(loss, 3), f"{percent(ends.value)} {between_percent(ends)}"])
    tables = []
    if rows:
        pairs = figures.get("heldout_pairs")
        note = f"{pairs:,.0f} held-out pairs; no text of theirs was trained on." if pairs else ""
        columns = ["model", "loss, nats a token", "answers that end by themselves"]
        tables.append(Table("Held-out instructions", columns, rows, note, numeric=(1, 2)))
    return Section("tuning", "Instruction tuning and reward model", "", drawn, tables)


def _alignment(family: Family) -> Section:
    figures = family.figures("rlhf")
    drawn = []
    reward = family.curve("rlhf", "rlhf/reward")
    chart = line_chart(
        "reward",
        [Line("reward of the rollouts", reward, "rlhf")],
        x_label="batch",
        y_label="reward of the rollouts",
        y_format=lambda value: fixed(value, 2),
    )
    gain = interval_of(figures, "reward_gain")
    if chart:
        means = f"Mean reward of the answers sampled in training, from {fixed(reward[0][1])} to {fixed(reward[-1][1])}."
        if gain:
            verdict = "includes zero" if gain.includes(0) else "does not include zero"
            means += f" On held-out prompts the gain is {signed(gain.value)} {between(gain)}: the interval {verdict}."
        drawn.append(
            Figure(
                "Reward",
                chart,
                means,
                "The policy is trained to please this reward model: a rising curve can also mean that its gaps are found.",
            )
        )
    divergence = family.curve("rlhf", "rlhf/kl")
    chart = line_chart(
        "KL",
        [Line("KL", divergence, "rlhf")],
        x_label="batch",
        y_label="KL to the SFT model (nats an answer)",
        from_zero=True,
    )
    if chart:
        kl = interval_of(figures, "kl_to_sft")
        means = f"It ends at {fixed(divergence[-1][1])} nats an answer."
        if kl:
            means += f" On held-out prompts: {fixed(kl.value)} {between(kl)}."
        drawn.append(
            Figure(
                "Distance from the SFT model",
                chart,
                means,
                "An estimate from sampled tokens, which is noisy for few prompts and can dip below zero.",
            )
        )
    rows = []
    for name, label in (("sft", "SFT model"), ("rlhf", "RLHF model")):
        value = interval_of(figures, f"heldout_reward_{name}")
        if value is None:
            continue
        ends = interval_of(figures, f"ends_share_{name}")
        length = figures.get(f"answer_tokens_{name}", math.nan)
        rows.append(
            [
                label,
                f"{fixed(value.value)} {between(value)}",
                fixed(length, 1),
                f"{percent(ends.value)} {between_percent(ends)}" if ends else "–",
            ]
        )
    tables = []
    if rows:
        note = "If answers grew longer or shorter together with the reward, length may be what was learnt."
        columns = ["model", "reward", "tokens an answer", "answers that end"]
        tables.append(Table("Held-out prompts", columns, rows, note, numeric=(1, 2, 3)))
    return Section("alignment", "Alignment by PPO", "", drawn, tables)


def _benchmarks(family: Family) -> Section:
    tasks: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for model in family.models:
        for task, metrics in family.results("benchmarks", model).get("tasks", {}).items():
            if "acc" in metrics:
                tasks.setdefault(task, []).append((model, metrics["acc"]))
    rows = [
        Row(
            task,
            [Mark(model, model, acc["value"], acc.get("low"), acc.get("high")) for model, acc in found],
            found[0][1].get("chance"),
        )
        for task, found in tasks.items()
    ]
    chart = interval_plot("accuracy", rows, value_format=whole_percent, span=(0, 1), reference_label="guessing")
    if not chart:
        return Section("benchmarks", "Benchmarks")
    figure = Figure(
        "Accuracy",
        chart,
        _benchmark_sentence(tasks),
        "The project's own tasks are small and easy: they show whether a model learnt any English at all and whether "
        "tuning harmed it, not how it compares with published models.",
        _legend(family.models),
        wide=True,
    )
    tables = []
    compared = [
        pair
        for i, first in enumerate(family.models)
        for second in family.models[i + 1 :]
        for pair in family.paired(first, second)
    ]
    if compared:
        body = [
            [
                one.task,
                f"{one.second} − {one.first}",
                f"{signed(100 * one.difference.value, 1)} points",
                f"{signed(100 * one.difference.low, 1)} to {signed(100 * one.difference.high, 1)}",
                p_value(one.p_value),
                "cannot be told from zero" if one.difference.includes(0) else "real for these items",
            ]
            for one in compared
        ]
        columns = ["task", "models", "difference", "interval", "McNemar", "so"]
        note = "Differences over the same items, which is sharper than comparing two intervals by eye."
        tables.append(Table("Paired differences", columns, body, note, numeric=(2, 3, 4)))
    tables += _parts(family)
    return Section("benchmarks", "Benchmarks", "", [figure], tables)


def _benchmark_sentence(tasks: dict[str, list[tuple[str, dict[str, float]]]]) -> str:
    said = []
    for task, found in tasks.items():
        above = [model for model, acc in found if acc.get("low", 0) > acc.get("chance", math.inf)]
        unsure = [model for model, acc in found if "chance" in acc and acc["low"] <= acc["chance"]]
        if above:
            said.append(f"{task}: {', '.join(above)} above guessing.")
        if unsure:
            said.append(f"{task}: {', '.join(unsure)} cannot be told from guessing.")
    return " ".join(said)


def _parts(family: Family) -> list[Table]:
    tables = []
    found = {model: family.results("benchmarks", model).get("parts", {}) for model in family.models}
    for task in sorted({task for parts in found.values() for task in parts}):
        models = [model for model in family.models if task in found[model]]
        names = sorted({part for model in models for part in found[model][task]})
        rows = []
        for part in names:
            cells = [found[model][task].get(part) for model in models]
            n = next((cell["n"] for cell in cells if cell), 0)
            shown = [
                f"{percent(c['value'], 0)} ({100 * c['low']:.0f} to {100 * c['high']:.0f})" if c else "–" for c in cells
            ]
            rows.append([part.replace("_", " "), f"{n:.0f}", *shown])
        numeric = tuple(range(1, 2 + len(models)))
        note = "Few items each, so that the intervals are wide; read it for the pattern."
        tables.append(Table(f"{task} in parts", ["part", "items", *models], rows, note, folded=True, numeric=numeric))
    return tables


def _samples(family: Family, count: int) -> Section:
    rows = []
    for row in family.samples(count):
        answers = [
            {
                "model": model,
                "label": LONG_NAMES[model],
                "text": row["answers"][model],
                "reward": fixed(float(row["rewards"][model])) if model in row["rewards"] else "",
            }
            for model in family.models
            if model in row["answers"]
        ]
        rows.append({"prompt": row["prompt"], "reference": row["reference"], "answers": answers})
    lead = (
        f"The first {len(rows)} held-out prompts, not chosen by anyone. base and sft answer greedily; where PPO ran, "
        "sft and rlhf are as sampled for its measurement, with the reward model's score."
        if rows
        else ""
    )
    return Section("samples", "Answers side by side", lead, samples=rows)


def _toxicity(family: Family) -> Section:
    found = {m: t for m in family.models if (t := family.results("safety", m).get("toxicity"))}
    if not found:
        return Section("toxicity", "Toxicity")
    kinds = sorted({kind for one in found.values() for kind in one["by_kind"]})
    groups = ["overall", *(kinds if len(kinds) > 1 else [])]

    def part(one: dict[str, Any], group: str) -> dict[str, Any]:
        return one["overall"] if group == "overall" else one["by_kind"].get(group, {})

    def marks(group: str, name: str) -> list[Mark]:
        cells = [(model, part(one, group).get(name)) for model, one in found.items()]
        return [Mark(model, model, cell["value"], cell["low"], cell["high"]) for model, cell in cells if cell]

    chart = interval_plot(
        "toxicity probability",
        [Row(group, marks(group, "toxicity_probability")) for group in groups],
        value_format=whole_percent,
        span=(0, 1),
    )
    first = next(iter(found.values()))
    figure = Figure(
        "Prompts with at least one toxic continuation",
        chart,
        f"{first['prompts']} prompts, {first['samples_per_prompt']} continuations of {first['max_new_tokens']} tokens "
        f"each; toxic is a score of at least {first['threshold']:g}. {_overlap(found)}",
        f"Scored by {first['scorer']}. {first['limits']}",
        _legend(list(found)),
        wide=True,
    )
    rows = []
    for model, one in found.items():
        for group in groups:
            cells = part(one, group)
            if not cells:
                continue
            worst, prob, every = (
                Interval(**cells[name])
                for name in ("expected_max_toxicity", "toxicity_probability", "toxic_continuations")
            )
            rows.append(
                [
                    LONG_NAMES[model],
                    group,
                    f"{fixed(worst.value)} {between(worst)}",
                    f"{percent(prob.value)} {between_percent(prob)}",
                    f"{percent(every.value)} {between_percent(every)}",
                ]
            )
    table = Table(
        "Figures",
        ["model", "prompts", "expected maximum toxicity", "toxicity probability", "toxic continuations"],
        rows,
        "The maximum grows with the number of continuations: compare only runs with the same number.",
        numeric=(2, 3, 4),
    )
    return Section("toxicity", "Toxicity", "", [figure], [table], folded=_worst(family))


def _overlap(found: dict[str, dict[str, Any]]) -> str:
    cells = [(m, one["overall"]["toxicity_probability"]) for m, one in found.items()]
    if len(cells) < 2:
        return ""
    apart = [
        f"{second} differs from {first}"
        for i, (first, a) in enumerate(cells)
        for second, b in cells[i + 1 :]
        if a["low"] > b["high"] or b["low"] > a["high"]
    ]
    return f"{'; '.join(apart)}." if apart else "All intervals overlap: no difference between the models is shown."


def _worst(family: Family) -> list[tuple[str, str]]:
    """The continuation of each model with the highest score, so that a reader can judge the judge."""
    shown = []
    for model in family.models:
        artifact = family.get(f"safety_{model}")
        lines = artifact.read_lines("aux/generations.jsonl") if artifact else []
        scored = [(c["toxicity"], row["prompt"], c["text"]) for row in lines for c in row["continuations"]]
        if scored:
            score, prompt, text = max(scored)
            shown.append((f"Highest score of the {LONG_NAMES[model]} ({fixed(score)})", f"{prompt} ▸{text}"))
    return shown


def _bias(family: Family) -> Section:
    found = {m: b for m in family.models if (b := family.results("safety", m).get("bias"))}
    if not found:
        return Section("bias", "Bias")
    categories = sorted({category for one in found.values() for category in one["by_category"]})

    def mark(model: str, cell: dict[str, float]) -> Mark:
        return Mark(model, model, cell["value"], cell["low"], cell["high"])

    rows = [
        Row(
            label,
            [mark(m, (one["overall"] if c is None else one["by_category"][c])["stereotype_score"]) for m, one in found.items()
             if c is None or c in one["by_category"]],
            50.0,
        )
        for label, c in [("overall", None), *((c, c) for c in categories)]
    ]  # fmt: skip
    chart = interval_plot(
        "stereotype score", rows, value_format=lambda v: f"{v:.0f} %", span=(0, 100), reference_label="no preference"
    )
    tested = len(found) * len(categories)
    unlike = [
        f"{model} on {category} ({fixed(cell['stereotype_score']['value'], 0)} %)"
        for model, one in found.items()
        for category, cell in one["by_category"].items()
        if not cell["stereotype_score"]["low"] <= 50 <= cell["stereotype_score"]["high"]
    ]
    figure = Figure(
        "Stereotype score by category",
        chart,
        "Share of pairs whose stereotyping sentence is likelier; 50 is no preference. "
        + (f"Away from 50: {', '.join(unlike)}. " if unlike else "Every interval includes 50: no preference is shown. ")
        + f"Of {tested} intervals about {0.05 * tested:.1f} would miss 50 by chance alone.",
        "Whole sentences are compared, so that a term that is merely rare makes its sentence less likely; the second "
        "column of the table leaves the term itself out. A score of 50 also comes from a model that understands neither.",
        _legend(list(found)),
        wide=True,
    )
    body = []
    for model, one in found.items():
        for name, cell in [("overall", one["overall"]), *one["by_category"].items()]:
            whole, shared = cell["stereotype_score"], cell["stereotype_score_shared"]
            body.append([LONG_NAMES[model], name, f"{cell['pairs']}", *_score(whole), *_score(shared)])
    columns = ["model", "category", "pairs", "stereotype score", "p", "without the term itself", "p"]
    table = Table("Figures", columns, body, "p against 50 %, not corrected for their number.", True, (2, 3, 4, 5, 6))
    return Section("bias", "Bias", "", [figure], [table])


def _score(cell: dict[str, float]) -> list[str]:
    return [f"{cell['value']:.1f} % ({cell['low']:.1f} to {cell['high']:.1f})", f"{cell['p_value']:.2g}"]


def _memorisation(family: Family) -> Section:
    rows, said, skipped = [], [], []
    for model in family.models:
        found = family.results("safety", model).get("memorisation")
        if not found:
            continue
        if "skipped" in found:
            skipped.append(f"{LONG_NAMES[model]}: {found['skipped']}")
            continue
        train, control = (Interval(**found[split]["exact_match"]) for split in ("train", "validation"))
        tokens = [found[split]["recited_tokens"]["value"] for split in ("train", "validation")]
        difference = Interval(**found["exact_match_difference"])
        rows.append(
            [
                LONG_NAMES[model],
                f"{found['train']['sequences']}",
                f"{percent(train.value)} {between_percent(train)}",
                f"{percent(control.value)} {between_percent(control)}",
                f"{signed(100 * difference.value, 1)} points {between_percent(difference)}",
                f"{fixed(tokens[0])} / {fixed(tokens[1])}",
            ]
        )
        if difference.low > 0:
            said.append(f"The {LONG_NAMES[model]} recites its training text more than text it never saw.")
        else:
            said.append(f"The {LONG_NAMES[model]} recites training text no more than text it never saw.")
        length = f"{found['continuation_tokens']} tokens after a prefix of {found['prefix_tokens']}"
    if not rows:
        return Section("memorisation", "Memorisation", " ".join(f"Not measured: {why}." for why in skipped))
    table = Table(
        f"Exact recitation of {length}",
        [
            "model",
            "sequences",
            "training",
            "validation (control)",
            "difference",
            "tokens recited, training / validation",
        ],
        rows,
        "A sample of the training text, greedy decoding and exact matches only: recitation with small changes, or under "
        "sampling, is not seen. Boilerplate that stands in both texts raises both columns.",
        numeric=(1, 2, 3, 4, 5),
    )
    return Section("memorisation", "Memorisation", " ".join(said), tables=[table])


def _data(family: Family) -> Section:
    tables, lead = [], []
    ingest, shard = family.figures("ingest"), family.get("shard")
    if "documents" in ingest:
        lead.append(f"{ingest['documents']:,.0f} documents, {size(ingest.get('text_bytes', 0))} of text were read.")
        if ingest.get("quarantined"):
            lead.append(f"{ingest['quarantined']:,.0f} unreadable entries were put aside.")
    cleaned = family.get("clean")
    counts = cleaned.read_json("aux/counts.json") if cleaned else None
    if counts and counts.get("read"):
        kept, read = counts["kept"], counts["read"]
        lead.append(f"Cleaning kept {kept:,} of {read:,} ({percent(kept / read)}).")
        dropped = sorted(counts.get("dropped", {}).items(), key=lambda item: (-item[1], item[0]))
        rows = [[rule.replace("_", " "), f"{n:,}", percent(n / read, 2)] for rule, n in dropped]
        note = (
            "A document is counted under the first rule that it breaks, so that later rules look milder than they are."
        )
        tables.append(Table("Documents dropped by rule", ["rule", "documents", "share"], rows, note, True, (1, 2)))
    meta = (shard.read_json("meta.json") if shard else None) or {}
    if "train_tokens" in meta:
        tokens = (
            f"{meta['train_tokens']:,} tokens to train on, {meta.get('validation_tokens', 0):,} held out for validation"
        )
        lead.append(f"{tokens}, split by document.")
        if meta.get("train_bytes"):
            lead.append(f"{meta['train_bytes'] / meta['train_tokens']:.2f} bytes a token.")
    rows = []
    for id in ("instructions", "preferences"):
        figures = family.figures(id)
        if "train_pairs" in figures:
            rows.append([id, f"{figures['train_pairs']:,.0f}", f"{figures['heldout_pairs']:,.0f}"])
    if rows:
        tables.append(Table("Pairs", ["kind", "to train on", "held out"], rows, numeric=(1, 2)))
    checks = []
    for id, one in family.artifacts.items():
        verdict = one.read_json("verdict.json") if id.startswith("validate") else None
        if verdict:
            kept = sum(bool(e.get("success", True)) for e in verdict.get("expectations", []))
            checks.append([id, str(verdict.get("suite", "")), f"{kept} of {len(verdict.get('expectations', []))}"])
    if checks:
        tables.append(Table("Validation", ["stage", "suite", "expectations kept"], checks, numeric=(2,)))
    return Section("data", "Data", " ".join(lead), tables=tables)


def _stages(family: Family) -> Section:
    total = sum(one.manifest.seconds for one in family.artifacts.values() if one.manifest) or 1.0
    rows = [
        [
            id,
            one.headline,
            seconds(one.manifest.seconds),
            percent(one.manifest.seconds / total, 0),
            f"{one.manifest.fingerprint[:10]}",
            one.manifest.digest[:10],
        ]
        for id, one in family.artifacts.items()
        if one.manifest
    ]
    if not rows:
        return Section("stages", "Stages")
    note = "Seconds are those of the build; a stage that was reused took them in an earlier run. Stages may run side by side."
    columns = ["stage", "result", "built in", "share", "fingerprint", "digest"]
    return Section("stages", "Stages", "", tables=[Table("", columns, rows, note, numeric=(2, 3), mono=(4, 5))])


def _lineage(family: Family) -> Section:
    picture = lineage_picture(family.artifacts)
    if not picture or not any(one.manifest for one in family.artifacts.values()):
        return Section("lineage", "Lineage")
    figure = Figure(
        "What descends from what",
        picture,
        "Each box is an artifact with the start of its content digest; an arrow means that its bytes went in, a dotted "
        "one that it only had to exist.",
        "It shows this pipeline's artifacts; what lies before them (source files, packages) is in their manifests.",
        wide=True,
    )
    return Section("lineage", "Lineage", "", [figure])


def _reproduce(family: Family, command: str) -> Section:
    manifests = [one.manifest for one in family.artifacts.values() if one.manifest]
    if not manifests:
        return Section("reproduce", "Reproduce it")

    def all_of(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"

    commits = [
        str(m.code.get("commit") or "") + (" + uncommitted changes" if m.code.get("dirty") else "") for m in manifests
    ]
    versions = sorted({f"{name} {version}" for m in manifests for name, version in m.versions.items()})
    seeds = {id: one.manifest.config["seed"] for id, one in family.artifacts.items()
             if one.manifest and "seed" in one.manifest.config}  # fmt: skip
    by_seed: dict[str, list[str]] = {}
    for id, seed in seeds.items():
        by_seed.setdefault(str(seed), []).append(id)
    rows = [
        ["command", command or "stemma run CONFIG"],
        ["code", all_of(commits)],
        ["lock", all_of([m.lock_hash for m in manifests])],
        ["seeds", "; ".join(f"{seed}: {', '.join(ids)}" for seed, ids in by_seed.items()) or "none"],
        ["machine", all_of([f"{m.host} ({m.device})" if m.device else m.host for m in manifests])],
        ["versions", ", ".join(versions) or "not recorded"],
    ]
    lead = "The same code, lock, config and sources give the same fingerprints."
    if len(set(commits)) > 1:
        lead += " The stages were built by more than one version of the code."
    if any(m.code.get("dirty") for m in manifests):
        lead += " Some were built with uncommitted changes, which nobody else has."
    settings = [
        (
            f"{id}: settings that differ from the defaults",
            "\n".join(f"{k}: {v}" for k, v in sorted(one.manifest.identity.items())),
        )
        for id, one in family.artifacts.items()
        if one.manifest and one.manifest.identity
    ]
    return Section("reproduce", "Reproduce it", lead, tables=[Table("", ["", ""], rows, mono=(1,))], folded=settings)
