"""Collectives under the α-β model: a start-up time for each message, and bytes over bandwidth (Hockney 1994; Thakur et
al. 2005 for rings).

`inner` of a group: how many devices next to each other belong to other members' places, so that a group of n with
`inner` m spans n·m devices. Groups that fit a node use its link, others the network, where the devices of a node that
belong to one group share what the whole node sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.core.devices import Device


@dataclass(frozen=True)
class Network:
    """link, network: bytes/s that a device sends within its node and to other nodes. node: devices of a node.

    start_s, far_start_s: seconds before the first byte arrives: NCCL's rings take some 5 µs a hop in a node and 15 µs
    between nodes. reached: share of the bandwidth that long messages reach (NCCL's tests: 0.8 and more).
    pod, pod_network: devices that the fast network joins, and bytes/s of one between pods; 0: all are one pod.
    straggle: share of the time lost for each doubling of the nodes, while all wait for the slowest: fitted to
    llm-foundry's 1B, 56.2 % on 8 and 54.4 % on 128 A100.
    """

    link: float
    network: float
    node: int
    start_s: float = 5e-6
    far_start_s: float = 15e-6
    reached: float = 0.8
    pod: int = 0
    pod_network: float = 0.0
    straggle: float = 0.004

    def _within(self, span: int) -> bool:
        return span <= self.node

    def _far(self, span: int) -> float:
        """Return the bytes/s from one device to others, in a group that spans `span` devices."""
        return self.network if not self.pod or span <= self.pod else self.pod_network

    def _speed(self, members: int, inner: int) -> tuple[float, float]:
        """Return the bytes/s of a ring of `members`, and the seconds per hop."""
        span = members * inner
        if self._within(span):
            return self.link * self.reached, self.start_s
        # In a ring through several nodes, members in the same node share the bandwidth of its network cards, and a node
        # has as many cards as devices.
        links = max(1, min(members, self.node // inner))
        return min(self.link, self._far(span) * links) * self.reached, self.far_start_s

    def all_gather(self, size: float, members: int, inner: int) -> float:
        """Seconds until everyone of a group has all `size` bytes, of which each had its part; or to sum and scatter."""
        if members < 2:
            return 0.0
        speed, start = self._speed(members, inner)
        # Large groups go over trees or in two levels, whose start-ups grow with the logarithm.
        hops = min(members - 1, 8 * math.log2(members))
        return size * (members - 1) / members / speed + hops * start

    def all_reduce(self, size: float, members: int, inner: int) -> float:
        """Seconds to sum `size` bytes over a group, to everyone: twice an all-gather."""
        return 2 * self.all_gather(size, members, inner)

    def all_to_all(self, size: float, members: int, inner: int) -> float:
        """Seconds in which each member sends `size` bytes, in equal parts to all."""
        if members < 2:
            return 0.0
        span = members * inner
        far = not self._within(span)
        speed = (self._far(span) if far else self.link) * self.reached
        return size * (members - 1) / members / speed + (self.far_start_s if far else self.start_s)

    def send(self, size: float, apart: int, span: int) -> float:
        """Seconds to send `size` bytes to the device `apart` devices away, on the slowest link of a chain over `span`
        devices."""
        if apart < self.node:
            return size / (self.link * self.reached) + self.start_s
        return size / (self._far(span) * self.reached) + self.far_start_s

    def straggling(self, devices: int) -> float:
        """Share of time that `devices` devices lose by waiting for each other."""
        return self.straggle * math.log2(max(1.0, devices / self.node))


def network_of(
    device: Device, gbit: float | None = None, pod: int | None = None, pod_gbit: float | None = None
) -> Network:
    """Return the network of a kind of device.

    Args:
        device: the kind of device.
        gbit: Gbit/s that a node sends to others, in place of the device's own.
        pod: devices that this network joins.
        pod_gbit: Gbit/s that a node sends to other pods.
    """

    def of_one(gigabits: float) -> float:
        return gigabits * 1e9 / 8 / device.node

    network = device.network if gbit is None else of_one(gbit)
    return Network(device.link, network, device.node, pod=pod or 0, pod_network=of_one(pod_gbit or 0.0))
