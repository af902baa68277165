"""The guard: detects a failing training from the figures of each batch, and corrects or stops it.

Public: `callback` (watches a loop), `corrections` (what was done, in order), `judge` (the rules).
"""
