"""Interface of every algorithm: inputs and outputs.

Shapes: B answers, T answer tokens (padded on the right).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.config import RlhfConfig
from training.train_modules.policy_losses import policy_loss

CLIPPED = "clip_share"


@dataclass(frozen=True)
class Sampled:
    """A round's answers, those to one prompt side by side.

    scores (B,): what each is worth, without the KL penalty. logprobs, reference, mask (B, T): of the policy that
    sampled them, of the reference model, and 1 on an answer's tokens. values (B, T): of the value function; None
    without one. kl_coef: the weight of the KL penalty at this round.
    """

    scores: Tensor
    logprobs: Tensor
    reference: Tensor
    mask: Tensor
    values: Tensor | None
    kl_coef: float


class Algorithm(ABC):
    """Interface of an algorithm that updates a policy from a round of sampled answers."""

    has_values = False
    """True if a value function is trained next to the policy."""

    def __init__(self, config: RlhfConfig) -> None:
        self.config = config

    def kept(self, sampled: Sampled) -> Tensor:
        """Return the indices of the answers that are learnt from, `RlhfConfig.learnt_answers` of them. Here all."""
        return torch.arange(len(sampled.scores))

    @abstractmethod
    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        """Return the values that `loss` needs of a round besides ids, tokens, mask and `logprobs`, by name, each (B,
        …): `advantages` (B, T) and more."""

    def loss(self, logprobs: Tensor, values: Tensor | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of a minibatch, of which `total` is minimised: PPO's clipped surrogate, a mean over tokens.

        If anything is clipped, CLIPPED is the share of tokens whose ratio was outside the clip.

        Args:
            logprobs: of the current policy (B, T), in nats.
            values: of the current value function (B, T); None without one.
            batch: the minibatch: `logprobs`, `advantages` and `mask` (B, T), and what the algorithm adds.
        """
        bounds = self.config.ratio_bounds
        result = policy_loss(logprobs, batch["logprobs"], batch["advantages"], batch["mask"], *bounds)
        return {"policy": result.loss, CLIPPED: result.clip_share, "total": result.loss}

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of tokens that the loss is the mean over, by which parts of a minibatch are weighted."""
        return int(batch["mask"].sum())
