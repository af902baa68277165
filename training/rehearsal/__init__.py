"""Rehearsal of a layout of ranks without its devices: one step on tensors without memory, by the set-up of a training.

Public: `rehearse` (in a process of its own), `compare` with the plan, and `Rehearsal`, what is rehearsed.
"""
