"""Episodes of a policy in an environment: figures of both models, the reward over rounds, and transcripts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evaluation.pages.charts import Line, line_chart
from evaluation.pages.episodes import as_sample
from evaluation.pages.parts import Figure, Table
from evaluation.pages.words import between, fixed, interval_of, percent, signed
from evaluation.results.pipeline import PipelineResults

_SHOWN = 5
"""Transcripts in the report; aux/episodes.html of the step has all."""


def episode_tables(pipeline: PipelineResults, figures: dict[str, float], roles: Mapping[str, str]) -> list[Table]:
    """Return rewards, turns, calls, lengths and failures of both models; nothing without an environment."""
    rows = []
    for name, model in roles.items():
        reward = interval_of(figures, f"heldout_environment_{name}")
        if reward is not None:
            numbers = [figures.get(f"{key}_{name}", math.nan) for key in ("turns", "tool_calls", "answer_tokens")]
            rows.append(
                [
                    pipeline.long_name(model),
                    f"{fixed(reward.value)} {between(reward)}",
                    *(fixed(number, 1) for number in numbers),
                    percent(figures.get(f"truncated_{name}", math.nan)),
                    f"{figures.get(f'dropped_{name}', 0):,.0f}",
                    percent(figures.get(f"rejected_{name}", math.nan)),
                ]
            )
    if not rows:
        return []
    note = "Cut: ended by turns, tokens or an answer without an end. Rejected: of the rewarded episodes those that a "
    note += "second rule or the judge finds wrong. All episodes of both models are in aux/episodes.html of the step."
    if gain := interval_of(figures, "environment_gain"):
        note = f"The reward gained {signed(gain.value)} {between(gain)}. {note}"
    columns = ["model", "reward", "turns", "tool calls", "tokens sampled", "cut", "dropped", "rejected"]
    return [Table("Held-out tasks", columns, rows, note, numeric=tuple(range(1, len(columns))))]


def episode_reward(pipeline: PipelineResults, id: str) -> list[Figure]:
    """Draw the environment's mean reward over rounds."""
    reward = pipeline.curve(id, "rlhf/environment_reward")
    chart = line_chart(
        "reward of the environment",
        [Line("reward of the episodes", reward, "rlhf")],
        x_label="batch",
        y_label="mean reward of a round",
        y_format=lambda value: fixed(value, 2),
    )
    if not chart:
        return []
    dropped = sum(value for _, value in pipeline.curve(id, "rlhf/episodes_dropped"))
    caption = f"Mean reward of the rounds' episodes, from {fixed(reward[0][1])} to {fixed(reward[-1][1])}. "
    caption += f"{dropped:,.0f} episodes were dropped, as the environment failed or was slow, and played again."
    weak = "A rising reward can mean that gaps of the environment are found: read the transcripts."
    return [Figure("Reward of the environment", chart, caption, weak)]


def transcripts(pipeline: PipelineResults, id: str, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the first held-out tasks with both models' episodes."""
    artifact = pipeline.get(id)
    lines = artifact.read_lines("aux/episodes.jsonl") if artifact else []
    labels = {name: pipeline.long_name(model) for name, model in roles.items()}
    return [as_sample(line, labels) for line in lines[:_SHOWN] if line["episodes"].keys() >= labels.keys()]
