"""After everything was killed and the machine came up again, `stemma up` goes on where it was."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infra.servers import state
from infra.servers.http import post
from infra.servers.ports import any_free_port
from tests.command import environment, stemma
from tests.postgres import PASSWORD, postgres
from tests.processes import wait_until

pytestmark = pytest.mark.cluster
AUTH = "ada:correct-horse-battery"


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.long), "postgresql"])
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """SQLite open on loopback, and PostgreSQL with credentials."""
    with ExitStack() as stack:
        variables = {}
        if request.param == "postgresql":
            variables = {"STEMMA_DATABASE_URL": stack.enter_context(postgres()), "STEMMA_AUTH": AUTH}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)  # also for our own questions
        yield environment(STEMMA_RELAY="on", **variables)


def known_to(services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the two servers know of the pipeline."""
    prefect, mlflow = services["prefect"]["url"], services["mlflow"]["url"]
    [deployment] = post(f"{prefect}/api/deployments/filter", {"deployments": {"name": {"any_": ["pipeline"]}}})
    runs = post(f"{prefect}/api/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    found = post(f"{mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["1"]}).get("runs", [])
    return {
        "schedules": [(item["id"], item["schedule"]["cron"], item["active"]) for item in deployment["schedules"]],
        "flow runs": sorted(run["id"] for run in runs),
        "mlflow runs": sorted(run["info"]["run_id"] for run in found),
    }


def test_after_a_reboot_up_continues_and_nothing_is_lost(data_pipeline: Path, surroundings: dict[str, str]) -> None:
    root, config = data_pipeline / "store", data_pipeline / "config.yaml"
    ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
    try:
        first = stemma("up", "--root", root, *ports, env=surroundings)
        assert first.code == 0, first.document["errors"]
        before = {service["name"]: service for service in first.document["services"]}
        deployed = stemma("deploy", config, "--root", root, "--cron", "0 2 * * *", env=surroundings)
        assert deployed.code == 0, deployed.document["errors"]
        answer = stemma("run", config, "--root", root, env=surroundings)
        assert answer.code == 0, answer.document["errors"]
        assert set(answer.statuses().values()) == {"reused"}
        wait_until(lambda: known_to(before)["mlflow runs"])
        known = known_to(before)
        assert known["flow runs"]
        assert [item[1:] for item in known["schedules"]] == [("0 2 * * *", True)]

        for service in before.values():
            os.killpg(service["pid"], signal.SIGKILL)
        wait_until(lambda: not any(service.alive for service in state.recorded(root).values()))
        told = stemma("status", "--root", root, env=surroundings).document["services"]
        assert [service["state"] for service in told] == ["gone"] * len(before)

        # The recorded password-less database is enough to find it; its password comes from libpq's own place.
        env = dict(surroundings)
        if env.pop("STEMMA_DATABASE_URL", None):
            env["PGPASSWORD"] = PASSWORD
        again = stemma("up", "--root", root, env=env)
        assert again.code == 0, again.document["errors"]
        after = {service["name"]: service for service in again.document["services"]}
        assert {name: service["url"] for name, service in after.items()} == {
            name: service["url"] for name, service in before.items()
        }
        assert not {service["pid"] for service in before.values()} & {service["pid"] for service in after.values()}
        assert known_to(after) == known
        told = stemma("status", "--root", root, env=env).document
        assert {service["name"]: service["state"] for service in told["services"]} == dict.fromkeys(after, "answers")
        assert told["disk"]["artifacts_gb"] > 0
        assert told["disk"]["free_gb"] > 0
        written = "".join(path.read_text() for path in (root / "servers").glob("*.json"))
        assert json.loads((root / "servers" / "settings.json").read_text())["guarded"] == ("STEMMA_AUTH" in env)
        assert PASSWORD not in written
        assert AUTH.partition(":")[2] not in written

        stranger = {key: value for key, value in env.items() if key != "STEMMA_AUTH"}
        if "STEMMA_AUTH" in env:
            refused = stemma("up", "--root", root, env=stranger)
            assert (refused.code, refused.document["errors"][0]["code"]) == (2, "no_credentials")
        other = stemma("up", "--root", root, "--host", "127.0.0.2", env=env)
        assert (other.code, other.document["errors"][0]["code"]) == (2, "already_up")
    finally:
        stemma("down", "--root", root, env=surroundings)
    assert state.recorded(root) == {}
