"""The network between nodes is tried before they train: hosts are network namespaces, one behind a slow cable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infra.launch.node_files import MACHINE
from tests.support.programs.command import REPOSITORY
from tests.support.services.namespaces import Network, network
from training.core.links import rounds, slow_links

PROGRAM = """
from infra.launch.config import LaunchConfig
from training.core.hardware import prepare
prepare(LaunchConfig(device="cpu", threads=1), say=lambda name, message: print(f"{name}: {message}", flush=True))
"""


def _tried(hosts: Network) -> list[str]:
    """What the first rank says where each host has one rank."""
    ranks = []
    for number, host in enumerate(hosts.hosts):
        variables = {
            "RANK": number,
            "WORLD_SIZE": len(hosts.hosts),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": hosts.hosts[0],
            "MASTER_PORT": 29_500,
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": REPOSITORY,
            MACHINE: f"node{number}",
        }
        given = [f"{name}={value}" for name, value in variables.items()]
        command = [*hosts.command(host), "env", *given, sys.executable, "-c", PROGRAM]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        answers = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    first, *others = answers
    assert not any(others)
    return first


@pytest.mark.cluster
def test_a_node_behind_a_slow_cable_is_named() -> None:
    with network(3) as hosts:
        hosts.slow_down(hosts.hosts[1], mbit=200)
        measured, named = _tried(hosts)
    # 200 Mbit/s are 25 MB/s, of which answers to what the other side sends take a part.
    low = float(measured.removeprefix("network: each node sends its neighbour ").split()[0])
    assert 5 < low < 40 and " MB/s to " in measured, measured
    assert named.startswith("slow_link: node node1 exchanges "), named


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8])
def test_a_node_has_one_exchange_at_a_time_and_one_with_each_neighbour(nodes: int) -> None:
    tried = rounds(nodes)
    for links in tried:
        busy = [node for link in links for node in link]
        assert len(set(busy)) == len(busy)
    every = [frozenset(link) for links in tried for link in links]
    around = {frozenset((node, (node + 1) % nodes)) for node in range(nodes)}
    assert len(every) == len(around) and set(every) == around


def test_a_slow_link_between_sound_nodes_is_told_by_both_ends() -> None:
    names = {node: f"n{node}" for node in range(4)}
    speeds = {(0, 1): 10e9, (2, 3): 10e9, (1, 2): 1e9, (3, 0): 9e9}
    assert [*slow_links(speeds, names)] == [
        "nodes n1 and n2 exchange 1 GB/s, where other nodes send 10 GB/s, and all will wait for it"
    ]
    assert not [*slow_links({(0, 1): 1e6}, {0: "a", 1: "b"})]
