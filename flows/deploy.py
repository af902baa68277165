"""Prefect deployments of a pipeline: the whole, and each stage by itself with its config as a form."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.deployments.runner import EntrypointType
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron

from flows.config import PipelineConfig, dump
from flows.graph import graph
from flows.journal import WHOLE
from flows.pipeline import pipeline as pipeline_flow
from infra.config import StageConfig
from infra.project import code_state

WORK_POOL = "stemma"


def deploy_pipeline(
    config: PipelineConfig, root: Path, config_path: str, *, cron: str | None = None, timezone: str | None = None
) -> UUID:
    """Makes or updates the deployment `<pipeline>/pipeline`, whose form is the config file's content.

    cron: when it runs by itself; None leaves its schedule as it is. timezone: an IANA name, UTC by default.
    """
    parameters = {"config": dump(config), "root": str(root), "config_path": config_path}
    schedules = [Cron(cron, timezone=timezone)] if cron else _schedules(f"{config.name}/{WHOLE}")
    return _apply(pipeline_flow, config, WHOLE, parameters, config.description, schedules)


def deploy_stages(config: PipelineConfig, root: Path, config_path: str) -> dict[str, UUID]:
    """Makes or updates `<pipeline>/<stage>` for every stage, its form prefilled from the config file."""
    from flows.stage import FLOWS

    made = {}
    for node in graph(config).values():
        if node.adopted:
            continue
        section = config.section(node.stage.name)
        assert isinstance(section, StageConfig)
        parameters = {
            "config": section.model_dump(mode="json"),
            "stage": node.id,
            "config_path": str(Path(config_path).absolute()),
            "settings": {},
            "and_below": False,
            "root": str(root),
        }
        told = f"The stage {node.id} of {config.name} alone, with what its form says."
        made[node.id] = _apply(FLOWS[node.stage.name], config, node.id, parameters, told, [])
    return made


def _schedules(deployment: str) -> list[Any]:
    """The schedules that a deployment has by now; Prefect would drop them when it is made again without."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        found = client.read_deployment_by_name(deployment)
        kept = ("schedule", "active", "parameters", "slug", "max_scheduled_runs")
        return [
            DeploymentScheduleCreate(**{key: getattr(item, key) for key in kept if hasattr(item, key)})
            for item in found.schedules
        ]
    return []


def _apply(
    flow: Flow[..., Any],
    config: PipelineConfig,
    name: str,
    parameters: dict[str, Any],
    description: str,
    schedules: list[Any],
) -> UUID:
    deployment: Any = flow.with_options(name=config.name).to_deployment(
        name=name,
        description=description or None,
        parameters=parameters,
        schedules=schedules,
        version=str(code_state()["commit"]) or None,
        work_pool_name=WORK_POOL,
        entrypoint_type=EntrypointType.MODULE_PATH,
        tags=["stemma"],
    )
    made = deployment.apply()
    assert isinstance(made, UUID)
    return made
