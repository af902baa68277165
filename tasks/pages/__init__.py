"""What Prefect's page shows of a stage: progress, events, its sheet."""
