"""Stages as tasks: `stages` declares all of them, `stage` defines a stage, `task` wraps a Prefect task around it."""
