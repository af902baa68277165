"""Runs whose leases are in PostgreSQL: what they tell their stages of it, and two machines that want one pipeline."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import psycopg2
import pytest

from infra.leases.table import HEARTBEAT_S
from tests.support.pipelines import short_config
from tests.support.programs.command import environment, finish, start, stemma, write_config
from tests.support.programs.processes import COLD, gone, running_stage, wait_until
from tests.support.services.namespaces import network
from tests.support.services.postgres import PASSWORD, postgres

pytestmark = pytest.mark.cluster
URL = "STEMMA_DATABASE_URL"
GONE = "postgresql://stemma:pass-3571@127.0.0.1:1/stemma"


@pytest.fixture
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


def renewals(database: str) -> list[tuple[str, int, float]]:
    """(stage, the group that works, Unix time of the last renewal) of each lease."""
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT split_part(key, '/', 1), work_group, renewed FROM leases.held")
        return list(cursor.fetchall())


@pytest.mark.long
def test_a_stage_renews_its_lease_and_is_told_no_password(
    cold_env: dict[str, str], data_pipeline: Path, database: str
) -> None:
    """Its run is stopped, as one on a laptop that sleeps: what is renewed then, the stage renews."""
    config, root = data_pipeline / "config.yaml", data_pipeline / "store"
    for path in root.glob(".state/leases.*"):
        path.unlink()
    for command in ("check", "run"):
        answer = stemma(command, config, "--root", root, env={**cold_env, URL: GONE})
        assert answer.document["errors"][0]["code"] == "database_unreachable", command
        assert "pass-3571" not in str(answer)

    shutil.rmtree(next((root / "clean").iterdir()))
    run = start("run", config, "--root", root, env={**cold_env, URL: database})
    stage = wait_until(lambda: running_stage(root, "clean"))
    assert isinstance(stage, psutil.Process)
    wait_until(lambda: ("clean", stage.pid) in [row[:2] for row in renewals(database)])
    wait_until(lambda: list(root.glob(".work/clean/*/scratch/journal.jsonl")))
    stage.suspend()
    run.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        assert PASSWORD not in json.dumps(stage.environ()) and PASSWORD not in " ".join(stage.cmdline())
        (job,) = root.glob(".work/clean/*/scratch/job.json")
        assert json.loads(job.read_text())["claim"]["table"]["postgres"]
        assert not [path for path in root.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
        wait_until(lambda: time.monotonic() - stopped > HEARTBEAT_S)
        (before,) = (row[2] for row in renewals(database) if row[0] == "clean")
        stage.resume()
        wait_until(lambda: [row for row in renewals(database) if row[2] > before] or gone(stage))
        assert [row for row in renewals(database) if row[2] > before]
    finally:
        stage.resume()
        run.send_signal(signal.SIGCONT)
    answer = finish(run)
    assert answer.code == 0 and answer.with_status("built") == {"clean"}, answer.document["errors"]
    assert renewals(database) == [] and PASSWORD not in str(answer)


@pytest.mark.long
def test_two_machines_want_one_pipeline_and_one_of_them_is_lost(tmp_path: Path) -> None:
    """The risk: with real leases of a minute and real runs, both build, or nobody goes on with what the lost one began.

    Each machine has a network, a name and processes of its own; PostgreSQL runs on a third.
    """
    config, root = write_config(tmp_path / "config.yaml", short_config(tmp_path)), tmp_path / "store"
    words = [sys.executable, "-m", "cli.main", "run", str(config), "--root", str(root), "--json"]
    with ExitStack() as stack:
        hosts = stack.enter_context(network(3))
        url = stack.enter_context(postgres(on=(hosts, hosts.hosts[2])))
        runs = {}
        for host in hosts.hosts[:2]:
            log = stack.enter_context((tmp_path / f"{host}.log").open("w"))
            runs[host] = subprocess.Popen(
                [*hosts.machine(host), *words],
                env=environment(**COLD, **{URL: url}),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stage = wait_until(lambda: running_stage(root, "clean"))
        assert isinstance(stage, psutil.Process)
        stage.suspend()  # it has not ended when the other wants it too
        above = {process.pid for process in stage.parents()}
        builder = next(host for host, run in runs.items() if run.pid in above)
        waiter = next(host for host in runs if host != builder)
        told = tmp_path / f"{waiter}.log"
        wait_until(lambda: f"on host-{builder} is building the same artifact" in told.read_text())
        hosts.lose(builder)
        answer = finish(runs[waiter], 500)
        runs[builder].communicate()
    assert answer.code == 0, answer.document["errors"]
    assert f"on host-{builder}, which is no longer running" in told.read_text()
    assert answer.statuses()["clean"] == "built" and answer.statuses()["tokenizer"] == "built"
    for name in ("ingest", "clean", "tokenizer"):
        assert len(list((root / name).iterdir())) == 1
