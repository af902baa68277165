"""What stands in the Prefect page."""

from __future__ import annotations

import json
from typing import Any

from infra.servers.http import post


def sheets(page: str, flow_run: str) -> dict[str, str]:
    """Artifact key → markdown, of one flow run."""
    return _artifacts(page, flow_run, "markdown")


def tables(page: str, flow_run: str) -> dict[str, list[dict[str, Any]]]:
    """Artifact key → rows of its newest version, of one flow run."""
    return {key: json.loads(data) for key, data in _artifacts(page, flow_run, "table").items()}


def _artifacts(page: str, flow_run: str, kind: str) -> dict[str, Any]:
    asked = {"flow_runs": {"id": {"any_": [flow_run]}}, "artifacts": {"type": {"any_": [kind]}}}
    found: list[dict[str, Any]] = post(f"{page}/api/artifacts/filter", asked, 30.0)
    return {item["key"]: item["data"] for item in sorted(found, key=lambda item: str(item["created"]))}
