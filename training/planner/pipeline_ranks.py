"""Parts of the model on each rank of a pipeline, and its number of microbatches that wait for their backward pass.

Letters: p ranks, v pieces of the model on each, m microbatches of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from training.config.parallelism import layers_of
from training.planner.architecture import Architecture


@dataclass(frozen=True)
class Part:
    """Part of a model on one rank.

    layers: of all its pieces, `piece` of them each in the mean. first, last: whether it has the embedding, and the
    output layer with the loss. fullest: moments at which a backward pass begins, as (share of the rank's gradients that
    earlier ones have left, pieces that microbatches have passed and whose backward pass is still to come, with that
    one); every other moment has less of one and no more of the other.
    """

    layers: int
    piece: float
    first: bool
    last: bool
    fullest: tuple[tuple[float, float], ...]


@lru_cache(maxsize=4096)
def part_of(layers: int, ranks: int, pieces: int, rank: int, count: float) -> Part:
    """Return the part of a model that a rank of a pipeline holds, and its microbatches under way.

    Args:
        layers: number of layers of the complete model.
        ranks: ranks of the pipeline.
        pieces: pieces of the model on each rank (interleaved schedules have several).
        rank: number of the rank.
        count: number of microbatches, of which the last may be a part.
    """
    total = ranks * pieces
    held = sum(len(layers_of(stage, total, layers)) for stage in range(rank, total, ranks))
    return Part(held, held / pieces, rank == 0, rank == ranks - 1, _fullest(ranks, pieces, rank, math.ceil(count)))


def weights_outside(arch: Architecture, part: Part) -> float:
    """Parameters of the part outside of the layers: the embedding in the first part, the output layer in the last one;
    both parts have a copy even if the two are tied."""
    outside, positions = arch.parameters - arch.layers * arch.layer_weights, arch.learned_positions * arch.width
    if part.first and part.last:
        return outside
    if part.first:
        return arch.embedding + positions
    return outside - positions - (0 if arch.tied else arch.embedding) if part.last else 0.0


def _fullest(ranks: int, pieces: int, rank: int, count: int) -> tuple[tuple[float, float], ...]:
    """By the schedules 1F1B and interleaved 1F1B, as torch.distributed.pipelining has them (Narayanan et al. 2021,
    section 2.2)."""
    passes = count * pieces
    # Forward passes before the first that a backward pass follows at once.
    ahead = (ranks - 1 - rank) * (2 if pieces > 1 else 1) + (pieces - 1) * ranks
    most = min(ahead + 1, passes)
    # Backward passes after which no forward pass is left; before the last of them as much waits as ever.
    steady = passes - most
    states = []
    for started in range(pieces + 1):
        # A piece begins to leave gradients when all p microbatches of a round have passed back through the one above.
        done = max(steady, (started - 1) * ranks + 1 if started else 0)
        if done < passes and (started == pieces or done <= started * ranks):
            states.append((started / pieces, float(most - (done - steady))))
    return tuple(states)
