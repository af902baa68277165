"""Ranks on several hosts, each a network namespace: checked first, watched together, replaced when one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.infra.launch.cluster_launcher import on_cluster, rank_pids
from tests.support.programs.processes import wait_until
from tests.support.services.namespaces import Network, network

pytestmark = pytest.mark.cluster
ENDED = "[Ended(rank=0, code=0), Ended(rank=1, code=0)]"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(3) as made:
        yield made


def _on(hosts: Network, **settings: Any) -> dict[str, Any]:
    return {"cluster": "hosts", "hosts": hosts.hosts, "remote_shell": hosts.shell, "lost_s": 10, **settings}


def _pid(folder: Path, rank: int) -> int:
    """That of the first start of a rank, once it works."""
    wait_until(lambda: len(list(folder.glob("done.*"))) > 1)
    return int((folder / f"start.0.{rank}").read_text().split()[0])


def test_a_host_that_fails_its_checks_is_named_and_left_out(hosts: Network, tmp_path: Path) -> None:
    """Its disk for unpacked shards is full: a file system of 8 kB in its own mount namespace."""
    scratch, bad = tmp_path / "scratch", hosts.hosts[0]
    shell = tmp_path / "shell"
    mount = f'[ "$1" = {bad} ] && mount -t tmpfs -o size=8k none {scratch}'
    shell.write_text(f'#!/bin/sh\nexec ip netns exec {hosts.tag}-$1 sh -c \'{mount}; exec sh -c "$2"\' - "$1" "$2"\n')
    shell.chmod(0o755)
    scratch.mkdir()
    settings = _on(hosts, remote_shell=[str(shell), "{host}"], scratch=str(scratch))
    out, err = on_cluster(tmp_path, 3, **settings).communicate(timeout=200)
    left_out, trained, *_, ended = out.splitlines()
    assert left_out.startswith(f"node_excluded: node {bad} is left out: disk of {scratch}"), (out, err)
    assert "No space left" in left_out
    assert trained.startswith(f"nodes: training on {hosts.hosts[1]}, {hosts.hosts[2]}, which passed")
    assert ended == ENDED


def test_a_host_that_is_far_slower_than_the_other_is_named(hosts: Network, tmp_path: Path) -> None:
    """On one of them the clock that exercises are timed by runs a thousand times as fast."""
    (tmp_path / "late").mkdir()
    late = "import time\nclock = time.perf_counter\ntime.perf_counter = lambda: 1000 * clock()\n"
    (tmp_path / "late" / "sitecustomize.py").write_text(late)
    slow, shell = hosts.hosts[1], tmp_path / "shell"
    line = f'line=$2; [ "$1" = {slow} ] && line=$(echo "$2" | sed "s|PYTHONPATH=|PYTHONPATH={tmp_path}/late:|")'
    shell.write_text(f'#!/bin/sh\n{line}\nexec ip netns exec {hosts.tag}-$1 sh -c "$line"\n')
    shell.chmod(0o755)
    out, err = on_cluster(tmp_path, 3, **_on(hosts, remote_shell=[str(shell), "{host}"])).communicate(timeout=200)
    trained, named, *_, ended = out.splitlines()
    assert trained.startswith(f"nodes: training on {hosts.hosts[0]}, {slow}, which passed"), (out, err)
    assert named.startswith(f"slow_node: node {slow} is slow, and the others will wait for it: it computes"), (out, err)
    assert "it copies memory at" in named and f"where {hosts.hosts[0]} does" in named and ended == ENDED


def test_too_few_hosts_that_work_end_the_stage_by_name(hosts: Network, tmp_path: Path) -> None:
    settings = _on(hosts) | {"hosts": [hosts.hosts[0], "10.77.0.200"]}
    out, _ = on_cluster(tmp_path, 3, **settings).communicate(timeout=200)
    assert "node_excluded: node 10.77.0.200 is left out: its agent ended, or never began" in out
    assert "too_few_hosts: launch.hosts: expected 2 working hosts, got 1" in out


@pytest.mark.long
def test_a_lost_host_is_replaced_and_the_ranks_go_on(hosts: Network, tmp_path: Path) -> None:
    """Its agent is stopped: as when a host is cut off, it gives no sign, and ends by itself when it sees none.

    The risk: the training waits for a host that never comes back. Ranks and agents that end are in `make test`.
    """
    stage = on_cluster(tmp_path, 250, **_on(hosts))
    rank = _pid(tmp_path, 1)
    agent = psutil.Process(os.getpgid(rank))
    agent.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGSTOP)
    out, err = stage.communicate(timeout=200)
    assert f"restarted: node {hosts.hosts[1]} was lost: it gave no sign for" in out, (out, err)
    assert f"nodes: training on {hosts.hosts[0]}, {hosts.hosts[2]}" in out and out.splitlines()[-1] == ENDED
    starts = {path.name.split(".")[2] for path in tmp_path.glob("met.1.*")}
    assert "0" not in starts, "the second start went on from what was done"
    assert not [pid for pid in rank_pids(tmp_path) if psutil.pid_exists(pid)]


@pytest.mark.long
def test_a_rank_that_hangs_on_another_host_is_named(hosts: Network, tmp_path: Path) -> None:
    """The rank furthest behind of all hosts, though the others wait as silently as it. The risk: another is blamed. One
    that hangs on this machine is in `make test`.
    """
    action = """
        if batch == 3 and rank == "1" and start == 0:
            stuck_here()
    """
    out, err = on_cluster(tmp_path, 6, action, **_on(hosts, hang_s=12)).communicate(timeout=200)
    assert "restarted: rank 1 hangs in the forward pass of batch 4, at stuck_here" in out, (out, err)
    assert "stacks of rank 0:" in err and "stacks of rank 1:" in err
    assert out.splitlines()[-1] == ENDED


@pytest.mark.parametrize("victim", ["stage", pytest.param("agent", marks=pytest.mark.long)])
def test_no_rank_outlives_its_stage_or_its_agent(hosts: Network, tmp_path: Path, victim: str) -> None:
    stage = on_cluster(tmp_path, 900, **_on(hosts, restarts=0))
    rank = _pid(tmp_path, 1)
    os.kill(stage.pid if victim == "stage" else os.getpgid(rank), signal.SIGKILL)
    out, _ = stage.communicate(timeout=200)
    wait_until(lambda: not [pid for pid in rank_pids(tmp_path) if psutil.pid_exists(pid)], timeout_s=60)
    if victim == "agent":
        assert out.splitlines()[-1].startswith("node_lost: launch.nodes: node 10.77.0.2 was lost")
