"""Interfaces of a model that ranks share, as a training uses it: the parts of a pipeline, and of a mixture of experts.

`training.distributed` implements both. They are described here, below it, because a model in training names them.

Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Batch = dict[str, Tensor]
"""Named tensors, each (B, …)."""


class PipelineParts(Protocol):
    """This rank's layers of a model whose layers are on several ranks. Every rank must call each method."""

    def train(
        self, batch: Batch, size: int, loss_of: Callable[[Any, Tensor], Tensor], started: Callable[[], None]
    ) -> tuple[Any, Batch]:
        """Accumulate the gradients of a batch over its microbatches of `size` sequences; return the last outputs, None
        on ranks that do not compute them, and the batch of these outputs."""

    def measure(self, batch: Batch) -> Tensor | None:
        """Return the last hidden states (B, T, D), None on ranks that do not compute them."""

    def from_last(self, outputs: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast the last rank's result to all ranks, with the shape of `like`."""

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their norm is at most `limit`; return the norm before."""


class ExpertParts(Protocol):
    """This rank's experts of a mixture whose experts are on several ranks. Every rank must call each method."""

    weights: list[Tensor]
    copies: DeviceMesh

    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the experts' weights in a model."""

    def join_gradients(self) -> None:
        """Average the gradients of the experts over the ranks that hold the same ones."""

    def clip(self, model: nn.Module, limit: float) -> float:
        """Scale all gradients so that their norm is at most `limit`; return the norm before."""
