"""Packed sequences of one side of the shards: in the order that a training reads them, or by their numbers.

A data set has `state_dict` and `load_state_dict`, by which a training continues in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from infra.errors import StageError, stage_error
from training.core import ranks
from training.data.mixture import SHUFFLE_BLOCK, Mixture, files_of
from training.data.remote_shards import (
    SHARD_NOT_HERE,
    RemoteStream,
    bytes_in_use,
    cache_bytes,
    note_failure,
    noted_failure,
    read_ahead,
)
from training.data.shard_index import Split, damaged_sequence, read_meta
from training.model.documents import Starts

_COLUMN = "tokens"
_STARTS = "starts"
_SOURCES = "sources"
_ONE_DOCUMENT = np.zeros(1, np.int64)


class PackedShards(StreamingDataset):
    """The sequences of one split; an item is one packed sequence (T,) of token ids, where its documents begin, and its
    epoch and number.

    text_fingerprint: identifies the split. fingerprint: identifies the sequences that a training reads and their order,
    of a mixture together with the state of the data set.

    Args:
        cache: folder for unpacked compressed shards and fetched remote ones, used only by this node; see
            `training.data.node_storage`.
        batch_size: sequences per batch over all ranks. The remainder of an epoch after its last whole batch is left
            out; each epoch leaves out different sequences if the data are shuffled.
        shuffle: read them in a shuffled order, in blocks of `shuffle_block` sequences.
        mixture: read them in its order, with an epoch of whole batches. Without either they are read one after the
            other, or by their numbers.
        read_at_once: sequences that a loader requests at once over all ranks, if this is not a whole batch.
        limit_gb: limit for remote shards in `cache`; None for no limit.
    """

    def __init__(
        self,
        split: Split,
        cache: Path,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = False,
        mixture: Mixture | None = None,
        read_at_once: int | None = None,
        limit_gb: float | None = None,
        shuffle_block: int = SHUFFLE_BLOCK,
    ) -> None:
        columns = split.shards[0]["column_names"]
        if _COLUMN not in columns:
            raise stage_error(
                "bad_shards", str(split.folder), f"expected a column {_COLUMN!r}, found {columns}", "shard again"
            )
        # Where the files are read: in place, or from the cache, to which streaming fetches or unpacks them on demand.
        # An artifact is never written to.
        options: dict[str, Any] = {"local": str(split.folder)}
        self._folder = split.folder
        is_whole = (split.folder.parent / "meta.json").exists()
        self._vocab_size = int(read_meta(split.folder.parent)["vocab_size"]) if is_whole else None
        self._cache: Path | None = None
        if split.location:
            # A training's cache is apart from that of what is read in order, which may be open at the same time.
            is_trained = shuffle or mixture is not None
            self._cache = cache / (split.folder.name if is_trained else f"{split.folder.name}-in-order")
            sources = files_of(mixture.pools, split) if mixture else [split.shards]
            needed = bytes_in_use(sources, mixture.shuffle_block if mixture else shuffle_block) if is_trained else 0
            limit = cache_bytes(split, limit_gb, needed)
            options = {
                "streams": [RemoteStream(split, self._cache)],
                "cache_limit": limit and limit + (split.folder / "index.json").stat().st_size,
                "predownload": read_ahead(split, batch_size, limit, needed) // ranks.data_ranks(),
            }
        elif any(shard["compression"] for shard in split.shards):
            self._cache = cache / split.folder.name
            options = {"local": str(self._cache), "remote": str(split.folder)}
        self._notes = self._cache or cache
        super().__init__(
            **options,
            shuffle=shuffle,
            shuffle_seed=seed,
            batch_size=ranks.per_rank_batch(read_at_once or batch_size),
            # Whole batches, and one canonical node: the same samples in the same batches on any number of ranks.
            epoch_size=split.sequences // batch_size * batch_size if shuffle else None,
            num_canonical_nodes=1,
            # Ranks that share layers or sequences get the same ones.
            replication=ranks.group_size() if ranks.group_size() > 1 else None,
            # Given here: left to streaming, it is unknown until the first epoch is read.
            shuffle_block_size=shuffle_block,
        )
        self.mixture = mixture
        if mixture:
            self.epoch_size = mixture.epoch
            self.length = ceil(mixture.epoch / ranks.data_ranks())
        self.text_fingerprint = split.fingerprint
        self.fingerprint = fingerprint_of(split, mixed=mixture is not None)
        self._continued = (0, 0)

    # The order of reading.

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return an epoch's sequences to streaming, which distributes them among ranks and workers."""
        if self.mixture is None:
            numbers: tuple[NDArray[np.int64], NDArray[np.int64]] = super().resample_streams(epoch, stream_id)
            return numbers
        return np.array([self.mixture.epoch]), self.mixture.order(epoch, self.shuffle_seed)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The numbers of an epoch's sequences, as all ranks together read them, batch after batch."""
        numbers: NDArray[np.int64] = generate_work(self.batching_method, self, World(1, 1, 1, 0), epoch, 0).ravel()
        return numbers[numbers >= 0]

    # Reading.

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return the columns of a sequence by its number.

        Raises StageError `bad_shards` for damaged bytes, which is also recorded for the training process.
        """
        try:
            item = super().get_item(sample_id, retry)
        except (ValueError, LookupError, TypeError):  # of damaged offsets and shapes of arrays
            raise note_failure(self._notes, damaged_sequence(self._folder, sample_id)) from None
        if self._vocab_size and item[_COLUMN].max(initial=0) >= self._vocab_size:
            raise note_failure(self._notes, damaged_sequence(self._folder, sample_id))
        return item

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        if not isinstance(item, dict):
            return item
        place = max(0, self.next_epoch - 1), int(at)
        return item[_COLUMN].astype(np.int64), item.get(_STARTS, _ONE_DOCUMENT).astype(np.int64), place

    def sources(self, number: int) -> Starts:
        """The source of each document of a sequence, by its number in meta.json; 0 in shards that know none."""
        item = super().__getitem__(number)
        return np.asarray(item.get(_SOURCES, np.zeros(len(item.get(_STARTS, _ONE_DOCUMENT)))), np.int64)

    def largest(self, count: int) -> list[Any]:
        """Return `count` examples of maximum length; all packed sequences have the same length."""
        return [self[number % self.size] for number in range(count)]

    # The position of a training, from which it continues.

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Position of the training, also before the first epoch, which streaming counts as -1."""
        state = super().state_dict(num_samples, from_beginning)
        state = {**state, "epoch": max(0, state["epoch"])}
        if self.mixture:
            phases = self.mixture.until(_place(state, self.mixture))
            state["mixture"] = {"epoch": self.mixture.epoch, "phases": phases}
        return state

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Seek to a position in an epoch: streaming only seeks forward, and ignores an earlier epoch than its current
        one; only its workers take over the seed of the order.

        Raises StageError `other_mixture` if this mixture would have read different sequences before the position.
        """
        if self.mixture:
            _check_mixture(self.mixture, obj)
        super().load_state_dict({key: value for key, value in obj.items() if key != "mixture"})
        self.shuffle_seed = obj["shuffle_seed"]
        self.next_epoch = obj["epoch"]
        self._continued = obj["epoch"], obj["sample_in_epoch"]

    def position(self) -> tuple[int, int]:
        """The epoch that is read next, and how many of its sequences were read before; in the process that trains."""
        epoch, read = self._continued
        return self.next_epoch, read if epoch == self.next_epoch else 0

    # Failures, which streaming would lose in its threads.

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        # Streaming silently ends an epoch early if one of its threads failed.
        if self._event.is_set():
            raise RuntimeError("no further shards could be read")

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch or unpack a file. Raises StageError, which is also recorded for the training process."""
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            self._shard_states[shard_id] = SHARD_NOT_HERE  # else others wait for it for ever
            if self._cache is None:
                raise
            raise note_failure(self._cache, error) from error

    def on_exception(self, future: Any) -> None:
        """Set the event; streaming's method raises in a thread whose errors are lost."""
        if future.exception():
            self._event.set()

    def failure(self) -> StageError | None:
        """Error that stopped reading, in any process or thread."""
        return noted_failure(self._notes)


def fingerprint_of(split: Split, *, mixed: bool) -> str:
    """Fingerprint of a training split; the state of the data set identifies the mixture that it is read as."""
    return f"{split.fingerprint}:mixed" if mixed else split.fingerprint


def _check_mixture(mixture: Mixture, state: Mapping[str, Any]) -> None:
    place, was = _place(state, mixture), state["mixture"]
    same_epoch = was["epoch"] == mixture.epoch or state["epoch"] == 0
    if not same_epoch or was["phases"] != mixture.until(place):
        raise stage_error(
            "other_mixture",
            "pretrain.mixture",
            f"the training that it continues from read a different mixture up to there, from sequence {place:,}",
            "begin with its mixture and its global_batch_tokens, and write other weights as a phase that begins at "
            "that batch, in batches",
        )


def _place(state: Mapping[str, Any], mixture: Mixture) -> int:
    return int(state["epoch"]) * mixture.epoch + int(state["sample_in_epoch"])
