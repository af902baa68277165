"""Many runs due at once, one worker, PostgreSQL: none lost, none doubled, and the page still answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs.command import environment, stemma
from tests.support.services.postgres import postgres

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("batches", "at_once"), [(1, 8), (10, 20)])
def test_of_runs_that_are_due_at_once_none_is_lost_and_none_doubled(tmp_path: Path, batches: int, at_once: int) -> None:
    """The risk: a run that is lost, or done twice, only where many are due in the same second. That the server takes
    many writes at once is in `make test`."""
    root = tmp_path / "store"
    with postgres() as database:
        env = environment(STEMMA_DATABASE_URL=database)
        try:
            assert stemma("up", "--root", root, env=env).code == 0
            size = ["--batches", str(batches), "--at-once", str(at_once)]
            command = [sys.executable, "-m", "tests.support.load", "--root", str(root), *size]
            told = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True).stdout
        finally:
            stemma("down", "--root", root, env=env)
    found = json.loads(told)
    scheduled = at_once * batches
    assert found["scheduled"] == scheduled
    assert found["states"] == {"Completed": scheduled}
    assert found["run_counts"] == {"1": scheduled}
    assert found["journals"] == scheduled
    assert found["page_failures"] == 0
    assert len(list((root / "ingest").glob("*/manifest.json"))) == 1
