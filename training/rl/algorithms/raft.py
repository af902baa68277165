"""RAFT, rejection sampling: of each prompt's answers the best one is kept, and learnt as an answer in SFT is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from training.rl.algorithms.base import Algorithm, Sampled
from training.train_modules.policy_losses import masked_mean


class Raft(Algorithm):
    """Dong et al. 2023, algorithm 1, the KL penalty within the reward; Llama 2 (Touvron et al. 2023, section 3.2.3)
    calls it rejection sampling fine-tuning, and has no penalty.

    Of answers that are equally good the first is kept: a draw from the policy, which in the mean teaches nothing.
    """

    def kept(self, sampled: Sampled) -> Tensor:
        penalty = sampled.kl_coef * ((sampled.logprobs - sampled.reference) * sampled.mask).sum(1)
        best = (sampled.scores - penalty).view(-1, self.config.answers_per_prompt).argmax(1)
        return torch.arange(len(best)) * self.config.answers_per_prompt + best

    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        return {}

    def loss(self, logprobs: Tensor, values: Tensor | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cross entropy, the mean over the tokens of the answers."""
        cross_entropy = -masked_mean(logprobs, batch["mask"])
        return {"policy": cross_entropy, "total": cross_entropy}
