"""PPO: advantages from a value function by generalised advantage estimation, the KL penalty at each token."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from training.rl.algorithms.base import Algorithm, Sampled
from training.train_modules.policy_losses import advantages_and_returns, token_rewards, value_loss, whiten


class Ppo(Algorithm):
    """Schulman et al. 2017, as in Ziegler et al. 2019 and InstructGPT."""

    has_values = True

    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        assert sampled.values is not None
        rewards = token_rewards(sampled.scores, sampled.logprobs, sampled.reference, sampled.mask, sampled.kl_coef)
        advantages, returns = advantages_and_returns(
            rewards, sampled.values, sampled.mask, self.config.gamma, self.config.gae_lambda
        )
        return {"values": sampled.values, "returns": returns, "advantages": whiten(advantages, sampled.mask)}

    def loss(self, logprobs: Tensor, values: Tensor | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert values is not None
        losses = super().loss(logprobs, values, batch)
        value = value_loss(values, batch["values"], batch["returns"], batch["mask"], self.config.clip_value)
        return {**losses, "value": value, "total": losses["policy"] + self.config.value_coef * value}
