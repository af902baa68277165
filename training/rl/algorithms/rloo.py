"""RLOO: an answer is held against the mean reward of the others to its prompt, the KL penalty within the reward."""

from __future__ import annotations

from torch import Tensor

from training.rl.algorithms.base import Algorithm, Sampled
from training.train_modules.policy_losses import leave_one_out, whiten


class Rloo(Algorithm):
    """Ahmadian et al. 2024, section 3.2; the ratio stays clipped, and the advantages are whitened."""

    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        advantages = leave_one_out(
            sampled.scores,
            sampled.logprobs,
            sampled.reference,
            sampled.mask,
            sampled.kl_coef,
            self.config.answers_per_prompt,
        )
        return {"advantages": whiten(advantages, sampled.mask)}
