"""Reinforcement-learning algorithms: advantages and a loss for sampled and rewarded answers.

Sampling and rewards are the same for all (`training.rl.round`, `training.rl.rewards`). An algorithm is a file here,
a line in ALGORITHMS, and its name in `training.config.alignment.RlhfConfig.algorithm`.
"""

from __future__ import annotations

from training.config import RlhfConfig
from training.rl.algorithms.base import CLIPPED, Algorithm, Sampled
from training.rl.algorithms.grpo import Grpo
from training.rl.algorithms.ppo import Ppo
from training.rl.algorithms.raft import Raft
from training.rl.algorithms.reinforce import Reinforce
from training.rl.algorithms.rloo import Rloo

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": Ppo,
    "rloo": Rloo,
    "grpo": Grpo,
    "reinforce++": Reinforce,
    "raft": Raft,
}

__all__ = ["ALGORITHMS", "CLIPPED", "Algorithm", "Sampled", "algorithm_of"]


def algorithm_of(config: RlhfConfig) -> Algorithm:
    """The algorithm that a config asks for."""
    return ALGORITHMS[config.chosen_algorithm](config)
