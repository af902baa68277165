"""Rewards of sampled answers: a reward model's score, a rule's verdict, and functions that the config names.

Shapes: B answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.chat.base import Chat
from training.config import RlhfConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.generation.completions import Completions, Episode, scores_of
from training.rl.ensemble import Ensemble
from training.rl.grading import Graders
from training.rl.prompts import Prompt
from training.rl.reward_functions import Answered, reward_function
from training.rl.rubrics import Rubric
from training.rl.verify import right_answers
from training.train_modules.scorer import Scorer


class RewardScale(nn.Module):
    """Mean and spread of the scores that each reward model gives the SFT model on training prompts, and the KL
    coefficient; saved in checkpoints."""

    mean: Tensor
    spread: Tensor
    known: Tensor
    kl_coef: Tensor

    def __init__(self, kl_coef: float, members: int = 1) -> None:
        super().__init__()
        shape = (members,) if members > 1 else ()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("spread", torch.ones(shape))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.register_buffer("kl_coef", torch.tensor(kl_coef, dtype=torch.float64))

    def learn(self, scores: Tensor) -> None:
        """Set mean and spread.

        Args:
            scores: (B,) of one model, (B, M) of several.
        """
        self.mean.copy_(scores.mean(0))
        self.spread.copy_(scores.std(0).clamp(min=1e-6))
        self.known.fill_(True)

    def forward(self, scores: Tensor) -> Tensor:
        """Normalise scores (B,) or (B, M)."""
        return (scores - self.mean) / self.spread

    def of_first(self, scores: Tensor) -> Tensor:
        """Normalise scores of any shape of the first model."""
        return (scores - self.mean.flatten()[0]) / self.spread.flatten()[0]


@dataclass(frozen=True)
class Rewarded:
    """scores (B,): rewards that the algorithm learns from. metrics: mean rewards, for the curves. judge_error: the
    standard error of the judge's mean; 0 without one."""

    scores: Tensor
    metrics: Mapping[str, float]
    judge_error: float = 0.0


class Rewards:
    """The reward of answers: a rule's verdict where there is a rule, else the reward model's score; to both the
    config's functions are added. An answer without an end gets a penalty, or a fixed reward instead.

    ensemble: the reward models; empty where there are only rules and functions. judge: also scores the answers, and
    nothing is learnt from its scores. graders: call the functions and run unit tests. rubric: its score is added like a
    function's.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        scale: RewardScale,
        chat: Chat,
        config: RlhfConfig,
        hardware: Hardware,
        judge: Scorer | None = None,
        graders: Graders | None = None,
        rubric: Rubric | None = None,
    ) -> None:
        self.ensemble = ensemble
        self.judge = judge
        self.rubric = rubric
        self.scale = scale
        self._chat = chat
        self._config = config
        self._hardware = hardware
        self._graders = graders or Graders()
        for path in () if config.reward_processes else config.reward_functions:
            reward_function(path)  # raises for a missing function before anything is sampled

    def of(self, answers: Completions, prompts: Sequence[Prompt]) -> Rewarded:
        """Return the rewards of answers.

        Every rank must call, with all answers.

        Args:
            prompts: the prompt of each answer.

        Raises StageError as `training.rl.grading.Graders.functions` does.
        """
        config, scale = self._config, self.scale
        texts = [self._chat.decode(ids) for ids in answers.last_answers()]
        # An environment rewards in place of a rule.
        right = self.right(texts, prompts).float() if answers.episodes is None else torch.full((len(texts),), math.nan)
        ruled = ~right.isnan()
        metrics = {"rlhf/verified": float(right[ruled].mean())} if ruled.any() else {}
        scores, error = torch.zeros(len(texts)), 0.0
        if self.ensemble:
            raw = self.ensemble.raw(answers, self._chat, self._hardware)
            learnt = raw[~ruled]
            if config.normalise_reward and not scale.known and len(learnt) > 1:
                scale.learn(learnt.to(scale.mean.device))
            each = scale(raw.to(scale.mean.device)).cpu()
            scores = self.ensemble.combined(each)
            if len(learnt):
                # Raw scores of several models have no common scale.
                shown = learnt if len(self.ensemble) == 1 else scores[~ruled]
                metrics |= {"rlhf/reward": float(shown.mean()), "rlhf/reward_normalised": float(scores[~ruled].mean())}
                if len(self.ensemble) > 1:
                    metrics["rlhf/reward_models_apart"] = self.ensemble.apart(each[~ruled])
        if self.judge is not None and not ruled.all():
            judged = scores_of(self.judge, answers, self._chat, self._hardware)
            metrics["rlhf/judge"] = float(judged[~ruled].mean())
            error = float(judged[~ruled].std(correction=0)) / math.sqrt(int((~ruled).sum()))
        scores = torch.where(ruled, config.verified_reward * (2 * right - 1), scores)
        if answers.episodes is not None and config.environment is not None:
            scores = scores + config.environment.weight * torch.tensor([episode.reward for episode in answers.episodes])
            metrics |= episode_metrics(answers.episodes)
        for path, values in self.by_functions(texts, prompts).items():
            abstained = values.isnan()
            if not abstained.all():
                metrics[f"rlhf/function/{path}"] = float(values.nanmean())
            if abstained.any():
                metrics[f"rlhf/abstained/{path}"] = float(abstained.float().mean())
            scores = scores + config.reward_functions[path] * values.nan_to_num(0.0)
        if self.rubric is not None:
            rated = self.rubric.of(texts, prompts)
            metrics |= self.rubric.metrics(rated)
            scores = scores + self.rubric.config.weight * self.rubric.means(rated).float()
        if config.overlong_tokens:
            scores = scores - config.overlong_penalty * overlong(answers, config)
        if config.unfinished_reward is not None:
            scores = torch.where(answers.finished, scores, config.unfinished_reward)
        else:
            scores = scores - config.unfinished_penalty * (~answers.finished).float()
        return Rewarded(scores, metrics, error)

    def by_functions(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Return each function's rewards of the answers (B,), before its weight, nan where it abstains. Each rank asks
        for its part, and every rank must call."""
        own_rows = ranks.own_part(len(texts))
        answered = [
            Answered(prompt.text, text, prompt.response)
            for prompt, text in zip(prompts[own_rows], texts[own_rows], strict=True)
        ]
        return {
            path: ranks.join_parts(torch.tensor(self._graders.functions(path, answered)))
            for path in self._config.reward_functions
        }

    def right(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Tensor:
        """Return 1 for each answer (B,) that is right by its prompt's rule, 0 for a wrong one, nan where no rule
        judges. In double precision; each rank checks its part, and every rank must call."""
        own_rows = ranks.own_part(len(texts))
        rules = [prompt.rule for prompt in prompts[own_rows]]
        return ranks.join_parts(torch.from_numpy(right_answers(texts[own_rows], rules, self._graders)))


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return curves of a round's episodes."""
    count = len(episodes)
    rejected = [episode.reward > 0 and episode.accepted is False for episode in episodes]
    return {
        "rlhf/environment_reward": sum(episode.reward for episode in episodes) / count,
        "rlhf/turns": sum(episode.turns for episode in episodes) / count,
        "rlhf/tool_calls": sum(episode.tool_calls for episode in episodes) / count,
        "rlhf/episodes_dropped": float(sum(len(episode.failures) for episode in episodes)),
        "rlhf/episodes_copied": float(sum(episode.is_copy for episode in episodes)),
        "rlhf/truncated_share": sum(episode.ended != "done" for episode in episodes) / count,
        "rlhf/rewarded_but_rejected": sum(rejected) / count,
    }


def overlong(answers: Completions, config: RlhfConfig) -> Tensor:
    """Return the share (B,) of `overlong_penalty` that each answer loses for its length: 0 up to `overlong_tokens`
    before `answer_max_tokens`, then rising to 1 there (DAPO, equation 13)."""
    lengths = torch.tensor([len(ids) for ids in answers.ids])
    over = lengths - (config.answer_max_tokens - config.overlong_tokens)
    return (over / config.overlong_tokens).clamp(0, 1)
