"""A pipeline whose pretraining runs on several hosts: the network between them fails, and one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines import trained_config
from tests.support.programs.command import environment, finish, start, write_config
from tests.support.programs.processes import wait_until
from tests.support.services.namespaces import Network, network

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(3) as made:
        yield made


def _config(folder: Path, hosts: Network, used: int, **launch: Any) -> Path:
    """A training of two hosts, of the first `used` of the network."""
    given = {
        "nodes": 2,
        "lost_s": 20,
        "cluster": "hosts",
        "hosts": list(hosts.hosts[:used]),
        "remote_shell": hosts.shell,
    }
    config = trained_config(folder, 1500, **given, **launch)
    config["pretrain"]["checkpoint_every"] = "50 batches"
    return write_config(folder / "config.yaml", config)


def _checkpoints(root: Path) -> list[Path]:
    return list(root.glob(".work/pretrain/*/scratch/checkpoints/ba*"))


def _events(root: Path) -> str:
    """What the finished training told, in order."""
    return next(root.glob("pretrain/*/aux/events.jsonl")).read_text()


def test_a_cut_between_hosts_is_found_and_after_it_is_healed_training_goes_on(hosts: Network, tmp_path: Path) -> None:
    """The risk: ranks that wait for each other for ever, since no connection breaks when a cable is pulled."""
    root = tmp_path / "store"
    config = _config(tmp_path, hosts, 2, hang_s=30, restarts=5)
    command = start("run", config, "--root", root, env=environment())
    wait_until(lambda: _checkpoints(root), command=command)
    hosts.cut(hosts.hosts[1])
    journal = next(root.glob(".work/pretrain/*/scratch/journal.jsonl"))
    wait_until(lambda: "starting all ranks again" in journal.read_text(), command=command)
    hosts.heal(hosts.hosts[1])
    answer = finish(command)
    assert answer.code == 0, (answer.document["errors"], answer.stderr[-3000:])
    told = _events(root)
    assert "hang" in told and "(1 of 5)" in told and "continuing pretrain at batch" in told


def test_a_host_that_is_lost_is_replaced_and_training_goes_on(hosts: Network, tmp_path: Path) -> None:
    """The risk: ranks of two starts that write into one work folder, or a stage that takes the loss for a crash."""
    root = tmp_path / "store"
    command = start("run", _config(tmp_path, hosts, 3), "--root", root, env=environment())
    wait_until(lambda: _checkpoints(root), command=command)
    hosts.lose(hosts.hosts[1])
    answer = finish(command)
    assert answer.code == 0, (answer.document["errors"], answer.stderr[-3000:])
    told = _events(root)
    assert f"node {hosts.hosts[1]} was lost" in told and "continuing pretrain at batch" in told
    assert f"training on {hosts.hosts[0]}, {hosts.hosts[2]}" in told
