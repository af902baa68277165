"""Prefect deployments of a pipeline: the whole, each stage by itself with its config as a form, and its sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.deployments.runner import EntrypointType

from flows.config.forms import form_values, with_form
from flows.config.graph import graph
from flows.config.read import PipelineConfig
from flows.deployment.pools import ensure_pool, job_variables, pool_of
from flows.pipeline import pipeline as pipeline_flow
from flows.prefect.schedules import Schedule, Timing, timing_by_now, timing_of
from flows.runs.journal import PIPELINE
from infra.project import code_state
from infra.store.roots import shown_root


def deploy_pipeline(config: PipelineConfig, root: Path, config_path: str, schedule: Schedule | None = None) -> UUID:
    """Create or update the deployment `<pipeline>/pipeline`, whose form is the config file's content.

    Args:
        schedule: when it runs by itself; None leaves the schedule unchanged.

    Raises ConfigError for one that never fires.
    """
    parameters = {"config": form_values(config), "root": shown_root(root), "config_path": config_path}
    timing = timing_of(schedule) if schedule else timing_by_now(f"{config.name}/{PIPELINE}")
    flow = with_form(pipeline_flow, config, config.name)
    return apply_deployment(config, root, flow, PIPELINE, parameters, config.description, timing)


def deploy_stages(config: PipelineConfig, root: Path, config_path: str) -> dict[str, UUID]:
    """Make or update `<pipeline>/<stage>` for every stage, its form prefilled from the config file."""
    from flows.stage import FLOWS, form_of

    made = {}
    for node in graph(config).values():
        if node.adopted or node.measures:  # measured with the form of the training, whose keys it has
            continue
        shown = form_of(config, node.id, node.stage.name)
        parameters = {
            "config": form_values(shown),
            "stage": node.id,
            "config_path": str(Path(config_path).absolute()),
            "settings": {},
            "and_below": False,
            "root": shown_root(root),
        }
        message = f"The stage {node.id} of {config.name} alone, with the settings of its form."
        flow = with_form(FLOWS[node.stage.name], shown, config.name)
        made[node.id] = apply_deployment(config, root, flow, node.id, parameters, message, Timing())
    return made


def apply_deployment(
    config: PipelineConfig,
    root: Path,
    flow: Flow[..., Any],
    name: str,
    parameters: dict[str, Any],
    description: str,
    timing: Timing,
) -> UUID:
    """Make or update a deployment of a flow, in the pool of the pipeline."""
    ensure_pool(config)
    deployment: Any = flow.to_deployment(
        name=name,
        description=description or None,
        parameters=parameters,
        schedules=list(timing.schedules),
        concurrency_limit=timing.limit,
        version=str(code_state()["commit"]) or None,
        work_pool_name=pool_of(config),
        job_variables=job_variables(config, root),
        entrypoint_type=EntrypointType.MODULE_PATH,
        tags=["stemma", *timing.tags],
    )
    made = deployment.apply()
    assert isinstance(made, UUID)
    return made
