"""The networks that sample answers while others are trained: where weights are sharded, a whole copy on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

from infra.run import Run
from training.core import ranks
from training.distributed.parallel import whole_weights
from training.rl.round import PolicyAndValue


def acting(model: PolicyAndValue, run: Run) -> tuple[PolicyAndValue, Callable[[], None]]:
    """Return the networks that sample and evaluate answers, and a function that updates them to the trained weights.

    These are the model's own. Where weights are sharded they are a whole copy on each rank: ranks sample different
    answers of different lengths, and sharded layers would have to be gathered for all of them in step.
    """
    if not run.launch.shards_weights or (ranks.world_size() == 1 and not run.launch.offload):
        return model, lambda: None
    copied = copy.deepcopy(model).requires_grad_(False)
    copied.scale = model.scale

    def refresh() -> None:
        for name, network in model.networks().items():
            copied.networks()[name].load_state_dict(whole_weights(network))

    return copied, refresh
