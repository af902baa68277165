"""Reinforcement learning: a round of sampled answers, their rewards, advantages, and the update.

Public: `round`, which reads from top to bottom, `rewards`, `algorithms` (one file per algorithm) and `acting`. The
stage is `training.rlhf`.
"""
