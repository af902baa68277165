"""Measurement in an environment: held-out tasks, worked on by the SFT model and by the policy trained from it.

Shapes: P tasks, A episodes; the `rlhf.heldout_answers` episodes of each task are consecutive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from corpus.documents.parts import read_documents
from corpus.pairs.dialogues import opening_of
from evaluation.pages.episodes import episodes_page
from evaluation.statistics.clustered import clustered_mean, clustered_ratio, number_clusters
from infra.run import Run
from training.chat.base import Chat
from training.config import RlhfConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.generation.completions import Completions, Episode, kl_of
from training.rl.environments.episodes import Episodes, Task
from training.rl.environments.pool import EnvironmentPool
from training.rl.prompts import Prompt
from training.rl.rewards import Rewards
from training.validation.answer_figures import means, raw_scores

EPISODES = "episodes.jsonl"
"""In aux/: one line per held-out task, with an episode of each side."""
PAGE = "episodes.html"
"""In aux/: the same as a page."""
_MOST_TEXT = 20_000_000
"""Characters of documents that are searched."""


def searched_documents(config: RlhfConfig, inputs: Mapping[str, Path], run: Run) -> Path | None:
    """Write the text that the config's environment searches, and return its file; None without any."""
    if config.environment is None or "documents" not in inputs:
        return None
    return _as_text(inputs["documents"], run.work_dir / "documents.txt")


def playing(
    config: RlhfConfig, documents: Path | None, chat: Chat, hardware: Hardware, run: Run, ending: ExitStack
) -> Episodes | None:
    """Return the player of the config's environment, whose processes end with `ending`; None without one.

    Args:
        documents: file of the text that it searches.

    Raises StageError `no_sandbox` where this machine has none.
    """
    if config.environment is None:
        return None
    pool = EnvironmentPool(config.environment, run.launch.sandbox, documents)
    ending.callback(pool.close)
    run.event("environment", f"rlhf: {pool.described()}", sandbox=pool.kind)
    return Episodes(config, chat, hardware, pool)


def measure_episodes(
    config: RlhfConfig,
    inputs: Mapping[str, Path],
    tasks: Sequence[Prompt],
    rewards: Rewards,
    chat: Chat,
    hardware: Hardware,
    sft: PreTrainedModel,
    policy: PreTrainedModel,
    out_dir: Path,
    run: Run,
) -> tuple[dict[str, float], list[str]]:
    """Return figures of both models' episodes on held-out tasks, and log lines. Every rank must call.

    Figures: heldout_environment_sft and _rlhf (mean reward of the environment), environment_gain (paired interval over
    tasks), turns_, tool_calls_ and answer_tokens_ (means per episode), truncated_ (share of episodes that the
    environment did not end), dropped_ (number of episodes that it failed in), rejected_ (share of rewarded episodes
    that a second rule or the judge rejects) of each side; kl_to_sft (nats per episode) and kl_per_token. Episodes go to
    aux/episodes.jsonl and aux/episodes.html, their last answers to aux/samples.jsonl.
    """
    each = config.heldout_answers
    played = [task for task in tasks for _ in range(each)]
    documents = searched_documents(config, inputs, run)
    with ExitStack() as ending:
        episodes = playing(config, documents, chat, hardware, run, ending)
        assert episodes is not None
        worked_on = [Task.of(task) for task in played]
        sides = {
            name: episodes.play(model, worked_on, config.seed, each) for name, model in (("sft", sft), ("rlhf", policy))
        }
    conversations = number_clusters(
        number if task.task is not None else opening_of(task.text, task.history) for number, task in enumerate(tasks)
    )
    apart, lengths = kl_of(policy, sft, sides["rlhf"], chat, hardware, config.temperature)
    kl, tokens = (means(column.double().numpy(), each) for column in (apart, lengths))
    rejected = _rejections(sides, played, rewards, chat, hardware)
    got = {name: np.array([episode.reward for episode in _of(side)]) for name, side in sides.items()}
    by_task = {name: means(values, each) for name, values in got.items()}
    figures = clustered_mean(by_task["rlhf"] - by_task["sft"], conversations).as_figures("environment_gain")
    for name, side in sides.items():
        figures |= clustered_mean(by_task[name], conversations).as_figures(f"heldout_environment_{name}")
        figures |= _figures(name, _of(side), rejected[name])
    figures |= clustered_mean(kl, conversations).as_figures("kl_to_sft")
    figures |= {
        "kl_per_token": clustered_ratio(kl, tokens, conversations).value,
        "heldout_prompts": float(len(tasks)),
    }
    _write(out_dir / "aux", tasks, each, sides, rejected, chat)
    before, after = (figures[f"heldout_environment_{name}"] for name in sides)
    return figures, [
        f"reward of {len(tasks):,} held-out tasks {before:.2f} → {after:.2f}",
        f"KL {figures['kl_to_sft']:.1f}",
    ]


def _as_text(documents: Path, path: Path) -> Path:
    """Write documents as text, which a sandbox reads without this project's code."""
    path = path.with_name(f"{ranks.rank()}-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with path.open("w", encoding="utf8") as file:
        for document in read_documents(documents):
            size += file.write(f"{document.text}\n\n")
            if size > _MOST_TEXT:
                break
    return path


def _of(side: Completions) -> list[Episode]:
    assert side.episodes is not None
    return side.episodes


def _figures(name: str, episodes: Sequence[Episode], rejected: Sequence[Sequence[str]]) -> dict[str, float]:
    count = len(episodes)
    rewarded = [reasons for episode, reasons in zip(episodes, rejected, strict=True) if episode.reward > 0]
    return {
        f"turns_{name}": sum(episode.turns for episode in episodes) / count,
        f"tool_calls_{name}": sum(episode.tool_calls for episode in episodes) / count,
        f"answer_tokens_{name}": sum(sum(episode.sampled) for episode in episodes) / count,
        f"truncated_{name}": sum(episode.ended != "done" for episode in episodes) / count,
        f"dropped_{name}": float(sum(len(episode.failures) for episode in episodes)),
        f"rejected_{name}": sum(map(bool, rewarded)) / max(1, len(rewarded)),
    }


def _rejections(
    sides: Mapping[str, Completions], tasks: Sequence[Prompt], rewards: Rewards, chat: Chat, hardware: Hardware
) -> dict[str, list[list[str]]]:
    """Return what rejects each episode: `environment` (its second rule), `rule` (of the prompt), `judge` (its score is
    below the median of those that it gives the SFT model's episodes)."""
    judged = raw_scores(rewards.judge, sides, chat, hardware) if rewards.judge else {}
    middle = float(np.median(judged["sft"])) if judged else 0.0
    rejected: dict[str, list[list[str]]] = {}
    for name, side in sides.items():
        right = rewards.right([chat.decode(ids) for ids in side.last_answers()], tasks).tolist()
        rejected[name] = [
            [
                reason
                for reason, is_so in (
                    ("environment", episode.accepted is False),
                    ("rule", right[number] == 0),
                    ("judge", bool(judged) and float(judged[name][number]) < middle),
                )
                if is_so
            ]
            for number, episode in enumerate(_of(side))
        ]
    return rejected


def _write(
    folder: Path,
    tasks: Sequence[Prompt],
    each: int,
    sides: Mapping[str, Completions],
    rejected: Mapping[str, Sequence[Sequence[str]]],
    chat: Chat,
) -> None:
    """Write the first episode of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    with (
        (folder / EPISODES).open("w", encoding="utf8") as file,
        (folder / "samples.jsonl").open("w", encoding="utf8") as samples,
    ):
        for number, task in enumerate(tasks):
            row = number * each
            episodes = {name: _of(side)[row] for name, side in sides.items()}
            opening = next(
                (message["content"] for message in episodes["sft"].messages if message["role"] == "user"), task.text
            )
            line: dict[str, Any] = {"prompt": opening, "reference": task.response}
            rewards = {name: round(episode.reward, 4) for name, episode in episodes.items()}
            answers = {name: chat.decode(side.last_answers()[row]) for name, side in sides.items()}
            samples.write(json.dumps({**line, "answers": answers, "rewards": rewards}, ensure_ascii=False) + "\n")
            line["episodes"] = {
                name: {
                    "reward": round(episode.reward, 4),
                    "ended": episode.ended,
                    "turns": episode.turns,
                    "tool_calls": episode.tool_calls,
                    "tokens": sum(episode.sampled),
                    "failures": episode.failures,
                    "rejected_by": list(rejected[name][row]),
                    "messages": episode.messages,
                }
                for name, episode in episodes.items()
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            lines.append(line)
    (folder / PAGE).write_text(episodes_page(lines, "Episodes before and after"), encoding="utf8")
