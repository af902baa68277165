from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.servers.environment import server_environ
from infra.servers.http import answers

pytestmark = pytest.mark.cluster

HOLD = """
import sys
from infra.servers.private import private_prefect_server
with private_prefect_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=server_environ({"TMPDIR": str(tmp_path)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_it_answers_then_goes_quietly_and_leaves_nothing(holder, tmp_path: Path) -> None:
    url = holder.stdout.readline().strip()
    assert answers(f"{url}/health")
    servers = psutil.Process(holder.pid).children(recursive=True)
    assert servers
    _, stderr = holder.communicate("")
    assert holder.returncode == 0
    assert stderr == ""
    assert not any(server.is_running() for server in servers)
    assert list(tmp_path.iterdir()) == []


def test_it_dies_with_its_parent_even_when_that_is_killed(holder) -> None:
    url = holder.stdout.readline().strip()
    servers = psutil.Process(holder.pid).children(recursive=True)
    os.kill(holder.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert alive == []
    assert not answers(f"{url}/health")
