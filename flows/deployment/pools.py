"""The work pool that a pipeline's runs go to: that of Stemma's own workers, or one of Prefect's type kubernetes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from flows.config.read import PipelineConfig
from infra.errors import ConfigError, Problem
from infra.launch.kube import runs as kube_runs
from infra.store.roots import shown_root

WORK_POOL = "stemma"
_KEY = "launch.kubernetes.runs.pool"


def pool_of(config: PipelineConfig) -> str:
    runs = config.launch.kubernetes.runs
    return runs.pool if runs else WORK_POOL


def job_variables(config: PipelineConfig, root: Path) -> dict[str, Any]:
    """Job variables of a deployment, or of a single run of it; none for Stemma's own workers."""
    if config.launch.kubernetes.runs is None:
        return {}
    return kube_runs.job_variables(config.launch, config.name, shown_root(root))


def ensure_pool(config: PipelineConfig) -> None:
    """Make the pool where it is missing: what is deployed waits there for a worker.

    Raises ConfigError `foreign_pool` for one of another type, or whose template knows nothing of our Jobs.
    """
    pool, is_ours = pool_of(config), config.launch.kubernetes.runs is None
    if pool == WORK_POOL and not is_ours:
        raise _foreign(pool, "it is the pool of Stemma's own workers")
    template = kube_runs.template()
    with get_client(sync_client=True) as client:
        try:
            work_pool = client.read_work_pool(pool)
        except ObjectNotFound:
            made = (
                WorkPoolCreate(name=pool, type="process")
                if is_ours
                else WorkPoolCreate(name=pool, type=kube_runs.TYPE, base_job_template=template)
            )
            with suppress(ObjectAlreadyExists):  # by a worker that begins now
                client.create_work_pool(made)
            return
    if is_ours:
        return
    if work_pool.type != kube_runs.TYPE:
        raise _foreign(pool, f"it has the type {work_pool.type}, not {kube_runs.TYPE}")
    passed_on = work_pool.base_job_template.get("job_configuration", {}).get(kube_runs.MANIFEST)
    if passed_on != template["job_configuration"][kube_runs.MANIFEST]:
        raise _foreign(pool, "its base job template defines its own Job instead of the one from launch.kubernetes")


def _foreign(pool: str, message: str) -> ConfigError:
    fix = "name a new pool, or give this one the template of `python -m infra.launch.kube.runs --template`"
    return ConfigError(Problem("foreign_pool", _KEY, f"the work pool {pool} cannot be used: {message}", fix))
