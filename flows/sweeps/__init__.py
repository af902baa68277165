"""Sweeps: one pipeline run per choice of settings and seed, and what the best of them is.

Public: `definition.define` checks a sweep, `whole.whole_sweep` runs it; `from_page` is the flow in the Prefect page.
"""
