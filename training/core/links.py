"""Bandwidth test between nodes when their ranks join: it names a bad cable or card before that costs a day."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import distributed

from infra.launch.heartbeat import TRIAL, Heartbeat
from infra.launch.node_files import MACHINE
from training.core import ranks

_BYTES = 8 * 2**20
_TRIES = 3
"""Attempts, of which the fastest counts: other traffic can only slow one down."""
_SLOW = 4.0
"""Links of one cluster are alike: one that is slower than the best by this factor is faulty, not just longer."""

Link = tuple[int, int]
"""Two nodes, by their numbers."""


def try_links(device: torch.device, say: Callable[[str, str], None]) -> None:
    """Exchange some megabytes between neighbouring nodes of a training, with all ranks of a node at once.

    Every rank must call. The watchdog detects a rank that gets no answer, as in training.

    Args:
        say: receives the measurements (`network`) and nodes far slower than others (`slow_link`), on the first
            rank.
    """
    nodes = ranks.world_size() // ranks.local_world_size()
    if nodes == 1:
        return
    heart = Heartbeat(ranks.rank())
    own_speeds = {link: speed for links in rounds(nodes) for link, speed in _exchange(links, device, heart)}
    machine = os.environ.get(MACHINE) or socket.gethostname()
    rows = ranks.gather((ranks.first_of_node() // ranks.local_world_size(), machine, own_speeds))
    heart.beat(0, "not watched")
    if not ranks.is_first():
        return
    names = {node: name for node, name, _ in rows}
    speeds: dict[Link, float] = {}
    for node, _, of_node in rows:
        # Both ends time an exchange; the speeds of the ranks of a node are summed.
        for link, speed in of_node.items():
            speeds[link] = speeds.get(link, 0.0) + (speed if node == link[0] else 0.0)
    say("network", f"each node sends its neighbour {_range(speeds)}, measured with {_BYTES // 2**20} MiB per rank")
    for message in slow_links(speeds, names):
        say("slow_link", message)


def rounds(nodes: int) -> list[list[Link]]:
    """Return the links of a ring of nodes, grouped so that the links of one list share no node."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    closing = [ring.pop()] if len(ring) % 2 and len(ring) > 1 else []
    return [links for links in (ring[::2], ring[1::2], closing) if links]


def slow_links(speeds: Mapping[Link, float], names: Mapping[int, str]) -> Iterator[str]:
    """Yield sentences on what is far slower than the best link: a node if all of its links are slow, else the two ends
    of a link. A single link cannot be judged."""
    best = max(speeds.values())
    slow = {link for link, speed in speeds.items() if speed * _SLOW < best}
    wait = f"where other nodes send {_shown(best)}, and all will wait for it"
    bad = [node for node in names if all(link in slow for link in speeds if node in link)]
    for node in bad:
        at = [speed for link, speed in speeds.items() if node in link]
        yield f"node {names[node]} exchanges {_shown(max(at))} with its neighbours, {wait}"
    for first, second in sorted(slow):
        if first not in bad and second not in bad:
            yield f"nodes {names[first]} and {names[second]} exchange {_shown(speeds[first, second])}, {wait}"


def _exchange(links: Sequence[Link], device: torch.device, heart: Heartbeat) -> Iterator[tuple[Link, float]]:
    """Measure the bytes/s from this rank to its counterpart on the node at the other end of one of the links."""
    size, node = ranks.local_world_size(), ranks.first_of_node() // ranks.local_world_size()
    own_link = next((link for link in links if node in link), None)
    sent = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    fastest = math.inf
    for number in range(1 + _TRIES):
        heart.beat(0, TRIAL)
        ranks.wait_for_all()
        if own_link is not None:
            peer = (own_link[1] if node == own_link[0] else own_link[0]) * size + ranks.local_rank()
            seconds = _swap(sent if number else sent[:1], peer)  # the first makes the connection
            fastest = min(fastest, seconds if number else math.inf)
        heart.beat(0, TRIAL)  # ranks that get no answer are those that lag behind
    if own_link is not None:
        yield own_link, _BYTES / fastest


def _swap(sent: torch.Tensor, peer: int) -> float:
    """Seconds for an exchange of `sent` with another rank."""
    got = torch.empty_like(sent)
    _settle(sent.device)
    started = time.perf_counter()
    send = distributed.P2POp(distributed.isend, sent, peer)
    receive = distributed.P2POp(distributed.irecv, got, peer)
    for work in distributed.batch_isend_irecv([send, receive]):
        work.wait()
    _settle(sent.device)
    return max(time.perf_counter() - started, 1e-9)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _range(speeds: Mapping[Link, float]) -> str:
    low, high = _shown(min(speeds.values())), _shown(max(speeds.values()))
    return low if low == high else f"{low} to {high}"


def _shown(speed: float) -> str:
    return f"{speed / 1e9:.2g} GB/s" if speed >= 1e8 else f"{speed / 1e6:.2g} MB/s"
