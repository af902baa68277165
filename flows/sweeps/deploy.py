"""The deployment of a pipeline's sweeps, whose form asks for keys and values."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from flows.config.forms import renamed
from flows.config.read import PipelineConfig
from flows.deployment.deploy import apply_deployment
from flows.prefect.schedules import Timing
from flows.sweeps.from_page import SWEEP, first_keys, sweep_run
from infra.store.roots import shown_root


def deploy_sweep(config: PipelineConfig, root: Path, config_path: str) -> UUID:
    """Makes or updates `<pipeline>/sweep`, whose form asks for keys and values."""
    parameters = {
        "config_path": str(Path(config_path).absolute()),
        "keys": first_keys(config),
        "root": shown_root(root),
    }
    message = f"Runs {config.name} with several values of its keys, and says which is best."
    return apply_deployment(config, root, renamed(sweep_run, config.name), SWEEP, parameters, message, Timing())
