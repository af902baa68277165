"""Prefect's page of a stage: progress, events, its sheet."""
