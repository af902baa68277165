"""Run a training from its first batch to its last: optimizers, learning rates, microbatches, compilation, metrics.

Public: `fit.fit`. The loops themselves are in `training.backends`.
"""
