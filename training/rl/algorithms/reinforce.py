"""REINFORCE++: the reward that follows each token, the KL penalty included, normalised over the whole round."""

from __future__ import annotations

from torch import Tensor

from training.rl.algorithms.base import Algorithm, Sampled
from training.train_modules.policy_losses import token_rewards, whiten


class Reinforce(Algorithm):
    """Hu et al. 2025, "REINFORCE++", equations 5 to 7, with PPO's clip and without a value function. With several
    answers to a prompt the mean reward of these answers is subtracted before ("REINFORCE++-Baseline"); the KL penalty
    remains in the reward there too, where the paper puts it in the loss."""

    def learn(self, sampled: Sampled) -> dict[str, Tensor]:
        mask = sampled.mask
        rewards = token_rewards(sampled.scores, sampled.logprobs, sampled.reference, mask, sampled.kl_coef)
        returns = discounted(rewards, self.config.gamma)
        if (group := self.config.answers_per_prompt) > 1:
            returns = returns - returns[:, 0].view(-1, group).mean(1).repeat_interleave(group)[:, None]
        return {"advantages": whiten(returns * mask, mask)}


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum (B, T) of each token's reward and those after it, from rewards (B, T)."""
    returns = rewards.clone()
    for step in reversed(range(rewards.shape[1] - 1)):
        returns[:, step] += gamma * returns[:, step + 1]
    return returns
