"""Stages as tasks: `stages` declares every one, `stage` says what a stage is, `task` puts a Prefect task around it."""
