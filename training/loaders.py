"""Data loaders that remember where they are: packed shards for pretraining, examples in memory for the rest.

Both give Composer a dataset with `state_dict` and `load_state_dict`, by which it continues in the middle of an epoch.
No loader draws from the global random state, so that reading data never changes what dropout or sampling draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from composer.core import DataSpec
from numpy.typing import NDArray
from streaming import StreamingDataset
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from infra.errors import stage_error
from training.loss import IGNORE

Batch = dict[str, Tensor]
Tokens = NDArray[np.int64]
E = TypeVar("E")
_COLUMN = "tokens"


class PackedShards(StreamingDataset):
    """The MDS folder of one split; an item is one packed sequence (T,) of token ids."""

    def __init__(self, folder: Path, cache: Path, batch_size: int, seed: int, *, shuffle: bool) -> None:
        index = _index(folder)
        columns = index["shards"][0]["column_names"]
        if _COLUMN not in columns:
            raise stage_error(
                "bad_shards", str(folder), f"expected a column {_COLUMN!r}, found {columns}", "shard again"
            )
        # Compressed shards are unpacked beside their source, and an artifact is never written to.
        compressed = any(shard["compression"] for shard in index["shards"])
        super().__init__(
            local=str(cache / folder.name) if compressed else str(folder),
            remote=str(folder) if compressed else None,
            shuffle=shuffle,
            shuffle_seed=seed,
            batch_size=batch_size,
            num_canonical_nodes=1,
        )

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        return item[_COLUMN].astype(np.int64) if isinstance(item, dict) else item


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    if not path.exists():
        raise stage_error("no_shards", str(folder), "expected an MDS folder with index.json", "run the shard stage")
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    if not index["shards"] or not sum(shard["samples"] for shard in index["shards"]):
        raise stage_error(
            "no_shards", str(folder), "expected at least one sequence, found none", "give shard more text"
        )
    return index


def count_sequences(folder: Path) -> int:
    """Packed sequences in an MDS folder."""
    return sum(shard["samples"] for shard in _index(folder)["shards"])


def read_tokens(folder: Path, cache: Path, limit: int | None = None) -> Tokens:
    """The first `limit` sequences (or all) of an MDS folder in order, as (sequences, T)."""
    count = count_sequences(folder)
    shards = PackedShards(folder, cache, batch_size=1, seed=0, shuffle=False)
    return np.stack([shards[number] for number in range(count if limit is None else min(limit, count))])


def next_token_batch(sequences: Sequence[Tokens] | Tokens) -> Batch:
    """Sequences (B, T) as a batch: each position's label is the token after it, the last one's -100."""
    tokens = torch.from_numpy(np.stack(list(sequences)))
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    return {"input_ids": tokens, "labels": labels}


def packed_loader(shards: PackedShards, batch_size: int) -> DataSpec:
    """Batches of packed sequences; the rest of an epoch that fills no batch is left out."""
    loader: DataLoader[Any] = DataLoader(
        shards, batch_size, collate_fn=next_token_batch, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    return DataSpec(loader, get_num_tokens_in_batch=count_tokens)


class Examples(IterableDataset[E]):
    """Examples in memory, in an order that only seed and epoch decide."""

    def __init__(self, examples: Sequence[E], seed: int) -> None:
        self.examples = examples
        self._seed = seed
        self._epoch = 0
        self._skip = 0

    def __iter__(self) -> Iterator[E]:
        order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self.examples))
        skip, self._skip = self._skip, 0
        self._epoch += 1
        for number in order[skip:]:
            yield self.examples[number]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        """Where Composer is, in its own terms: samples read since the beginning of the epoch."""
        return {"epoch": self._epoch - 1, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._skip = state["epoch"], state["sample_in_epoch"]


def example_loader(
    examples: Sequence[E],
    batch_size: int,
    seed: int,
    collate: Callable[[list[E]], Batch],
    count: Callable[[Any], dict[str, int]] | None = None,
) -> tuple[DataSpec, int]:
    """Shuffled batches of examples, and how many make an epoch; a last, smaller batch is left out.

    count: total and loss-bearing tokens of a batch; by default those of its labels.
    """
    batch_size = min(batch_size, len(examples))
    loader: DataLoader[E] = DataLoader(
        Examples(examples, seed),
        batch_size,
        collate_fn=collate,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    return DataSpec(loader, get_num_tokens_in_batch=count or count_tokens), len(examples) // batch_size


def count_tokens(batch: Any) -> dict[str, int]:
    """Tokens of a batch for Composer: all of them, and those that bear loss (by which it weights microbatches)."""
    labels = batch["labels"]
    return {"total": labels.numel(), "loss_generating": int((labels != IGNORE).sum())}
