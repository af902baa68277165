"""The environment of every process that we start: the servers to connect to, and no telemetry."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from infra.project import python_path
from infra.servers import state
from infra.servers.credentials import client_variables

QUIET = {
    # The value that Prefect, MLflow and huggingface_hub all understand.
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # transformers shows a progress bar for each model that it loads, unless huggingface_hub disables it.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MOSAICML_PLATFORM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
}
"""Variables that disable telemetry in every library that has it, and progress bars other than ours."""

HEARTBEAT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
"""Seconds between two signs of life of a flow run to the server: the minimum in Prefect, whose default is 180. See
`infra.servers.prefect.lost_runs`."""

OF_ONE_RUN = "PREFECT__"
"""Prefix of the variables that Prefect's workers give to each run."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Variables that prevent any download from a hub."""


def environment(root: Path | str, prefect_api_url: str | None = None) -> dict[str, str]:
    """Return the variables to add to `os.environ` for a process that works for the store at `root`.

    Args:
        prefect_api_url: the Prefect server to connect to; by default the one that `up` started, if it runs.
    """
    variables = QUIET | OFFLINE | _reach() | client_variables() | {"PREFECT_HOME": str(prefect_home(root))}
    api_url = prefect_api_url or state.prefect_api_url(root)
    if api_url:
        variables |= {"PREFECT_API_URL": api_url, "PREFECT_UI_URL": api_url.removesuffix("/api")}
    return variables


def server_environ(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a server that we start.

    It is ours without the user's settings for other servers, and with the credentials for our servers.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | QUIET | OFFLINE | _reach() | client_variables() | dict(variables)


def prefect_home(root: Path | str) -> Path:
    """Return the folder of Prefect's profile and database for this store; never the user's own ~/.prefect."""
    return state.servers_folder(root) / "prefect"


def _reach() -> dict[str, str]:
    """Return variables that make processes find the project from any working directory, installed or not, and that
    bypass any proxy for this machine."""
    no_proxy = [*_list_of("NO_PROXY", ","), *_list_of("no_proxy", ","), "127.0.0.1", "localhost"]
    hosts = ",".join(dict.fromkeys(no_proxy))
    return {"PYTHONPATH": python_path(), "NO_PROXY": hosts, "no_proxy": hosts}


def _list_of(variable: str, separator: str) -> list[str]:
    return [item for item in os.environ.get(variable, "").split(separator) if item]
