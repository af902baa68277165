"""The shards of an artifact, open for the ranks that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from corpus.tokens.chat_template import END_OF_TEXT
from infra.errors import stage_error
from infra.run import Run
from training.core import ranks
from training.data.node_storage import node_storage
from training.data.packed_batches import batches_of
from training.data.packed_shards import PackedShards
from training.data.shard_index import Split, read_meta
from training.model.documents import Packed


class OpenShards:
    """The shards of an artifact: their facts from the beginning, their sequences within a `with` block.

    The block owns what reading needs on this node, and removes it: a scratch folder for compressed shards that are
    unpacked and remote ones that are fetched, and streaming's shared memory. Every rank must enter it.

    meta: content of meta.json. length: tokens of a sequence.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        """Read the facts. Raises StageError `no_shards` or `bad_shards`."""
        self.folder = folder
        self.meta: Mapping[str, Any] = read_meta(folder)
        self.length = int(self.meta["sequence_length"])
        self.limit_gb = run.launch.shard_cache_gb
        self._run = run

    @cached_property
    def train(self) -> Split:
        return Split.read(self.folder / "train")

    @cached_property
    def validation(self) -> Split:
        return Split.read(self.folder / "validation")

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    def check_tokenizer(
        self,
        tokenizer: Any,
        path: str = "pretrain.inputs.tokenizer",
        fix: str = "name the tokenizer that the shards were made with",
    ) -> None:
        """Raise StageError `other_tokenizer` for shards made with another tokenizer, as far as their numbers reveal it.
        path: the key that names one of the two."""
        end = self.meta.get("end_of_text", END_OF_TEXT)
        given = max(tokenizer.get_vocab().values()) + 1, tokenizer.get_vocab().get(end)
        expected = self.meta["vocab_size"], self.meta["end_of_text_id"]
        if given != expected:
            raise stage_error(
                "other_tokenizer",
                path,
                f"expected the tokenizer of the shards: {expected[0]:,} ids with {end} at {expected[1]}, this one has "
                f"{given[0]:,} with it at {given[1]}",
                fix,
            )

    def __enter__(self) -> Self:
        self._storage = ExitStack()
        self.cache = self._storage.enter_context(node_storage(self._run, self._unpacked_bytes()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._storage.__exit__(kind, error, traceback)

    def in_order(self, split: Split) -> PackedShards:
        """The sequences of a split, of which each rank reads what it wants by number; every rank must call."""
        return PackedShards(split, self.cache, batch_size=ranks.data_ranks(), seed=0, limit_gb=self.limit_gb)

    def read(self, split: Split, numbers: Sequence[int] | NDArray[np.int64], *, with_sources: bool = False) -> Packed:
        """The sequences of these numbers, in memory; every rank must call."""
        return next(batches_of(self.in_order(split), numbers, len(numbers), with_sources=with_sources))

    def _unpacked_bytes(self) -> int:
        """Bytes on disk of the shards of both splits when fetched or unpacked, at most twice the limit for remote ones;
        0 for uncompressed local shards, which are read in place."""
        splits = [self.train, *([self.validation] if (self.folder / "validation" / "index.json").exists() else [])]
        needed = sum(
            int(shard["raw_data"]["bytes"])
            for split in splits
            for shard in split.shards
            if shard["compression"] or split.location
        )
        is_remote = any(split.location for split in splits)
        return min(needed, int(2 * self.limit_gb * 1e9)) if is_remote and self.limit_gb else needed


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """The numbers of at most `limit` of `count` sequences, at equal distances from the first on, so that no part of the
    text is left out."""
    wanted = min(limit, count)
    return np.arange(wanted) * count // wanted
