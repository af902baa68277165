from __future__ import annotations

import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.errors import StageError
from infra.lineage.relay_lock import anyone_registered, register
from infra.process.lifetime import start_ticks, started_at, this_boot
from infra.servers import state
from infra.servers.http import post
from infra.servers.ports import any_free_port
from infra.servers.services import down, services, up
from infra.servers.specs import NAMES, TITLES

pytestmark = pytest.mark.cluster


def test_up_starts_each_service_once_and_down_ends_what_up_started(
    root: Path, eventually, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow cannot start at first: `up` reports why, and leaves the others, which are not started again."""
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    ports = {"prefect_port": any_free_port(), "mlflow_port": any_free_port()}
    database = root / "mlflow" / "mlflow.db"
    database.mkdir(parents=True)
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(up, root, **ports, say=lines.append) for _ in range(2)]
        errors = [future.exception() for future in both]
    for error in errors:
        assert isinstance(error, StageError)
        [problem] = error.problems
        assert (problem.code, problem.path) == ("service_failed", "mlflow")
        assert "unable to open database file" in problem.message
        assert "mlflow.log" in problem.fix
    starts = Counter(line for line in lines if line.startswith("starting"))
    assert starts == {f"starting {title}": 1 + (name == "mlflow") for name, title in TITLES.items()}
    others = services(root)
    assert [service.name for service in others] == ["prefect", "worker", "relay", "metrics", "page"]
    database.rmdir()

    lines.clear()
    first = up(root, **ports, say=lines.append)
    assert [line for line in lines if line.startswith("starting")] == [f"starting {TITLES['mlflow']}"]
    assert [service for service in first if service.name != "mlflow"] == others
    assert services(root) == first == up(root)
    assert [service.name for service in first] == list(NAMES)
    prefect, mlflow, _, _, metrics, page = first
    assert state.prefect_api_url(root) == f"http://127.0.0.1:{ports['prefect_port']}/api"
    assert state.mlflow_url(root) == mlflow.url == f"http://127.0.0.1:{ports['mlflow_port']}"

    for link in ("/", "/dashboard", "/runs", "/api/health"):
        with urllib.request.urlopen(prefect.url + link) as answer:
            assert answer.status == 200
    with urllib.request.urlopen(mlflow.url) as answer:
        assert b"MLflow" in answer.read()
    figures = {
        metrics.url: b"stemma_disk_free_bytes",
        page.url: b"No pipeline has run in this store",
        f"{mlflow.url}/metrics": b"mlflow_",
        f"{prefect.url}/api/metrics": b"# TYPE",
    }
    for link, figure in figures.items():
        with urllib.request.urlopen(link) as answer:
            assert figure in answer.read(), link
    [worker] = post(f"{prefect.url}/api/work_pools/stemma/workers/filter", {})
    assert worker["status"] == "ONLINE"
    kinds = {kind["slug"] for kind in post(f"{prefect.url}/api/block_types/filter", {})}
    assert {"secret", "slack-webhook", "aws-credentials"} <= kinds, "a copied database offers what a new one does"

    # What dies is started again, and only that, at its port.
    psutil.Process(metrics.pid).kill()
    eventually(lambda: not metrics.alive, "the metrics are gone")
    assert [service.name for service in services(root)] == ["prefect", "mlflow", "worker", "relay", "page"]
    again = up(root)
    assert [service.pid for service in again if service.name != "metrics"] == [
        service.pid for service in first if service.name != "metrics"
    ]
    assert again[4].url == metrics.url

    assert down(root) == again
    assert not any(service.alive for service in again)
    assert not list(temporary.iterdir())
    assert services(root) == []
    assert state.prefect_api_url(root) is None
    assert down(root) == []


def test_a_recorded_process_number_that_another_process_has_now_is_left_alone(root: Path) -> None:
    state.servers_folder(root).mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        started = started_at(stranger.pid)
        assert started is not None
        recorded = state.Service("mlflow", "http://127.0.0.1:1", stranger.pid, started)
        state.record(root, [replace(recorded, started=started - 3600)])
        assert state.mlflow_url(root) is None
        assert down(root) == []
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_a_clock_that_is_set_makes_nobody_dead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's time of a start moves with the clock: what ran counted as gone, `up` ended and started it anew, and
    MLflow was told that living runs were killed."""
    state.servers_folder(root).mkdir()
    register(root)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as server:
        started, ticks = started_at(server.pid), start_ticks(server.pid)
        assert started and ticks
        state.record(root, [state.Service("mlflow", "http://127.0.0.1:1", server.pid, started, ticks, this_boot())])
        boot_time = psutil._pslinux.boot_time
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)
        moved = started_at(server.pid)
        assert moved is not None and moved - started > 3000
        assert state.mlflow_url(root) == "http://127.0.0.1:1"
        assert anyone_registered(root)
        (recorded,) = state.recorded(root).values()
        assert not replace(recorded, ticks=ticks + 1).alive and not replace(recorded, boot="another").alive
        server.communicate(b"\n")
    assert not recorded.alive
