"""Durations of training steps on this machine, from their last builds here.

An estimate from sizes assumes sequences of full length, and a CPU whose speed one matrix product gives. What the same
step took here is nearer to the truth, scaled by the plans for the settings then and now.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from statistics import median

from pydantic import ValidationError

from infra.store.manifest import Manifest
from infra.store.store import Store
from tasks.stage import Node
from training.config import PretrainConfig, TrainerConfig
from training.planner.stages import StageNeeds

MOST = 5
"""Number of builds that count, the newest ones."""
SPREAD = 1.25
"""Factor between the fastest or slowest of them and the bounds of the estimate: what else runs is never the same."""


def from_past_runs(
    needs: StageNeeds, node: Node, store: Store, plan: Callable[[TrainerConfig], StageNeeds]
) -> StageNeeds:
    """Return the needs with the time that the step took here, if it was ever built on this machine.

    Args:
        needs: by sizes.
        node: the step.
        store: where its builds are.
        plan: the needs of the same step with other settings.
    """
    hours = list(islice(_hours(needs, node, store, plan), MOST))
    if not hours:
        return needs
    middle = median(hours)
    cost = needs.cost_usd and needs.hours and needs.cost_usd * middle / needs.hours
    return replace(
        needs,
        hours=middle,
        hours_low=min(hours) / SPREAD,
        hours_high=max(hours) * SPREAD,
        cost_usd=cost if needs.hours else needs.cost_usd,
        builds_here=len(hours),
    )


def _hours(needs: StageNeeds, node: Node, store: Store, plan: Callable[[TrainerConfig], StageNeeds]) -> Iterator[float]:
    """Yield what each build of the step on this machine would take with the present settings, newest first."""
    assert isinstance(node.config, TrainerConfig)
    if node.folder not in store.stages():
        return
    builds = [manifest for _, manifest in store.manifests(node.folder) if _is_of(manifest, node)]
    for manifest in sorted(builds, key=lambda manifest: manifest.age_key, reverse=True):
        try:
            config = type(node.config).model_validate(manifest.config)
        except ValidationError:
            continue  # of an earlier version
        if isinstance(node.config, PretrainConfig) and config.model != node.config.model:  # type: ignore[attr-defined]
            continue
        then, seconds = plan(config).hours, manifest.seconds / 3600
        if then and needs.hours:
            yield seconds * needs.hours / then
        elif getattr(config, "duration", None) == getattr(node.config, "duration", None):
            yield seconds


def _is_of(manifest: Manifest, node: Node) -> bool:
    return (
        manifest.step == node.id
        and manifest.host == socket.gethostname()
        and manifest.adopted is None
        and manifest.seconds > 0
    )
