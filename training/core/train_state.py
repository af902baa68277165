"""What a training loop works with, whichever backend runs it: batches, a model with a loss, and where training is.

Shapes: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from training.core.callbacks import Callbacks
    from training.distributed.expert_parallel import SharedExperts
    from training.distributed.pipeline_parallel import Pipeline

Batch = dict[str, Tensor]
"""Named tensors, each (B, …)."""


class EndOfTraining(Exception):
    """Raised by a data set, on every rank, where a training is to end before its planned length."""


class TokenCount(NamedTuple):
    """Tokens of a batch: all of them, and what a mean loss is the mean over, by which microbatches are weighted."""

    total: int
    labelled: int


@dataclass(frozen=True)
class Loader:
    """This rank's part of every batch.

    dataloader: its data set has `state_dict(samples, from_beginning)` and `load_state_dict`, by which a training
        continues within an epoch, and may have a `fingerprint` and give its `largest` examples. One that makes its
        data by itself may `write(folder)` them into a checkpoint, whose files it returns, and `read(folder)` them.
    """

    dataloader: DataLoader[Any]
    count_tokens: Callable[[Any], TokenCount]

    @property
    def fingerprint(self) -> str:
        """What names the data; empty where a data set makes its data itself."""
        return str(getattr(self.dataloader.dataset, "fingerprint", ""))

    def state_dict(self, samples: int) -> dict[str, Any]:
        """Where training is. samples: those of this epoch that all ranks together have trained on."""
        state: dict[str, Any] = self.dataloader.dataset.state_dict(samples, True)  # type: ignore[attr-defined]
        return state

    def write(self, folder: Path) -> list[Path]:
        """Leaves what cannot be made again in a checkpoint's folder, and returns the files."""
        write: Callable[[Path], list[Path]] = getattr(self.dataloader.dataset, "write", lambda folder: [])
        return write(folder)

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Has the next iteration begin at a place that `state_dict` gave. folder: of that checkpoint."""
        self.dataloader.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        read: Callable[[Path], None] = getattr(self.dataloader.dataset, "read", lambda folder: None)
        read(folder)


def count_examples(batch: Batch) -> int:
    """B."""
    return len(next(iter(batch.values())))


def split_batch(batch: Batch, size: int) -> Sequence[Batch]:
    """Microbatches of at most `size` examples."""
    parts = {name: value.split(size) for name, value in batch.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


class Trainable(nn.Module, ABC):
    """A network with its loss."""

    pipeline: Pipeline | None = None
    """Where ranks hold some of its layers each, by what it is trained: `forward` is of a whole network alone."""

    compiles_blocks = False
    """Whether each of its blocks is to be compiled by itself for the training, and what computes its loss: measuring
    stays uncompiled."""

    experts: SharedExperts | None = None
    """Where ranks hold a part of its experts each: `forward` and its backward pass are computed by all of them at once,
    and gradients of experts are joined after the last microbatch."""

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """What `loss` needs."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor | dict[str, Tensor]:
        """The mean loss over a batch's labelled tokens, from what `forward` gave; or several by their names, of which
        `total` is the one that is learnt by."""

    def learnt_from(self, batch: Batch) -> Batch:
        """What is computed with gradients of a batch as its loader gives it: all, unless a callback takes some out."""
        return batch

    def last_stack(self) -> nn.Module | None:
        """The module that gives the last hidden state; None where that is what `forward` gives."""
        return None


@dataclass(frozen=True)
class Clock:
    """How far a training is: what is done in all and in this epoch, over all ranks."""

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0

    def after_batch(self, samples: int, tokens: int) -> Clock:
        return Clock(
            self.epoch,
            self.batch + 1,
            self.sample + samples,
            self.token + tokens,
            self.batch_in_epoch + 1,
            self.sample_in_epoch + samples,
            self.token_in_epoch + tokens,
        )

    def after_epoch(self) -> Clock:
        return replace(self, epoch=self.epoch + 1, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0)

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Clock:
        """Of checkpoints of any version: earlier ones kept times too, which nobody read."""
        return cls(**{one.name: saved[one.name] for one in fields(cls)})


@dataclass
class TrainState:
    """What callbacks see of a training, and may change where it says so.

    model: without what a backend wraps around it.
    device: what it computes on; offloaded weights lie elsewhere.
    seed: this rank's.
    batch: the whole one of this rank; between before_forward and before_backward the microbatch. May be replaced
        until batch_start is over. In a pipeline it is the whole one throughout.
    outputs, loss: of the last microbatch. The loss may be changed in place in before_backward. In a pipeline
        after_forward comes once a batch, and outputs are of all of it, None on ranks that do not compute the last
        layers; before_backward comes to those that do.
    losses: of the last batch over all ranks, by name; `total` is the one that is learnt by.
    batch_tokens: of the last batch, over all ranks.
    """

    model: Trainable
    optimizer: torch.optim.Optimizer
    loader: Loader
    callbacks: Callbacks
    device: torch.device
    seed: int
    clock: Clock = Clock()
    batch: Any = None
    outputs: Any = None
    loss: Tensor | dict[str, Tensor] | None = None
    losses: dict[str, float] = field(default_factory=dict)
    batch_tokens: int = 0
