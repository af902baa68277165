"""Batches of packed sequences: the loader that makes them in a training, and the sequences that they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from training.config.batch_size import BatchSizeRampup
from training.core import ranks
from training.core.train_state import Batch, Loader, TokenCount
from training.data.packed_shards import PackedShards
from training.model.documents import Packed, Starts, Tokens


def packed_loader(
    shards: PackedShards,
    batch_size: int,
    batch: Callable[[Packed], Batch],
    count: Callable[[Any], TokenCount],
    *,
    workers: int = 0,
    pin_memory: bool = False,
    rampup: BatchSizeRampup | None = None,
) -> Loader:
    """Batches of packed sequences; the rest of an epoch that fills no batch is left out.

    batch: makes tensors of sequences, see training/objectives.
    count: total and loss-bearing tokens of such a batch.
    workers: processes that read ahead; the batches are the same for any number.
    rampup: of batches that are smaller at first; `shards` are then read `rampup.first` at once.
    """

    def collate(items: list[tuple[Tokens, Starts, tuple[int, int]]]) -> Batch:
        return batch(stacked(items))

    settings: dict[str, Any] = {
        "collate_fn": collate,
        "drop_last": True,
        # No loader draws from the global random state: reading data never changes what dropout or sampling draw.
        "generator": torch.Generator().manual_seed(0),
        "num_workers": workers,
        "pin_memory": pin_memory,
        # A spawned worker would import torch again, and `collate` cannot be pickled for it.
        "multiprocessing_context": "fork" if workers else None,
    }
    loader: DataLoader[Any]
    if rampup is None:
        loader = PackedBatches(shards, ranks.per_rank_batch(batch_size), **settings)
    else:
        loader = RampedBatches(shards, rampup, **settings)
    return Loader(loader, count)


class PackedBatches(DataLoader[Any]):
    """Raise the named error of a thread or worker that could not read."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert isinstance(self.dataset, PackedShards)
        try:
            yield from super().__iter__()
        except Exception as error:
            if failure := self.dataset.failure():
                raise failure from error
            raise


class RampedBatches(PackedBatches):
    """Join parts of `rampup.first` sequences to batches; their number depends only on the place in the epoch."""

    def __init__(self, shards: PackedShards, rampup: BatchSizeRampup, **settings: Any) -> None:
        super().__init__(shards, ranks.per_rank_batch(rampup.first), **settings)
        self._shards = shards
        self._rampup = rampup

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Before the workers start, which move the shards' epoch on.
        epoch, read = self._shards.position()
        parts = super().__iter__()
        while True:
            size = self._rampup.size(read) if epoch == 0 else self._rampup.full
            batch = list(islice(parts, size // self._rampup.first))
            if len(batch) * self._rampup.first < size:
                return
            yield {name: torch.cat([part[name] for part in batch]) for name in batch[0]}
            read += size


def trained_sequences(
    shards: PackedShards,
    batches: int,
    batch_size: int,
    rampup: BatchSizeRampup | None = None,
    skipped: Collection[int] = (),
    first: int = 0,
    place: tuple[int, int] = (0, 0),
) -> NDArray[np.bool_]:
    """Return a mask of the sequences of `shards` that a training reads in the batches from `first` to `batches` (not
    included).

    rampup: of batches that are smaller at first.
    skipped: batches that were passed over without an update.
    place: the epoch of batch `first`, and how many of its sequences were read before.
    """
    seen = np.zeros(shards.size, bool)
    epoch, read = place
    order = shards.order(epoch)
    for batch in range(first, batches):
        size = rampup.size(read) if rampup and epoch == 0 else batch_size
        if read + size > len(order):
            epoch, read, size = epoch + 1, 0, batch_size
            order = shards.order(epoch)
        if batch not in skipped:
            seen[order[read : read + size]] = True
        read += size
    return seen


def batches_of(
    shards: PackedShards, numbers: Sequence[int] | NDArray[np.int64], size: int, *, with_sources: bool = False
) -> Iterator[Packed]:
    """The sequences of these numbers, `size` at a time, outside of a training's order."""
    for begin in range(0, len(numbers), size):
        chosen = [int(number) for number in numbers[begin : begin + size]]
        packed = stacked([shards[number] for number in chosen])
        yield replace(packed, sources=tuple(map(shards.sources, chosen))) if with_sources else packed


def stacked(items: Sequence[tuple[Tokens, Starts, tuple[int, int]]]) -> Packed:
    """Items of PackedShards as one."""
    tokens, starts, draws = zip(*items, strict=True)
    return Packed(np.stack(tokens), starts, draws=draws)
