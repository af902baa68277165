"""Examples in memory, for tuning: a resumable data set in a seeded order, and its loader.

No loader draws from the global random state, so that reading data never changes what dropout or sampling draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from training.core import ranks
from training.core.train_state import Batch, Loader, TokenCount
from training.model.loss import count_tokens

E = TypeVar("E")
# Number of batches whose examples are sorted by length: 92 % of the computed tokens are then not padding, 64 % without
# sorting (pairs of the quickstart, batches of 32).
_SORTED_BATCHES = 16


class Examples(IterableDataset[E]):
    """Examples in memory, in an order that depends only on seed and epoch, distributed round-robin over ranks.

    batch_size: over all ranks.
    lengths: lengths of the examples, to group those of similar length in a batch.
    text: further examples: `text_per_batch` in every batch, all of them in an epoch.
    """

    def __init__(
        self,
        examples: Sequence[E],
        seed: int,
        batch_size: int,
        lengths: Sequence[int] | None = None,
        text: Sequence[E] = (),
        text_per_batch: int = 0,
    ) -> None:
        self.examples = [*examples, *text]
        self.fingerprint = xxhash.xxh3_128("\n".join(map(repr, self.examples)).encode()).hexdigest()
        self._seed = seed
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._own, self._own_per_batch = len(examples), batch_size - text_per_batch
        self._text_per_batch = text_per_batch
        self._epoch = 0
        self._skip = 0

    def __iter__(self) -> Iterator[E]:
        random = np.random.default_rng([self._seed, self._epoch])
        order = random.permutation(self._own)
        if self._lengths is not None:
            order = by_length(order, self._lengths, self._own_per_batch, random)
        if self._text_per_batch:
            text = self._own + random.permutation(len(self.examples) - self._own)
            batches = len(text) // self._text_per_batch
            own = order[: batches * self._own_per_batch].reshape(batches, -1)
            order = np.concatenate([own, text.reshape(batches, -1)], 1).ravel()
        skip, self._skip = self._skip, 0
        self._epoch += 1
        for number in order[skip + ranks.data_rank() :: ranks.data_ranks()]:
            yield self.examples[number]

    def largest(self, count: int) -> list[E]:
        """Return the `count` longest examples."""
        return sorted(self.examples, key=lambda example: len(repr(example)), reverse=True)[:count]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        """Position of the training: samples read since the beginning of the epoch."""
        return {"epoch": max(0, self._epoch - 1), "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._skip = state["epoch"], state["sample_in_epoch"]


def by_length(
    order: NDArray[np.int64], lengths: NDArray[np.int64], batch_size: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Rearrange `order` so that each batch has examples of similar length: the examples of every 16 batches are sorted
    by length, and these batches are shuffled. The remainder after the last whole batch stays at the end."""
    grouped = []
    whole = len(order) // batch_size * batch_size
    for start in range(0, whole, _SORTED_BATCHES * batch_size):
        some = order[start : min(start + _SORTED_BATCHES * batch_size, whole)]
        some = some[np.argsort(lengths[some], kind="stable")]
        grouped.append(random.permutation(some.reshape(-1, batch_size)).ravel())
    return np.concatenate([*grouped, order[whole:]])


def example_loader(
    examples: Sequence[E],
    batch_size: int,
    seed: int,
    collate: Callable[[list[E]], Batch],
    count: Callable[[Any], TokenCount] | None = None,
    lengths: Sequence[int] | None = None,
    text: Sequence[E] = (),
    text_per_batch: int = 0,
) -> tuple[Loader, int]:
    """Return a loader of shuffled batches, and the number of batches per epoch; a last, smaller batch is left out.

    count: total and loss-bearing tokens of a batch; by default those of its labels.
    lengths: lengths of the examples, to form batches of examples of similar length; see `by_length`.
    text: further examples, `text_per_batch` for each batch of an epoch; see `training.train_modules.mixed_text`.
    """
    batch_size = min(batch_size, len(examples) + text_per_batch)
    loader: DataLoader[E] = DataLoader(
        Examples(examples, seed, batch_size, lengths, text, text_per_batch),
        ranks.per_rank_batch(batch_size),
        collate_fn=collate,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    return Loader(loader, count or count_tokens), len(examples) // (batch_size - text_per_batch)
