"""Rehearsal of a layout of ranks without its devices: one step on tensors without memory, by the set-up of a training.

Public: `__main__.rehearsed` of a `job.Rehearsal`, and `compare.comparison` with the plan.
"""
