"""Reinforcement learning: a round of sampled answers, their rewards, advantages, and the update.

Public: `rollouts`, `rewards`, `policy_and_value`, `algorithms` (one file per algorithm). The stage is `training.rlhf`.
"""
