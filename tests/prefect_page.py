"""What stands in the Prefect page."""

from __future__ import annotations

from typing import Any

from infra.servers.http import post


def sheets(page: str, flow_run: str) -> dict[str, str]:
    """Artifact key → markdown, of one flow run."""
    asked = {"flow_runs": {"id": {"any_": [flow_run]}}, "artifacts": {"type": {"any_": ["markdown"]}}}
    found: list[dict[str, Any]] = post(f"{page}/api/artifacts/filter", asked)
    return {item["key"]: item["data"] for item in found}
