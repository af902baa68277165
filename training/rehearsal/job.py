"""The training that is rehearsed, and the records of each rank."""

from __future__ import annotations

from pydantic import Field

from infra.config import Config
from infra.launch.config import LaunchConfig
from training.config import ModelConfig, OptimizerConfig

MOST_RANKS = 1024
"""Ranks of a rehearsal: torch makes a group of ranks for each part of a mesh, whose number grows with them."""


class Rehearsal(Config):
    """A training that is set up without its devices."""

    model: ModelConfig
    vocabulary: int = Field(ge=1)
    """Rows of the embedding."""
    length: int = Field(ge=1)
    """Tokens of a sequence."""
    launch: LaunchConfig
    microbatch: int = Field(ge=1)
    """Sequences at once."""
    microbatches: int = Field(ge=1)
    """Microbatches of the step."""
    optimizer: OptimizerConfig = OptimizerConfig()
    gpu: bool = True
    """True for GPUs, whose chunks of logits are larger."""
    bf16: bool = True
    """True for bf16 autocast, else fp32."""

    @property
    def positions(self) -> list[int]:
        """Positions in a pipeline that hold different layers: the first, the last, and one between them."""
        last = self.launch.pipeline_parallel - 1
        return sorted({0, last // 2, last})

    def rank_at(self, position: int) -> int:
        """Rank at a position in the first pipeline."""
        return position * self.launch.tensor_parallel * self.launch.context_parallel


class Collective(Config):
    """Collectives of a kind along a dimension of the mesh over a link, in one step of a rank.

    dimension: tensor, context, pipeline or data, or several of them. link: `node` within a node, `network` between
    nodes.
    """

    kind: str
    dimension: str
    link: str
    sent_bytes: int
    calls: int


class RankRecord(Config):
    """Bytes of one rank in a step."""

    rank: int
    position: int
    weights: int
    """Bytes between the steps."""
    gradients: int
    """Bytes of complete gradients."""
    optimizer: int
    """Bytes of the optimizer's state."""
    most: int
    """Bytes of all tensors at the fullest moment."""
    collectives: tuple[Collective, ...]


def folded(microbatches: int, launch: LaunchConfig) -> int:
    """Number of microbatches that is rehearsed in place of a step's: as many as a pipeline has ranks, with which its
    first rank is as full as with more; two without a pipeline, the first of which begins with no gradients."""
    ranks = launch.pipeline_parallel
    return min(microbatches, ranks if ranks > 1 else 2)
