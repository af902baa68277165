"""Benchmark data kept on the local disk as the hub lays them out, so that lm-eval's tasks run offline.

Public: `local` (reads a mirror), `writer` (fills one).
"""
