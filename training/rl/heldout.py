"""Evaluation of RLHF on held-out prompts: answers of the SFT model and of the policy trained from it, and their scores.

Shapes: P prompts, A answers; the `rlhf.heldout_answers` answers to each prompt are consecutive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from corpus.pairs.dialogues import opening_of
from evaluation.statistics.clustered import clustered_mean, clustered_ratio, number_clusters
from training.chat.base import Chat
from training.config import RlhfConfig
from training.core.hardware import Hardware
from training.generation.completions import Completions, generate, kl_of, scores_of
from training.rl.best_of import best_of_figures
from training.rl.prompts import Prompt
from training.rl.rewards import Rewards
from training.validation.answer_figures import answer_figures, lengthening, means, raw_scores, score_figures, share

_Scores = dict[str, NDArray[np.float64]]
"""Scores (A,) of each side, `sft` and `rlhf`."""


class Heldout:
    """Held-out prompts and everything that judges answers to them. Every rank must call the methods, and gets the same
    result."""

    def __init__(
        self, prompts: Sequence[Prompt], rewards: Rewards, chat: Chat, config: RlhfConfig, hardware: Hardware
    ) -> None:
        self._prompts = prompts
        self._each = [prompt for prompt in prompts for _ in range(config.heldout_answers)]
        self._rewards = rewards
        self._chat = chat
        self._config = config
        self._hardware = hardware
        self._ruled = np.array([prompt.rule is not None for prompt in prompts])
        self._conversations = number_clusters(opening_of(prompt.text, prompt.history) for prompt in prompts)

    def figures(
        self, sft: PreTrainedModel, policy: PreTrainedModel, samples: Path
    ) -> tuple[dict[str, float], list[str]]:
        """Return the figures that `training.rlhf.rlhf` names, and log lines about them. Answers are written to
        `samples`."""
        config, chat, hardware = self._config, self._chat, self._hardware
        answers = {
            name: self._sampled(model, self._each, config.seed) for name, model in (("sft", sft), ("rlhf", policy))
        }
        scores, apart = self._scores(answers) if self._rewards.ensemble else ({}, {})
        judge = self._rewards.judge
        judged = raw_scores(judge, answers, chat, hardware) if judge else {}
        best = self._best_of(sft) if config.best_of > 1 else {}
        apart_by = kl_of(policy, sft, answers["rlhf"], chat, hardware, config.temperature)
        kl, lengths = (column.double().numpy() for column in apart_by)
        right = {name: self._right(side, self._each).numpy() for name, side in answers.items()}
        self._write(samples, answers, scores, judged, right)

        kl, lengths, longer = map(self._means, (kl, lengths, lengthening(answers["sft"], answers["rlhf"])))
        divergence = clustered_mean(kl, self._conversations)
        figures = {
            **self._gains("reward", scores, longer, ~self._ruled),
            **self._gains("judge", judged, longer, ~self._ruled),
            **self._verified(right),
            **self._gains("functions", self._by_functions(answers), longer, np.ones(len(self._prompts), bool)),
            **self._by_rubric(answers),
            **best,
            **{f"reward_models_apart_{name}": value for name, value in apart.items()},
            **divergence.as_figures("kl_to_sft"),
            "kl_per_token": clustered_ratio(kl, lengths, self._conversations).value,
            "heldout_prompts": float(len(self._prompts)),
            **answer_figures(answers, config.heldout_answers, self._conversations),
        }
        return figures, _sentences(figures)

    def _sampled(self, model: PreTrainedModel, prompts: Sequence[Prompt], seed: int) -> Completions:
        ids = [prompt.ids for prompt in prompts]
        return generate(model, ids, self._chat, self._config, self._hardware, seed=seed, in_ranks=True)

    def _right(self, answers: Completions, prompts: Sequence[Prompt]) -> Tensor:
        return self._rewards.right([self._chat.decode(ids) for ids in answers.ids], prompts)

    def _means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean (P,) over the answers to each prompt."""
        return means(values, self._config.heldout_answers)

    def _gains(self, by: str, scores: _Scores, longer: NDArray[np.float64], of: NDArray[np.bool_]) -> dict[str, float]:
        if not scores:
            return {}
        return score_figures(
            by, {name: self._means(values) for name, values in scores.items()}, longer, of, self._conversations
        )

    def _scores(self, answers: Mapping[str, Completions]) -> tuple[_Scores, dict[str, float]]:
        """Return the reward of each side's answers, the raw score of one model or the combined score of several; and,
        of several models, their disagreement."""
        ensemble, scale = self._rewards.ensemble, self._rewards.scale
        raw = {name: ensemble.raw(side, self._chat, self._hardware) for name, side in answers.items()}
        if len(ensemble) == 1:
            return {name: values.double().numpy() for name, values in raw.items()}, {}
        unruled = torch.from_numpy(np.repeat(~self._ruled, self._config.heldout_answers))
        if self._config.normalise_reward and not scale.known and int(unruled.sum()) > 1:
            scale.learn(raw["sft"][unruled])  # of the answers of `figures`, which come first
        each = {name: scale(values) for name, values in raw.items()}
        combined = {name: ensemble.combined(values).double().numpy() for name, values in each.items()}
        return combined, {name: ensemble.apart(values) for name, values in each.items()}

    def _by_functions(self, answers: Mapping[str, Completions]) -> _Scores:
        """Return the weighted sum of the rewards of the config's functions, without those that abstain; empty where it
        names none."""
        weights = self._config.reward_functions
        rewards: _Scores = {}
        for name, side in answers.items() if weights else ():
            given = self._rewards.by_functions([self._chat.decode(ids) for ids in side.ids], self._each)
            rewards[name] = np.asarray(
                sum(weights[path] * values.double().nan_to_num(0.0) for path, values in given.items())
            )
        return rewards

    def _by_rubric(self, answers: Mapping[str, Completions]) -> dict[str, float]:
        """Return the mean score of both sides by each criterion of the rubric and by all of it, and the gains, with
        intervals over prompts; nothing without a rubric. A judgement without a number counts as 0 here."""
        rubric = self._rewards.rubric
        if rubric is None:
            return {}
        scores = {
            name: rubric.of([self._chat.decode(ids) for ids in side.ids], self._each) for name, side in answers.items()
        }
        columns = {
            "rubric": {name: rubric.means(rated).numpy() for name, rated in scores.items()},
            **{
                f"rubric_{criterion}": {name: rated[:, index].nan_to_num(0.0).numpy() for name, rated in scores.items()}
                for index, criterion in enumerate(rubric.config.criteria)
            },
        }
        figures: dict[str, float] = {}
        for key, sides in columns.items():
            each = {name: self._means(values) for name, values in sides.items()}
            for name, values in each.items():
                figures |= clustered_mean(values, self._conversations).as_figures(f"{key}_{name}")
            figures |= clustered_mean(each["rlhf"] - each["sft"], self._conversations).as_figures(f"{key}_gain")
        return figures

    def _best_of(self, sft: PreTrainedModel) -> dict[str, float]:
        """Return the scores of the best of several answers of the SFT model, chosen by the reward: by the reward itself
        (reward) and by the judge; and where a rule judges, the share of prompts with a right answer among them
        (verified)."""
        many, seed = self._config.best_of, self._config.seed
        prompts = [prompt for prompt in self._prompts for _ in range(many)]
        answers = self._sampled(sft, prompts, seed + 1)
        table, ruled, judge = (len(self._prompts), many), self._ruled, self._rewards.judge
        figures: dict[str, float] = {}
        if self._rewards.ensemble and not ruled.all():
            scored = {"reward": self._scores({"sft": answers})[0]["sft"]}
            if judge is not None:
                scored["judge"] = scores_of(judge, answers, self._chat, self._hardware).double().numpy()
            scored = {name: values.reshape(table)[~ruled] for name, values in scored.items()}
            figures |= best_of_figures(scored["reward"], scored, many, self._conversations[~ruled])
        if ruled.any():
            right = self._right(answers, prompts).numpy().reshape(table)[ruled]
            figures |= best_of_figures(right, {"verified": right}, many, self._conversations[ruled])
        return figures

    def _verified(self, right: _Scores) -> dict[str, float]:
        """Return the share of right answers to the prompts that a rule judges; nothing where there are none.

        Args:
            right: 1 for each right answer (A,).
        """
        of, each = self._ruled, self._config.heldout_answers
        if not of.any():
            return {}
        gain = self._means(right["rlhf"] - right["sft"])[of]
        figures = clustered_mean(gain, self._conversations[of]).as_figures("verified_gain")
        for name, hits in right.items():
            of_ruled = share(hits[np.repeat(of, each)], each, self._conversations[of])
            figures |= of_ruled.as_figures(f"verified_{name}")
        return {**figures, "verified_prompts": float(of.sum())}

    def _write(
        self, path: Path, answers: Mapping[str, Completions], scores: _Scores, judged: _Scores, right: _Scores
    ) -> None:
        """Write one line per prompt, with the first of its answers: answers and rewards by side, and under `judge` the
        judge's scores where there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf8") as file:
            for number, prompt in zip(
                range(0, len(self._each), self._config.heldout_answers), self._prompts, strict=True
            ):
                line: dict[str, Any] = {
                    "prompt": prompt.text,
                    "reference": prompt.response,
                    "answers": {name: self._chat.decode(side.ids[number]) for name, side in answers.items()},
                }
                if prompt.history:
                    line["history"] = prompt.history
                if prompt.rule is None:
                    line["rewards"] = {name: round(float(values[number]), 4) for name, values in scores.items()}
                    if judged:
                        line["judge"] = {name: round(float(values[number]), 4) for name, values in judged.items()}
                else:
                    line["verified"] = {name: bool(values[number]) for name, values in right.items()}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _sentences(figures: Mapping[str, float]) -> list[str]:
    """Summarise the figures in a few words each."""

    def bounds(name: str) -> str:
        if f"{name}_low" not in figures:
            return "(of prompts of one conversation, without an interval)"
        return f"({figures[f'{name}_low']:+.2f} to {figures[f'{name}_high']:+.2f})"

    sentences = []
    if "reward_gain" in figures:
        level = figures["reward_gain_equal_length"]
        sentences.append(
            f"held-out reward {figures['reward_gain']:+.2f} {bounds('reward_gain')}, at equal length {level:+.2f}"
        )
    if "judge_gain" in figures:
        sentences.append(f"by the judge {figures['judge_gain']:+.2f} {bounds('judge_gain')}")
    if "functions_gain" in figures:
        sentences.append(f"by the functions {figures['functions_gain']:+.2f}")
    if "rubric_gain" in figures:
        sentences.append(f"by the rubric {figures['rubric_gain']:+.2f} {bounds('rubric_gain')}")
    if "verified_gain" in figures:
        sentences.append(f"right answers {figures['verified_sft']:.0%} → {figures['verified_rlhf']:.0%}")
    return [*sentences, f"KL {figures['kl_to_sft']:.1f}"]
