"""Preference tuning, distillation and RLHF: their curves, and results on held-out prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean, pstdev

from evaluation.pages.charts import Line, line_chart
from evaluation.pages.parts import Figure, Section, Table, loss_lines
from evaluation.pages.report.training.episode_section import episode_reward, episode_tables, transcripts
from evaluation.pages.report.training.training_sections import LEGEND, titled
from evaluation.pages.words import (
    between,
    between_percent,
    compact,
    fixed,
    interval_of,
    percent,
    signed,
)
from evaluation.results.pipeline import PipelineResults


def distillation(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step's distillation from a teacher."""
    figures, drawn, tables = pipeline.figures(id), [], []
    chart = line_chart(
        "divergence from the teacher",
        [*loss_lines(pipeline.curve(id, "train/loss")), Line("held-out", pipeline.sampled(id), "validation")],
        x_label="batch",
        y_label="divergence from the teacher (nats per token)",
    )
    fall = interval_of(figures, "divergence_fall")
    if chart:
        caption = "Divergence of student and teacher along the answers that were learnt."
        if fall:
            caption += f" On held-out answers it fell by {fixed(fall.value, 3)} {between(fall, 3)}."
        weak = "A student that is near its teacher has the teacher's faults too; read the answers."
        drawn.append(Figure("Divergence", chart, caption, weak, LEGEND[: 2 if pipeline.sampled(id) else 1]))
    rows = []
    for name, model in (pipeline.roles(id) if fall else {}).items():
        divergence, agreement = (interval_of(figures, f"{key}_{name}") for key in ("heldout_divergence", "agreement"))
        answers = interval_of(figures, f"answers_kl_{name}")
        if divergence and agreement and answers:
            rows.append(
                [
                    pipeline.long_name(model),
                    f"{fixed(divergence.value, 3)} {between(divergence, 3)}",
                    f"{percent(agreement.value)} {between_percent(agreement)}",
                    f"{fixed(answers.value)} {between(answers)}",
                    fixed(figures.get(f"heldout_loss_{name}", math.nan), 3),
                ]
            )
    if rows:
        columns = ["model", "divergence, nats per token", "tokens that agree", "KL of sampled answers", "loss"]
        loss = fixed(figures.get("heldout_loss_teacher", math.nan), 3)
        note = f"{figures['heldout_pairs']:,.0f} held-out pairs; the teacher's loss on their answers is {loss}."
        tables.append(Table("Held-out divergence", columns, rows, note, numeric=(1, 2, 3, 4)))
    return Section(*titled("distillation", "Distillation", id, "distill"), "", drawn, tables)


def preference_tuning(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step's alignment on preference pairs themselves."""
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
        caption = "Log-probability of the chosen answer less that of the rejected one, both against the model before."
        if margin and win_rate:
            caption += (
                f" On held-out pairs {signed(margin.value)} {between(margin)}; in {percent(win_rate.value)} of them "
                f"the chosen answer rose more {between_percent(win_rate)}."
            )
        weak = "A margin shows which answer gained, not that the model writes the better one: read the answers."
        chosen = risen[0]
        if chosen and chosen.high < 0:
            weak = (
                f"The chosen answers lost probability too, {signed(chosen.value)} nats {between(chosen)}: what the "
                "model writes instead is in no pair (Razin et al. 2024). A larger beta moves less."
            )
        drawn.append(Figure("Margin of preference", chart, caption, weak, LEGEND[: 2 if sampled else 1]))
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
        columns = ["model", "chosen is likelier", *judged_by, "tokens per answer", "answers that end"]
        note = f"{figures['heldout_pairs']:,.0f} held-out pairs; likelier by the mean log-probability per token."
        if kl := interval_of(figures, "kl_to_reference"):
            note += f" The KL divergence from the model before is {fixed(kl.value)} nats per answer {between(kl)}."
        tables.append(Table("Held-out pairs", columns, rows, note, numeric=tuple(range(1, len(columns)))))
    title = f"Alignment by {pipeline.algorithm(id)}"
    return Section(*titled("preference-tuning", title, id, "preference_tuning"), "", drawn, tables)


def alignment(pipeline: PipelineResults, id: str) -> Section:
    """Return the section on one step's alignment."""
    figures = pipeline.figures(id)
    roles = pipeline.roles(id) if pipeline.get(id) else {}
    start = pipeline.long_name(roles.get("sft", "sft"))
    tables = [
        *_heldout_answers(pipeline, figures, roles),
        *episode_tables(pipeline, figures, roles),
        *_rubric(pipeline, figures, roles),
        *_best_of(figures, pipeline.algorithm(id)),
    ]
    lead = ""
    if "generating_share" in figures:
        lead = f"Answers were generated at {compact(figures['generated_tokens_per_s'])} tokens per second, which took "
        lead += f"{percent(figures['generating_share'])} of the rounds' time."
    if "trainer_idle_share" in figures:
        lead = _beside_learning(figures)
    drawn = [*_rewards(pipeline, id, start), *episode_reward(pipeline, id), *_distance(pipeline, id, start)]
    name = titled("alignment", f"Alignment by {pipeline.algorithm(id)}", id, "rlhf")
    return Section(*name, lead, drawn, tables, transcripts(pipeline, id, roles))


def _beside_learning(figures: Mapping[str, float]) -> str:
    """Return sentences on samplers that work next to the trainer."""
    return (
        f"Samplers next to the trainer generated {compact(figures['generated_tokens_per_s'])} tokens per second, "
        f"{fixed(figures['staleness'])} rounds ahead in the mean. The trainer was idle for "
        f"{percent(figures['trainer_idle_share'])} of the rounds' time, samplers for "
        f"{percent(figures['sampler_idle_share'])}. {figures['answers_dropped']:,.0f} answers were dropped as too old, "
        f"and {figures['samplers_replaced']:,.0f} samplers died and were replaced."
    )


def _rewards(pipeline: PipelineResults, id: str, start: str) -> list[Figure]:
    """Draw the reward over rounds and, with a judge, both scores, also over distance.

    Args:
        start: the model before, in words.
    """
    figures = pipeline.figures(id)
    reward, judge = pipeline.curve(id, "rlhf/reward"), pipeline.curve(id, "rlhf/judge")
    lines, legend, unit = [Line("reward of the rollouts", reward, "rlhf")], [], "reward of the rollouts"
    if judge:
        # Scores of two models have no common scale.
        points = {
            key: _standardised(pipeline, id, key, series) for key, series in (("rewards", reward), ("judge", judge))
        }
        lines = [Line("reward", points["rewards"], "rlhf"), Line("judge", points["judge"], "validation")]
        legend = [("reward model, which is learnt from", "rlhf"), ("judge, which trains nothing", "validation")]
        unit = f"standard deviations above the {start}"
    drawn = []
    if chart := line_chart("reward", lines, x_label="batch", y_label=unit, y_format=lambda value: fixed(value, 2)):
        weak = "The policy is trained to please this reward model: a rising curve can mean that its gaps are found."
        if judge:
            weak = (
                f"Zero is the mean of the {start} on held-out prompts. Where the reward rises and the judge's score "
                "does not, gaps of the reward model were found (Gao et al. 2022); gaps that both share stay hidden."
            )
        drawn.append(Figure("Reward", chart, _reward_sentences(figures, reward, judge), weak, legend))
    if judge and (over := _over_distance(points, pipeline.curve(id, "rlhf/kl"))):
        chart = line_chart(
            "reward over distance",
            [Line("reward", over["rewards"], "rlhf"), Line("judge", over["judge"], "validation")],
            x_label=f"KL to the {start} (nats per answer)",
            y_label=unit,
            y_format=lambda value: fixed(value, 2),
        )
        if chart:
            drawn.append(Figure("Reward over distance", chart, _over_optimised(figures, over), _PROXY_WEAK, legend))
    return drawn


def _reward_sentences(
    figures: dict[str, float], reward: list[tuple[float, float]], judge: list[tuple[float, float]]
) -> str:
    """Describe the reward by the curves of the rounds, (batch, mean score), and by held-out prompts."""
    caption = f"Mean reward of the answers sampled in training, from {fixed(reward[0][1])} to {fixed(reward[-1][1])}."
    if gain := interval_of(figures, "reward_gain"):
        verdict = "includes zero" if gain.includes(0) else "does not include zero"
        caption += f" On held-out prompts the gain is {signed(gain.value)} {between(gain)}: the interval {verdict}."
    if level := interval_of(figures, "reward_gain_equal_length"):
        verdict = "includes zero" if level.includes(0) else "does not include zero"
        caption += f" Between answers of equal length it is {signed(level.value)} {between(level)}, which {verdict}."
    if judge:
        caption += f" The judge's score of them went from {fixed(judge[0][1])} to {fixed(judge[-1][1])}."
        if judge_gain := interval_of(figures, "judge_gain"):
            caption += f" On held-out prompts the judge finds {signed(judge_gain.value)} {between(judge_gain)}."
    return caption


def _distance(pipeline: PipelineResults, id: str, start: str) -> list[Figure]:
    """Draw the KL divergence from the model before over the rounds."""
    divergence = pipeline.curve(id, "rlhf/kl")
    chart = line_chart(
        "KL",
        [Line("KL", divergence, "rlhf")],
        x_label="batch",
        y_label=f"KL to the {start} (nats per answer)",
        from_zero=True,
    )
    if not chart:
        return []
    caption = f"It ends at {fixed(divergence[-1][1])} nats per answer."
    if kl := interval_of(pipeline.figures(id), "kl_to_sft"):
        caption += f" On held-out prompts: {fixed(kl.value)} {between(kl)}."
    weak = "An estimate from sampled tokens, which is noisy for few prompts and can dip below zero."
    return [Figure(f"Distance from the {start}", chart, caption, weak)]


def _heldout_answers(pipeline: PipelineResults, figures: dict[str, float], roles: Mapping[str, str]) -> list[Table]:
    """Return reward and length of both models' answers to held-out prompts. called: the models by their names in
    figures."""
    rows = []
    for name, model in roles.items():
        value = interval_of(figures, f"heldout_reward_{name}")
        if value is None:
            continue
        ends = interval_of(figures, f"ends_share_{name}")
        by_judge = interval_of(figures, f"heldout_judge_{name}")
        rows.append(
            [
                pipeline.long_name(model),
                f"{fixed(value.value)} {between(value)}",
                *([f"{fixed(by_judge.value)} {between(by_judge)}"] if by_judge else []),
                fixed(figures.get(f"answer_tokens_{name}", math.nan), 1),
                f"{percent(ends.value)} {between_percent(ends)}" if ends else "–",
            ]
        )
    if not rows:
        return []
    note = "If answers grew longer or shorter together with the reward, length may be what was learnt."
    if level := interval_of(figures, "reward_gain_equal_length"):
        note += (
            f" Fitted over the prompts, one more token is worth {signed(figures['reward_per_token'], 3)}; the gain "
            f"at equal length is {signed(level.value)} {between(level)}."
        )
    judged = ["judge's score"] if "judge_gain" in figures else []
    columns = ["model", "reward", *judged, "tokens per answer", "answers that end"]
    return [Table("Held-out prompts", columns, rows, note, numeric=tuple(range(1, len(columns))))]


def _rubric(pipeline: PipelineResults, figures: dict[str, float], roles: Mapping[str, str]) -> list[Table]:
    """Return the judge's mean score by each criterion of a rubric, of both models' answers to held-out prompts."""
    keys = sorted(name.removesuffix("_gain") for name in figures if re.fullmatch(r"rubric(_[a-z0-9_]+)?_gain", name))
    rows = []
    for key in keys:
        sides = [interval_of(figures, f"{key}_{name}") for name in roles]
        gain = interval_of(figures, f"{key}_gain")
        if gain and all(sides):
            cells = [f"{fixed(side.value)} {between(side)}" for side in sides if side]
            name = key.removeprefix("rubric_") if key != "rubric" else "all, weighted"
            rows.append([name, *cells, f"{signed(gain.value)} {between(gain)}"])
    if not rows:
        return []
    columns = ["criterion", *(pipeline.long_name(model) for model in roles.values()), "gain"]
    note = "Mean scores from 0 to 1 by the judge that also rewarded the answers: read them for what it overlooks."
    return [Table("Rubric", columns, rows, note, numeric=tuple(range(1, len(columns))))]


_PROXY_WEAK = "Rounds in the order of their KL divergence, each a mean over its answers; the estimate of KL is noisy."


def _over_distance(
    points: dict[str, list[tuple[float, float]]], divergence: list[tuple[float, float]]
) -> dict[str, list[tuple[float, float]]]:
    """Return reward and judge over the distance from the model before, as in figure 1 of Gao et al. 2022; empty if
    fewer than three rounds have all three."""
    distance_at = dict(divergence)
    pairs = {
        key: sorted((distance_at[step], value) for step, value in series if step in distance_at)
        for key, series in points.items()
    }
    return pairs if all(len(series) > 2 for series in pairs.values()) else {}


def _over_optimised(figures: dict[str, float], over: dict[str, list[tuple[float, float]]]) -> str:
    """State the distance at which the judge's score is highest, and its drop at the end."""
    best, last = max(over["judge"], key=lambda point: point[1]), over["judge"][-1]
    sentence = (
        f"The judge's score is highest at {fixed(best[0])} nats; the policy went to {fixed(last[0])}, where it is "
        f"{fixed(best[1] - last[1])} lower."
    )
    if figures.get("stopped_early"):
        sentence += " Training was stopped there, since the judge's score fell beyond chance while the reward rose."
    return sentence


def _best_of(figures: dict[str, float], algorithm: str) -> list[Table]:
    """Return the scores of choosing among several answers of the model before, above those of the trained model."""
    counts = sorted(int(name.split("_")[2]) for name in figures if re.fullmatch(r"best_of_\d+_kl", name))
    kinds = {"reward": "reward", "judge": "judge's score", "verified": "verified right"}
    kinds = {kind: label for kind, label in kinds.items() if f"best_of_1_{kind}" in figures}
    if not counts or not kinds:
        return []

    def row(label: str, kl: float, names: list[str]) -> list[str]:
        intervals = [interval_of(figures, name) for name in names]
        return [
            label,
            fixed(kl),
            *(f"{fixed(interval.value)} {between(interval)}" if interval else "–" for interval in intervals),
        ]

    rows = [row(f"best of {n}", figures[f"best_of_{n}_kl"], [f"best_of_{n}_{kind}" for kind in kinds]) for n in counts]
    metric_names = {"reward": "heldout_reward_rlhf", "judge": "heldout_judge_rlhf", "verified": "verified_rlhf"}
    rows.append(row(algorithm, figures.get("kl_to_sft", math.nan), [metric_names[kind] for kind in kinds]))
    note = "Chosen by the reward model among answers of the model before, without training; KL = log n − (n − 1)/n."
    columns = ["", "KL, nats per answer", *kinds.values()]
    return [Table("Against the best of n", columns, rows, note, numeric=tuple(range(1, len(columns))))]


def _standardised(
    pipeline: PipelineResults, id: str, key: str, points: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return points in standard deviations above the mean score of the answers of the model before on held-out prompts;
    those of a training that is not measured yet start at zero and keep their unit."""
    scores = pipeline.scores(id, key, "sft")
    mean, spread = (fmean(scores), pstdev(scores) or 1.0) if scores else (points[0][1], 1.0)
    return [(step, (value - mean) / spread) for step, value in points]
