"""Prefect deployments of a pipeline: the whole, and each stage by itself with its config as a form."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from prefect.deployments.runner import EntrypointType

from flows.config import PipelineConfig, dump
from flows.pipeline import pipeline as pipeline_flow

WORK_POOL = "stemma"
WHOLE = "pipeline"


def deploy_pipeline(config: PipelineConfig, root: Path, config_path: str) -> UUID:
    """Makes or updates the deployment `<pipeline>/pipeline`, whose form is the config file's content."""
    named = pipeline_flow.with_options(name=config.name)
    deployment = named.to_deployment(
        name=WHOLE,
        description=config.description or None,
        parameters={"config": dump(config), "root": str(root), "config_path": config_path},
        work_pool_name=WORK_POOL,
        entrypoint_type=EntrypointType.MODULE_PATH,
        tags=["stemma"],
    )
    return deployment.apply()
