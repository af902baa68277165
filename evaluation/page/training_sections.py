"""Pretraining, instruction tuning, reward model and alignment: their curves and what they show."""

from __future__ import annotations

import math
import re
from statistics import fmean, pstdev
from typing import Any

from evaluation.page.charts import Level, Line, line_chart
from evaluation.page.parts import Figure, Section, Table, loss_lines
from evaluation.page.words import (
    between,
    between_percent,
    compact,
    fixed,
    interval_of,
    on_the_way,
    p_value,
    percent,
    signed,
)
from evaluation.pipeline_results import PipelineResults


def titled(anchor: str, title: str, id: str, usual: str) -> tuple[str, str]:
    """The anchor and title of a section about one step; those of the usual step do not name it."""
    return (anchor, title) if id == usual else (f"{anchor}-{id}", f"{title}: {id}")


def pretraining(pipeline: PipelineResults, id: str) -> Section:
    """The pretraining of one step."""
    figures = pipeline.figures(id)
    train, validation = pipeline.curve(id, "train/loss"), pipeline.sampled(id)
    drawn = []
    levels = [Level(name, figures[f"{name}_loss"]) for name in ("unigram", "bigram") if f"{name}_loss" in figures]
    chart = line_chart(
        "loss over batches",
        [*loss_lines(train), Line("validation, sampled", validation, "validation")],
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
                [
                    ("training, smoothed", "train"),
                    ("validation, sampled", "validation"),
                    ("n-gram baselines", "level"),
                ],
            )
        )
    rate = pipeline.curve(id, "train/lr")
    corrections = pipeline.corrections(id)
    chart = line_chart(
        "learning rate",
        [Line("learning rate", rate, "train")],
        x_label="batch",
        y_label="learning rate",
        from_zero=True,
        marks=[(one["back_to"], _described(one)) for one in corrections],
    )
    if chart:
        peak = max(value for _, value in rate)
        at = next(step for step, value in rate if value == peak)
        drawn.append(
            Figure(
                "Learning rate",
                chart,
                (f"It rises to {peak:.2g} by batch {compact(at)}" if at > rate[0][0] else f"It starts at {peak:.2g}")
                + f" and ends at {rate[-1][1]:.2g}."
                + (f" The guard lowered it {_times(len(corrections))}, where the lines stand." if corrections else ""),
                "The peak was set in the config; how it was chosen, this page cannot know.",
                [("learning rate as trained", "train"), ("correction", "happened")] if corrections else (),
            )
        )
    lead = []
    if "parameters" in figures:
        tokens = figures.get("tokens", math.nan)
        per_parameter = tokens / figures["parameters"]
        lead.append(
            f"{compact(figures['parameters'])} parameters saw {compact(tokens)} tokens, {per_parameter:.2g} each."
        )
        lead += _length_of_training(pipeline, id, tokens, per_parameter)
    if "bits_per_byte" in figures:
        perplexity = figures.get("validation_perplexity", math.nan)
        text = (
            f" of {compact(figures['validation_tokens'])} validation tokens" if "validation_tokens" in figures else ""
        )
        bits = fixed(figures["bits_per_byte"], 3)
        lead.append(f"After training, {bits} bits per byte and perplexity {fixed(perplexity, 1)}{text}.")
    if "tokens_per_s" in figures:
        lead.append(f"{compact(figures['tokens_per_s'])} tokens a second.")
    tables = [*_corrections(corrections), *_early_samples(pipeline, id)]
    return Section(*titled("pretraining", "Pretraining", id, "pretrain"), " ".join(lead), drawn, tables)


def _length_of_training(pipeline: PipelineResults, id: str, tokens: float, per_parameter: float) -> list[str]:
    """How often the text was read, and what would better a model that saw little of it for its size."""
    found = pipeline.get(id)
    wanted = found.manifest.inputs.get("shards") if found and found.manifest else None
    shards = pipeline.by_address(wanted.stage, wanted.fingerprint) if wanted else None
    ready = ((shards.read_json("meta.json") if shards else None) or {}).get("train_tokens")
    said = [f"It read {_read(tokens / ready)} of the {compact(ready)} tokens that were ready."] if ready else []
    if per_parameter >= 15:
        return said
    said.append("Chinchilla's rule is about 20 tokens a parameter: this model is undertrained for its size.")
    if ready and tokens < 0.95 * ready:
        said.append("A longer training would better it, without more text.")
    elif ready and tokens < 4 * ready:
        said.append("Reading the text again would better it, up to about four times (Muennighoff et al. 2023).")
    else:
        said.append("More text would better it." if ready else "More tokens would better it.")
    return said


def _read(times: float) -> str:
    return percent(times, 0) if times < 0.995 else f"all, {times:.1f} times," if times >= 1.05 else "all"


def _early_samples(pipeline: PipelineResults, id: str) -> list[Table]:
    """What the model wrote while it trained: up to six moments from first to last, all prompts."""
    found = pipeline.get(id)
    lines = found.read_lines("aux/training_samples.jsonl") if found else []
    texts = {(line["batch"], line["prompt"]): line["text"] for line in lines}
    moments = sorted({batch for batch, _ in texts})
    chosen = {moments[round(place * (len(moments) - 1) / 5)] for place in range(6)} if moments else set()
    rows = [[compact(batch), prompt or "(nothing)", text] for (batch, prompt), text in texts.items() if batch in chosen]
    note = "Drawn with the same random numbers each time: what differs is the model."
    return [Table("Samples while training", ["batch", "prompt", "goes on"], rows, note, folded=True)] if rows else []


def _described(one: dict[str, Any]) -> str:
    alarm = one["alarm"]
    return (
        f"{alarm['cause']} {float(alarm['value']):.3g} at batch {alarm['batch']:,}: back to {one['back_to']:,}, "
        f"learning rate × {one['factor']:.3g}"
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _corrections(made: list[dict[str, Any]]) -> list[Table]:
    """What the guard did, a row a correction."""
    rows = [
        [
            compact(one["alarm"]["batch"]),
            one["alarm"]["cause"],
            f"{float(one['alarm']['value']):.3g}",
            f"{float(one['alarm']['usual']):.3g}",
            compact(one["back_to"]),
            f"× {one['factor']:.3g}" + (", for good" if one.get("recover") == 0 else ""),
            f"{one['skip_first']:,} to {one['skip_end'] - 1:,}" if one["skip_end"] > one["skip_first"] else "none",
        ]
        for one in made
    ]
    columns = ["batch", "alarm by", "value", "usual", "back to", "learning rate", "batches left out"]
    note = "Made without a person by the guard; they follow from config, data and seed."
    return [Table("Corrections in flight", columns, rows, note, numeric=(0, 2, 3, 4, 5))] if rows else []


def _loss_sentence(
    train: list[tuple[float, float]], validation: list[tuple[float, float]], figures: dict[str, float]
) -> str:
    said = []
    if len(validation) > 1:
        best = min(validation, key=lambda point: point[1])
        last = validation[-1]
        if best[0] == last[0]:
            said.append(f"Loss of the validation sample still falls at the end ({fixed(last[1], 3)}).")
        else:
            said.append(
                f"Loss of the sample was lowest at batch {compact(best[0])} ({fixed(best[1], 3)}) and ends at "
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


def tuning(pipeline: PipelineResults, id: str, reward_model: str = "") -> Section:
    """The instruction tuning of one step, with the reward model that goes with it in the usual pipeline."""
    figures = pipeline.figures(id)
    drawn = []
    chart = line_chart(
        "SFT loss",
        [
            *loss_lines(pipeline.curve(id, "train/loss")),
            Line("held-out", pipeline.sampled(id), "validation"),
        ],
        x_label="batch",
        y_label="loss of the answers (nats a token)",
    )
    if chart:
        before, after = figures.get("heldout_loss_base", math.nan), figures.get("heldout_loss_sft", math.nan)
        means = f"On held-out instructions the loss went from {fixed(before)} to {fixed(after)} nats a token."
        drawn.append(
            Figure(
                "SFT loss",
                chart,
                means + on_the_way(pipeline.sampled(id)),
                "A lower loss on the reference answers is not the same as better answers; read the samples.",
                _LEGEND[: 2 if pipeline.sampled(id) else 1],
            )
        )
    if reward_model:
        drawn += _reward_model(pipeline, reward_model)
    rows = []
    for name, model in (pipeline.roles(id) if pipeline.get(id) else {}).items():
        label = pipeline.long_name(model)
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
    title = "Instruction tuning and reward model" if reward_model else "Instruction tuning"
    return Section(*titled("tuning", title, id, "sft"), "", drawn, tables)


_LEGEND = [("training, smoothed", "train"), ("held-out sample", "validation")]


def reward_model(pipeline: PipelineResults, id: str) -> Section:
    """The reward model of a named step."""
    return Section(*titled("reward-model", "Reward model", id, "reward_model"), "", _reward_model(pipeline, id))


def _reward_model(pipeline: PipelineResults, id: str) -> list[Figure]:
    chart = line_chart(
        "reward model loss",
        [*loss_lines(pipeline.curve(id, "train/loss")), Line("held-out", pipeline.sampled(id), "validation")],
        x_label="batch",
        y_label="loss (nats a pair)",
        levels=[Level("guessing", math.log(2))],
    )
    accuracy = interval_of(pipeline.figures(id), "heldout_accuracy")
    if chart:
        means = "Guessing gives log 2 = 0.69 nats a pair."
        if accuracy:
            p = pipeline.figures(id).get("p_value")
            means += f" Held-out pairs ordered rightly: {percent(accuracy.value)} {between_percent(accuracy)}"
            means += f", {p_value(p)} against 50 %." if p is not None else "."
        means += _length_and_confidence(pipeline.figures(id))
        return [
            Figure(
                "Reward model loss",
                chart,
                means + on_the_way(pipeline.sampled(id)),
                "The wrong answers are made by rule, so that it may have learnt the rule's traces instead of quality.",
                [*_LEGEND[: 2 if pipeline.sampled(id) else 1], ("guessing", "level")],
            )
        ]
    return []


def _length_and_confidence(figures: dict[str, float]) -> str:
    """Whether a reward model goes by length, and whether it is right as often as it says."""
    said = ""
    longer, shorter = (interval_of(figures, f"heldout_accuracy_chosen_{name}") for name in ("longer", "shorter"))
    if longer and shorter:
        said += (
            f" Where the better answer is the longer one it is right in {percent(longer.value)} "
            f"{between_percent(longer)}, where it is the shorter in {percent(shorter.value)} {between_percent(shorter)}"
        )
        said += ": it goes by length." if longer.low > shorter.high else "."
    if (error := figures.get("calibration_error")) is not None:
        said += (
            f" It says to be right in {percent(figures['mean_confidence'])} of pairs (calibration error "
            f"{percent(error)})."
        )
    return said


def preference_tuning(pipeline: PipelineResults, id: str) -> Section:
    """The alignment of one step on preference pairs themselves."""
    figures, drawn = pipeline.figures(id), []
    sampled = pipeline.curve(id, "validation/sample_margin")
    chart = line_chart(
        "preference margin",
        [*loss_lines(pipeline.curve(id, "preference/margin")), Line("held-out", sampled, "validation")],
        x_label="batch",
        y_label="nats by which the chosen answer rose more",
    )
    margin, win_rate = interval_of(figures, "margin"), interval_of(figures, "win_rate")
    risen = [interval_of(figures, f"{name}_rise") for name in ("chosen", "rejected")]
    if chart:
        means = "Log-probability of the chosen answer less that of the rejected one, both against the model before."
        if margin and win_rate:
            means += (
                f" On held-out pairs {signed(margin.value)} {between(margin)}; in {percent(win_rate.value)} of them "
                f"the chosen answer rose more {between_percent(win_rate)}."
            )
        weak = "A margin says which answer gained, not that the model writes the better one: read the answers."
        chosen = risen[0]
        if chosen and chosen.high < 0:
            weak = (
                f"The chosen answers lost probability too, {signed(chosen.value)} nats {between(chosen)}: what the "
                "model writes instead stands in no pair (Razin et al. 2024). A larger beta moves less."
            )
        drawn.append(Figure("Margin of preference", chart, means, weak, _LEGEND[: 2 if sampled else 1]))
    rows = []
    for name, model in (pipeline.roles(id) if pipeline.get(id) else {}).items():
        prefers, ends = (interval_of(figures, f"{figure}_{name}") for figure in ("prefers_chosen", "ends_share"))
        if prefers is None or ends is None:
            continue
        judged = interval_of(figures, f"heldout_judge_{name}")
        rows.append(
            [
                pipeline.long_name(model),
                f"{percent(prefers.value)} {between_percent(prefers)}",
                *([f"{fixed(judged.value)} {between(judged)}"] if judged else []),
                fixed(figures.get(f"answer_tokens_{name}", math.nan), 1),
                f"{percent(ends.value)} {between_percent(ends)}",
            ]
        )
    tables = []
    if rows:
        judged_by = ["judge's score"] if "judge_gain" in figures else []
        columns = ["model", "chosen is likelier", *judged_by, "tokens an answer", "answers that end"]
        note = f"{figures['heldout_pairs']:,.0f} held-out pairs; likelier by the mean log-probability a token."
        if kl := interval_of(figures, "kl_to_reference"):
            note += f" The KL divergence from the model before is {fixed(kl.value)} nats an answer {between(kl)}."
        tables.append(Table("Held-out pairs", columns, rows, note, numeric=tuple(range(1, len(columns)))))
    title = f"Alignment by {pipeline.algorithm(id)}"
    return Section(*titled("preference-tuning", title, id, "preference_tuning"), "", drawn, tables)


def alignment(pipeline: PipelineResults, id: str) -> Section:
    """The alignment of one step."""
    figures = pipeline.figures(id)
    called = pipeline.roles(id) if pipeline.get(id) else {}
    start = pipeline.long_name(called.get("sft", "sft"))
    drawn = []
    reward, judge = pipeline.curve(id, "rlhf/reward"), pipeline.curve(id, "rlhf/judge")
    lines, legend, unit = [Line("reward of the rollouts", reward, "rlhf")], [], "reward of the rollouts"
    if judge:
        # Two models' scores have no common scale.
        points = {key: _standardised(pipeline, id, key, of) for key, of in (("rewards", reward), ("judge", judge))}
        lines = [Line("reward", points["rewards"], "rlhf"), Line("judge", points["judge"], "validation")]
        legend = [("reward model, which is learnt from", "rlhf"), ("judge, which trains nothing", "validation")]
        unit = f"standard deviations above the {start}"
    chart = line_chart(
        "reward",
        lines,
        x_label="batch",
        y_label=unit,
        y_format=lambda value: fixed(value, 2),
    )
    gain = interval_of(figures, "reward_gain")
    if chart:
        means = f"Mean reward of the answers sampled in training, from {fixed(reward[0][1])} to {fixed(reward[-1][1])}."
        if gain:
            verdict = "includes zero" if gain.includes(0) else "does not include zero"
            means += f" On held-out prompts the gain is {signed(gain.value)} {between(gain)}: the interval {verdict}."
        if level := interval_of(figures, "reward_gain_equal_length"):
            verdict = "includes zero" if level.includes(0) else "does not include zero"
            means += f" Between answers of equal length it is {signed(level.value)} {between(level)}, which {verdict}."
        weak = "The policy is trained to please this reward model: a rising curve can mean that its gaps are found."
        if judge:
            means += f" The judge's score of them went from {fixed(judge[0][1])} to {fixed(judge[-1][1])}."
            if found := interval_of(figures, "judge_gain"):
                means += f" On held-out prompts the judge finds {signed(found.value)} {between(found)}."
            weak = (
                f"Zero is the mean of the {start} on held-out prompts. Where the reward rises and the judge's score "
                "does not, gaps of the reward model were found (Gao et al. 2022); gaps that both share stay hidden."
            )
        drawn.append(Figure("Reward", chart, means, weak, legend))
    divergence = pipeline.curve(id, "rlhf/kl")
    if judge and (over := _over_distance(points, divergence)):
        chart = line_chart(
            "reward over distance",
            [Line("reward", over["rewards"], "rlhf"), Line("judge", over["judge"], "validation")],
            x_label=f"KL to the {start} (nats an answer)",
            y_label=unit,
            y_format=lambda value: fixed(value, 2),
        )
        if chart:
            drawn.append(Figure("Reward over distance", chart, _over_optimised(figures, over), _PROXY_WEAK, legend))
    chart = line_chart(
        "KL",
        [Line("KL", divergence, "rlhf")],
        x_label="batch",
        y_label=f"KL to the {start} (nats an answer)",
        from_zero=True,
    )
    if chart:
        kl = interval_of(figures, "kl_to_sft")
        means = f"It ends at {fixed(divergence[-1][1])} nats an answer."
        if kl:
            means += f" On held-out prompts: {fixed(kl.value)} {between(kl)}."
        drawn.append(
            Figure(
                f"Distance from the {start}",
                chart,
                means,
                "An estimate from sampled tokens, which is noisy for few prompts and can dip below zero.",
            )
        )
    rows = []
    for name, model in called.items():
        label = pipeline.long_name(model)
        value = interval_of(figures, f"heldout_reward_{name}")
        if value is None:
            continue
        ends = interval_of(figures, f"ends_share_{name}")
        length = figures.get(f"answer_tokens_{name}", math.nan)
        by_judge = interval_of(figures, f"heldout_judge_{name}")
        rows.append(
            [
                label,
                f"{fixed(value.value)} {between(value)}",
                *([f"{fixed(by_judge.value)} {between(by_judge)}"] if by_judge else []),
                fixed(length, 1),
                f"{percent(ends.value)} {between_percent(ends)}" if ends else "–",
            ]
        )
    tables = []
    if rows:
        note = "If answers grew longer or shorter together with the reward, length may be what was learnt."
        if level := interval_of(figures, "reward_gain_equal_length"):
            note += (
                f" Fitted over the prompts, one more token is worth {signed(figures['reward_per_token'], 3)}; the gain "
                f"at equal length is {signed(level.value)} {between(level)}."
            )
        judged = ["judge's score"] if "judge_gain" in figures else []
        columns = ["model", "reward", *judged, "tokens an answer", "answers that end"]
        tables.append(Table("Held-out prompts", columns, rows, note, numeric=tuple(range(1, len(columns)))))
    tables += _best_of(figures, pipeline.algorithm(id))
    lead = ""
    if "generating_share" in figures:
        lead = f"Answers were generated at {compact(figures['generated_tokens_per_s'])} tokens a second, which took "
        lead += f"{percent(figures['generating_share'])} of the rounds' time."
    return Section(*titled("alignment", f"Alignment by {pipeline.algorithm(id)}", id, "rlhf"), lead, drawn, tables)


_PROXY_WEAK = "Rounds in the order of their KL divergence, each a mean over its answers; the estimate of KL is noisy."


def _over_distance(
    points: dict[str, list[tuple[float, float]]], divergence: list[tuple[float, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Reward and judge over the distance from the model before, as in figure 1 of Gao et al. 2022; empty where fewer
    than three rounds have all three."""
    at = dict(divergence)
    found = {key: sorted((at[step], value) for step, value in of if step in at) for key, of in points.items()}
    return found if all(len(of) > 2 for of in found.values()) else {}


def _over_optimised(figures: dict[str, float], over: dict[str, list[tuple[float, float]]]) -> str:
    """Where the judge's score is highest, and whether the reward went on rising from there."""
    best, last = max(over["judge"], key=lambda point: point[1]), over["judge"][-1]
    said = (
        f"The judge's score is highest at {fixed(best[0])} nats; the policy went to {fixed(last[0])}, where it lies "
        f"{fixed(best[1] - last[1])} lower."
    )
    if figures.get("stopped_early"):
        said += " Training was stopped there, since the judge's score fell beyond chance while the reward rose."
    return said


def _best_of(figures: dict[str, float], algorithm: str) -> list[Table]:
    """What choosing among several answers of the model before would give, above what the training gave."""
    counts = sorted(int(name.split("_")[2]) for name in figures if re.fullmatch(r"best_of_\d+_kl", name))
    kinds = {"reward": "reward", "judge": "judge's score", "verified": "verified right"}
    kinds = {kind: label for kind, label in kinds.items() if f"best_of_1_{kind}" in figures}
    if not counts or not kinds:
        return []

    def row(label: str, kl: float, names: list[str]) -> list[str]:
        found = [interval_of(figures, name) for name in names]
        return [label, fixed(kl), *(f"{fixed(one.value)} {between(one)}" if one else "–" for one in found)]

    rows = [row(f"best of {n}", figures[f"best_of_{n}_kl"], [f"best_of_{n}_{kind}" for kind in kinds]) for n in counts]
    own = {"reward": "heldout_reward_rlhf", "judge": "heldout_judge_rlhf", "verified": "verified_rlhf"}
    rows.append(row(algorithm, figures.get("kl_to_sft", math.nan), [own[kind] for kind in kinds]))
    note = "Chosen by the reward model among answers of the model before, without training; KL = log n − (n − 1)/n."
    columns = ["", "KL, nats an answer", *kinds.values()]
    return [Table("Against the best of n", columns, rows, note, numeric=tuple(range(1, len(columns))))]


def _standardised(
    pipeline: PipelineResults, id: str, key: str, points: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Points in standard deviations above the mean of what the answers of the model before scored on held-out prompts;
    those of a training that is not measured yet start at zero and keep their unit."""
    scores = pipeline.scores(id, key, "sft")
    mean, spread = (fmean(scores), pstdev(scores) or 1.0) if scores else (points[0][1], 1.0)
    return [(step, (value - mean) / spread) for step, value in points]
