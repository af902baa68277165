"""Benchmark data on the local disk in the hub's layout, so that lm-eval's tasks run offline.

Public: `local` reads a mirror; `evaluation.mirror_writer` fills one.
"""
