"""The environment of every process that we start: who to talk to, and nobody else."""

from __future__ import annotations

import os
from pathlib import Path

from infra.servers import state

PROJECT = Path(__file__).resolve().parents[2]

QUIET = {
    # The word that Prefect, MLflow and huggingface_hub all understand.
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MOSAICML_PLATFORM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
}
"""Telemetry off, in every library that has some."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Nothing is fetched from a hub."""


def environment(root: Path | str, prefect_api_url: str | None = None) -> dict[str, str]:
    """What to add to `os.environ` for a process that works for the store at `root`.

    prefect_api_url: the Prefect server to talk to; by default the one that `up` started, if it runs.
    """
    variables = QUIET | OFFLINE | {"PREFECT_HOME": str(prefect_home(root)), "PYTHONPATH": _python_path()}
    api_url = prefect_api_url or state.prefect_api_url(root)
    if api_url:
        variables["PREFECT_API_URL"] = api_url
    return variables


def prefect_home(root: Path | str) -> Path:
    """Where Prefect keeps its profile and database for this store; never the user's own ~/.prefect."""
    return Path(root).absolute() / "servers" / "prefect"


def _python_path() -> str:
    """Lets a process import the project whatever its working directory is, installed or not."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(PROJECT)]
    return os.pathsep.join([str(PROJECT), *others])
