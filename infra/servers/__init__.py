"""Servers beside a store: Prefect, MLflow, a worker, the lineage relay and metrics; each started, guarded, stopped.

Public: `services` (start and stop in the background), `foreground` (one in a container), `settings`.
"""
