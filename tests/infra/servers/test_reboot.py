"""After everything was killed and the machine came up again, `stemma up` goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.servers import state
from infra.servers.ports import any_free_port
from tests.support.programs.command import environment, stemma
from tests.support.programs.reboot import after_a_reboot

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_after_a_reboot_up_continues_and_nothing_is_lost(data_pipeline: Path) -> None:
    """The risk: what SQLite had not written down yet. On PostgreSQL, behind credentials, it is in test_guarded.py."""
    root, config, env = data_pipeline / "store", data_pipeline / "config.yaml", environment(STEMMA_RELAY="on")
    ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
    try:
        first = stemma("up", "--root", root, *ports, env=env)
        assert first.code == 0, first.document["errors"]
        deployed = stemma("deploy", config, "--root", root, "--cron", "0 2 * * *", env=env)
        assert deployed.code == 0, deployed.document["errors"]
        answer = stemma("run", config, "--root", root, env=env)
        assert answer.with_status("reused") == set(answer.statuses()), answer.document["errors"]
        after_a_reboot(root, {service["name"]: service for service in first.document["services"]}, env)
    finally:
        stemma("down", "--root", root, env=env)
    assert state.recorded(root) == {}
