"""Servers whose every process is killed, as by a reboot, and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.servers import state
from infra.servers.http import post
from tests.support.programs.command import stemma
from tests.support.programs.processes import wait_until

Services = dict[str, dict[str, Any]]


def known_to(services: Services) -> dict[str, Any]:
    """What the two servers know of pipelines: schedules as (id, cron, whether active), and the ids of finished runs."""
    prefect, mlflow = services["prefect"]["url"], services["mlflow"]["url"]
    deployments = post(f"{prefect}/api/deployments/filter", {"deployments": {"name": {"any_": ["pipeline"]}}})
    runs = post(f"{prefect}/api/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    found = post(f"{mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["1"]}).get("runs", [])
    schedules = [item for deployment in deployments for item in deployment["schedules"]]
    return {
        "schedules": [(item["id"], item["schedule"]["cron"], item["active"]) for item in schedules],
        "flow runs": sorted(run["id"] for run in runs),
        "mlflow runs": sorted(run["info"]["run_id"] for run in found),
    }


def after_a_reboot(root: Path, before: Services, env: Mapping[str, str]) -> None:
    """Kills all services of a store whose pipeline runs at two every night and has run, starts them again with `env`,
    and sees that they are where they were and know what they knew."""
    wait_until(lambda: known_to(before)["mlflow runs"])
    known = known_to(before)
    assert known["flow runs"]
    assert [item[1:] for item in known["schedules"]] == [("0 2 * * *", True)]

    for service in before.values():
        os.killpg(service["pid"], signal.SIGKILL)
    wait_until(lambda: not any(service.alive for service in state.recorded(root).values()))
    told = stemma("status", "--root", root).document["services"]
    assert [service["state"] for service in told] == ["gone"] * len(before)

    again = stemma("up", "--root", root, env=env)
    assert again.code == 0, again.document["errors"]
    after = {service["name"]: service for service in again.document["services"]}
    assert {name: service["url"] for name, service in after.items()} == {
        name: service["url"] for name, service in before.items()
    }
    assert not {service["pid"] for service in before.values()} & {service["pid"] for service in after.values()}
    assert known_to(after) == known
    status = stemma("status", "--root", root, env=env).document
    assert {service["name"]: service["state"] for service in status["services"]} == dict.fromkeys(after, "answers")
    assert status["disk"]["artifacts_gb"] > 0
    assert status["disk"]["free_gb"] > 0
    other = stemma("up", "--root", root, "--host", "127.0.0.2", env=env)
    assert (other.code, other.document["errors"][0]["code"]) == (2, "already_up")
