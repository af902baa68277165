"""State of a training loop, independent of the backend: batches, a model with a loss, and the training's position.

Shapes: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from training.core.parallel_parts import Batch, ExpertParts, PipelineParts


class EndOfTraining(Exception):
    """Raised by a data set, on every rank, to end a training before its planned length."""


class TokenCount(NamedTuple):
    """Tokens of a batch: all of them, and those that a mean loss averages over, by which microbatches are weighted."""

    total: int
    labelled: int


@dataclass(frozen=True)
class Loader:
    """This rank's part of every batch.

    dataloader: its data set has `state_dict(samples, from_beginning)` and `load_state_dict`, with which a training
        continues within an epoch, and may have a `fingerprint` and return its `largest` examples. A data set that
        generates its data may `write(folder)` them into a checkpoint, returning the files, and `read(folder)` them.
    """

    dataloader: DataLoader[Any]
    count_tokens: Callable[[Any], TokenCount]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data; empty if a data set generates its data."""
        return str(getattr(self.dataloader.dataset, "fingerprint", ""))

    def state_dict(self, samples: int) -> dict[str, Any]:
        """Position in the data.

        Args:
            samples: number of this epoch's samples that all ranks together have trained on.
        """
        state: dict[str, Any] = self.dataloader.dataset.state_dict(samples, True)  # type: ignore[attr-defined]
        return state

    def write(self, folder: Path) -> list[Path]:
        """Write data that cannot be generated again to a checkpoint's folder; return the files."""
        write: Callable[[Path], list[Path]] = getattr(self.dataloader.dataset, "write", lambda folder: [])
        return write(folder)

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Start the next iteration at a position from `state_dict`.

        Args:
            folder: folder of that checkpoint.
        """
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

    pipeline: PipelineParts | None = None
    """The pipeline that trains the model if ranks hold some layers each: `forward` needs the whole network."""

    compiles_blocks = False
    """True to compile each block separately for training, and the computation of the loss; evaluation stays
    uncompiled."""

    experts: ExpertParts | None = None
    """The shared experts if ranks hold a part of them each: all ranks compute `forward` and its backward pass at the
    same time, and gradients of experts are combined after the last microbatch."""

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute the inputs of `loss`."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor | dict[str, Tensor]:
        """Mean loss over a batch's labelled tokens, from the result of `forward`; or several losses by name, of which
        `total` is minimized."""

    def learnt_from(self, batch: Batch) -> Batch:
        """Part of a batch from the loader that is computed with gradients: all, unless a callback removes some."""
        return batch

    def last_stack(self) -> nn.Module | None:
        """The module that returns the last hidden state; None if `forward` returns it."""
        return None


@dataclass(frozen=True)
class Clock:
    """Progress of a training in total and within this epoch, over all ranks."""

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
        """Read the clock of a checkpoint of any version; the unused times of earlier versions are ignored."""
        return cls(**{field.name: saved[field.name] for field in fields(cls)})


class CallbackList(Protocol):
    """The callbacks of a training, see `training.core.callbacks`."""

    def __iter__(self) -> Iterator[Any]: ...

    def run_event(self, event: Any, state: TrainState) -> None:
        """Call those that listen to an event."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it."""


@dataclass
class TrainState:
    """State of a training that callbacks can read, and change where noted.

    model: the model without a backend's wrapper.
    device: device of the computation; offloaded weights are elsewhere.
    seed: seed of this rank.
    batch: the whole batch of this rank; between before_forward and before_backward the microbatch. Callbacks may
        replace it until batch_start is over. In a pipeline it is always the whole batch.
    outputs, loss: outputs and loss of the last microbatch. The loss may be changed in place in before_backward. In a
        pipeline after_forward is called once per batch, and outputs are those of the whole batch, None on ranks that do
        not compute the last layers; before_backward is called only on ranks that do.
    losses: losses of the last batch over all ranks, by name; `total` is minimized.
    batch_tokens: tokens of the last batch, over all ranks.
    """

    model: Trainable
    optimizer: torch.optim.Optimizer
    loader: Loader
    callbacks: CallbackList
    device: torch.device
    seed: int
    clock: Clock = Clock()
    batch: Any = None
    outputs: Any = None
    loss: Tensor | dict[str, Tensor] | None = None
    losses: dict[str, float] = field(default_factory=dict)
    batch_tokens: int = 0
