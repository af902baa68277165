"""Answers of the models: side by side, and to the same prompts at points of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evaluation.pages.charts import Line, line_chart
from evaluation.pages.parts import Figure, Section
from evaluation.pages.words import fixed
from evaluation.results.pipeline import PipelineResults, asked_in

_STYLES = ("train", "validation", "base", "sft", "rlhf")
_LABEL = 60
"""Maximum length of a prompt in a legend, in characters."""


def answers(pipeline: PipelineResults, count: int) -> Section:
    rows = []
    for row in pipeline.samples(count):
        answers = [
            {
                "model": pipeline.style(model),
                "label": pipeline.long_name(model),
                "text": row["answers"][model],
                "score": f"reward {fixed(float(row['rewards'][model]))}" if model in row["rewards"] else "",
                "mark": _mark(row["verified"], model),
            }
            for model in pipeline.models
            if model in row["answers"]
        ]
        rows.append({"prompt": row["prompt"], "reference": row["reference"], "answers": answers})
    lead = (
        f"The first {len(rows)} held-out prompts, not selected. Models answer greedily; after an "
        "alignment, its model and the one that it began with are as sampled for its measurement, with the reward "
        "model's score. "
        "✓ and ✗ appear where a rule can check the answer."
        if rows
        else ""
    )
    return Section("samples", "Answers side by side", lead, samples=rows)


def _mark(verified: Mapping[str, bool], name: str) -> str:
    """Return a mark for a right or wrong answer under this name; empty if no rule could check it."""
    return ("✓ right" if verified[name] else "✗ wrong") if name in verified else ""


def answers_over_training(pipeline: PipelineResults) -> Section:
    """Return the section with the answers to the same held-out prompts during each instruction tuning, and after the
    alignment that follows it."""
    rows = [row for id in pipeline.steps("sft") for row in _over_training(pipeline, id)]
    lead = (
        "The first held-out prompts, not selected, as the model answered them at several points of its "
        "training. The loss is that of the reference answer, in nats per token. Answers are greedy, except those after "
        "alignment, which are sampled as in its measurement. ✓ and ✗ appear where a rule can check the answer."
        if rows
        else ""
    )
    drawn = [figure for id in pipeline.steps("sft") for figure in _drawn_over_training(pipeline, id)]
    return Section("over-training", "The same prompt over training", lead, drawn, samples=rows)


def _drawn_over_training(pipeline: PipelineResults, id: str) -> list[Figure]:
    """Draw the loss of the reference answer to each of these prompts at these points."""
    losses: dict[str, list[tuple[float, float]]] = {}
    for line in _training_samples(pipeline, id):
        losses.setdefault(asked_in(line), []).append((line["batch"], line["loss"]))
    lines = [Line(prompt, points, style) for (prompt, points), style in zip(losses.items(), _STYLES, strict=False)]
    chart = line_chart(
        "loss of the reference answers",
        lines,
        x_label="batch",
        y_label="loss (nats per token)",
    )
    if not chart:
        return []
    before, after = (fmean(line.points[index][1] for line in lines) for index in (0, -1))
    return [
        Figure(
            "Reference answers to these prompts",
            chart,
            f"The mean loss of their reference answers went from {fixed(before)} to {fixed(after)} nats per token.",
            "Few prompts; the held-out loss of the instruction tuning is of all.",
            [(_shortened(line.label), line.style) for line in lines],
        )
    ]


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= _LABEL else f"{prompt[: _LABEL - 1].rstrip()}…"


def _training_samples(pipeline: PipelineResults, id: str) -> Sequence[dict[str, Any]]:
    artifact = pipeline.get(id)
    return artifact.read_lines("aux/training_samples.jsonl") if artifact else ()


def _over_training(pipeline: PipelineResults, id: str) -> list[dict[str, Any]]:
    artifact, lines = pipeline.get(id), _training_samples(pipeline, id)
    if not lines:
        return []
    roles = pipeline.roles(id)
    references = (
        {asked_in(row): row["reference"] for row in artifact.read_lines("aux/samples.jsonl")} if artifact else {}
    )
    rows = []
    for prompt in dict.fromkeys(map(asked_in, lines)):
        points = [
            {
                "model": pipeline.style(roles["sft" if line["batch"] else "base"]),
                "label": pipeline.long_name(roles["sft" if line["batch"] else "base"]) + _batch(line["batch"]),
                "text": line["text"],
                "score": f"loss {fixed(line['loss'])}",
                "mark": _mark(line, "verified"),
            }
            for line in lines
            if asked_in(line) == prompt
        ]
        points += _after_ppo(pipeline, roles["sft"], prompt)
        rows.append({"prompt": prompt, "reference": references.get(prompt, ""), "answers": points})
    return rows


def _batch(number: float) -> str:
    return f", batch {number:,.0f}" if number else ""


def _after_ppo(pipeline: PipelineResults, tuned: str, prompt: str) -> list[dict[str, Any]]:
    points = []
    for id in pipeline.steps("rlhf"):
        artifact, roles = pipeline.get(id), pipeline.roles(id) if pipeline.get(id) else {}
        if artifact is None or roles["sft"] != tuned:
            continue
        line = next((line for line in artifact.read_lines("aux/samples.jsonl") if asked_in(line) == prompt), None)
        if line is not None:
            rewards = line.get("rewards") or {}
            points.append(
                {
                    "model": pipeline.style(roles["rlhf"]),
                    "label": pipeline.long_name(roles["rlhf"]) + _batch(artifact.figures.get("batches", 0)),
                    "text": line["answers"]["rlhf"],
                    "score": f"reward {fixed(float(rewards['rlhf']))}" if "rlhf" in rewards else "",
                    "mark": _mark(line.get("verified") or {}, "rlhf"),
                }
            )
    return points
