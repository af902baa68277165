"""Changes to a config's `launch:` for a stage that does not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from infra.launch.config import LaunchConfig
from training.config import TrainerConfig
from training.core.devices import DEVICES, Device
from training.planner.architecture import Architecture
from training.planner.stages import needs

_MOST_DEVICES = 1024


def launch_that_fits(
    config: TrainerConfig,
    arch: Architecture,
    length: int,
    launch: LaunchConfig,
    device: Device,
    scorers: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """Return changes to `launch:` that make a stage fit, in a user's notation: the smallest change on these devices,
    more nodes if there is none, and a larger device.

    Args:
        scorers: as in `needs`.
    """

    def holds(on: Device, **change: Any) -> bool:
        try:
            other = LaunchConfig.model_validate({**launch.model_dump(exclude_unset=True), **change})
        except ValidationError:
            return False
        return needs(config, arch, length, other, on, None, scorers).fits

    changes = []
    for change in [*_changes(launch), *_more_nodes(launch)]:
        if holds(device, **change):
            changes.append(", ".join(f"launch.{key}: {value}" for key, value in change.items()))
            break
    for other in sorted(DEVICES.values(), key=lambda device: device.memory):
        if other.memory > device.memory and holds(other, hardware=other.name):
            changes.append(f"launch.hardware: {other.name}")
            break
    return tuple(changes)


def _changes(launch: LaunchConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of few keys and then of more, in the order of their cost in time."""
    auto = {} if launch.microbatch == "auto" else {"microbatch": "auto"}
    spread = {} if launch.shards_weights or launch.ranks == 1 else {"sharding": "fsdp"}
    again = {} if launch.recompute == "full" else {"recompute": "full"}
    for change in (auto, auto | spread, auto | again, auto | spread | again):
        if change:
            yield change


def _more_nodes(launch: LaunchConfig) -> Iterator[dict[str, Any]]:
    settings = {"sharding": "fsdp", "recompute": "full", "microbatch": "auto"}
    change = {key: value for key, value in settings.items() if getattr(launch, key) != value}
    nodes = 2 * launch.nodes
    while nodes * launch.processes <= _MOST_DEVICES:
        yield {"nodes": nodes, **change}
        nodes *= 2
