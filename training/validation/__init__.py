"""Held-out figures: losses and baselines, answers of two models, quality of a reward model.

Public: `evaluate`, `heldout`, `in_loop` (measurements during a training).
"""
