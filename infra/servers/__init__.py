"""Servers of a store: start, protection and stop of Prefect, MLflow, a worker, the lineage relay and metrics.

Public: `services` (start and stop in the background), `foreground` (one in a container), `settings`.
"""
