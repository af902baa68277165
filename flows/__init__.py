"""Pipelines: configs, their DAG, plans, and runs of them under Prefect.

`pipeline` and `stage` are the Prefect flows, whose paths deployments keep. Packages: `config` (one YAML file becomes a
graph), `planning` (what would run, and whether it fits), `runs` (what ran, on disk), `compare`, `prefect` (execution
inside a flow), `deployment` (flows on a server), `sweeps` and `feedback` (many runs with one aim).
"""
