"""Several reward models as one reward: their mean, or less where they disagree.

A policy trained against one reward model finds that model's errors. Models trained with other seeds make other errors,
so that an answer which all of them score high is more likely to be good (Coste et al. 2023, "Reward Model Ensembles
Help Mitigate Overoptimization").
Shapes: B answers, M reward models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from infra.errors import stage_error
from training.chat.base import Chat
from training.config import RlhfConfig
from training.config.alignment import NO_REWARD_MODELS
from training.core.hardware import Hardware
from training.generation.completions import Completions, scores_of
from training.train_modules.scorer import Scorer


def member_names(inputs: Mapping[str, Path]) -> list[str]:
    """Return the inputs that are reward models of the policy, `reward_model` first.

    Raises StageError where there are others without it.
    """
    others = sorted(name for name in inputs if name not in (*NO_REWARD_MODELS, "reward_model"))
    if "reward_model" in inputs:
        return ["reward_model", *others]
    if others:
        raise stage_error(
            "no_reward_model",
            f"rlhf.inputs.{others[0]}",
            "expected the first reward model as the input reward_model, and others in addition to it",
            f"call {others[0]} reward_model",
        )
    return []


class Ensemble:
    """One or several reward models, and the rule that combines their scores."""

    def __init__(self, members: Mapping[str, Scorer], config: RlhfConfig) -> None:
        """Raise StageError where `reward_weights` names a missing model, or two models are the same."""
        self.members = dict(members)
        self._config = config
        for name in config.reward_weights:
            if name not in members:
                raise stage_error(
                    "unknown_reward_model",
                    f"rlhf.reward_weights.{name}",
                    f"expected one of the inputs {', '.join(members) or '(there is no reward model)'}",
                    "give it as an input, or leave it out",
                )
        names = list(members)
        for number, name in enumerate(names):
            for before in names[:number]:
                if same_weights(members[before], members[name]):
                    raise stage_error(
                        "same_reward_model",
                        f"rlhf.inputs.{name}",
                        f"expected another model than {before}, but its weights are the same",
                        "train it with another seed or on other pairs",
                    )
        weights = torch.tensor([config.reward_weights.get(name, 1.0) for name in members], dtype=torch.float32)
        self._weights = weights / weights.sum() if len(weights) else weights

    def __len__(self) -> int:
        return len(self.members)

    @property
    def first(self) -> Scorer:
        """The model that a value function is initialised from."""
        return next(iter(self.members.values()))

    def raw(self, answers: Completions, chat: Chat, hardware: Hardware) -> Tensor:
        """Raw scores (B,) of one model, (B, M) of several. Every rank must call."""
        scores = [scores_of(scorer, answers, chat, hardware) for scorer in self.members.values()]
        return scores[0] if len(scores) == 1 else torch.stack(scores, 1)

    def combined(self, scores: Tensor) -> Tensor:
        """Combine scores (B, M), brought to one scale, into one reward (B,); return those of one model (B,)
        unchanged."""
        if scores.dim() == 1:
            return scores
        mean = scores @ self._weights.to(scores)
        variance = ((scores - mean[:, None]) ** 2) @ self._weights.to(scores)
        rule, coefficient = self._config.ensemble, self._config.ensemble_coef
        if rule == "worst":
            return scores.min(1).values
        if rule == "variance":
            return mean - coefficient * variance
        if rule == "lower_bound":
            return mean - coefficient * variance.sqrt()
        return mean

    def apart(self, scores: Tensor) -> float:
        """Return the disagreement of the models: the mean standard deviation of an answer's scores (B, M)."""
        return float(scores.std(1, correction=0).mean())


def same_weights(scorer: Scorer, other: Scorer) -> bool:
    """Return True if two reward models have the same weights."""
    weights, other_weights = scorer.state_dict(), other.state_dict()
    return weights.keys() == other_weights.keys() and all(
        torch.equal(weights[name], other_weights[name]) for name in weights
    )
