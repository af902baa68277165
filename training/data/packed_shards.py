"""Packed sequences in MDS shards: in the order that a training reads them, or by their numbers.

A data set has `state_dict` and `load_state_dict`, by which a training continues in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from corpus.tokens.remote import location_of
from corpus.tokens.trained import split_fingerprint
from infra.errors import StageError, stage_error
from training.config.batch_size import BatchSizeRampup
from training.core import ranks
from training.data.mixture import SHUFFLE_BLOCK
from training.data.remote_shards import SHARD_NOT_HERE, RemoteStream, cache_bytes, note_failure, noted_failure
from training.data.shard_index import read_index
from training.model.documents import Packed, Starts, Tokens

_COLUMN = "tokens"
_STARTS = "starts"
_SOURCES = "sources"
_ONE_DOCUMENT = np.zeros(1, np.int64)


class PackedShards(StreamingDataset):
    """The MDS folder of one split; an item is one packed sequence (T,) of token ids, where its documents begin, and its
    epoch and number.

    cache: folder for unpacked compressed shards and fetched remote ones, used only by this node; see
        `training.data.scratch`. limit_gb: limit for remote ones there; None for no limit.
    shuffle_block: size of the blocks of sequences that are shuffled.
    text_fingerprint: identifies the split. fingerprint: identifies the sequences that a training reads and their order.

    batch_size: sequences per batch over all ranks. The remainder of an epoch after its last whole batch is left out;
    each epoch leaves out different sequences if the data are shuffled.
    read_at_once: sequences that a loader requests at once over all ranks, if this is not a whole batch.
    """

    def __init__(
        self,
        folder: Path,
        cache: Path,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        read_at_once: int | None = None,
        limit_gb: float | None = None,
        shuffle_block: int = SHUFFLE_BLOCK,
        in_use: int | None = None,
    ) -> None:
        index = read_index(folder)
        columns = index["shards"][0]["column_names"]
        if _COLUMN not in columns:
            raise stage_error(
                "bad_shards", str(folder), f"expected a column {_COLUMN!r}, found {columns}", "shard again"
            )
        place: dict[str, Any] = {"local": str(folder)}
        # An artifact is never written to.
        self._cache: Path | None = None
        if location_of(folder):
            # Training's own apart from what is read in order, which may be open at the same time.
            self._cache = cache / (folder.name if in_use is not None or shuffle else f"{folder.name}-in-order")
            needed = bytes_in_use([index["shards"]], shuffle_block) if in_use is None and shuffle else in_use or 0
            limit = cache_bytes(folder, limit_gb, needed)
            place = {
                "streams": [RemoteStream(folder, self._cache)],
                "cache_limit": limit and limit + (folder / "index.json").stat().st_size,
                "predownload": read_ahead(index["shards"], batch_size, limit, needed) // ranks.data_ranks(),
            }
        elif any(shard["compression"] for shard in index["shards"]):
            self._cache = cache / folder.name
            place = {"local": str(self._cache), "remote": str(folder)}
        super().__init__(
            **place,
            shuffle=shuffle,
            shuffle_seed=seed,
            batch_size=ranks.per_rank_batch(read_at_once or batch_size),
            # Whole batches, and one canonical node: the same samples in the same batches on any number of ranks.
            epoch_size=count_sequences(folder) // batch_size * batch_size if shuffle else None,
            num_canonical_nodes=1,
            # Ranks that share layers or sequences get the same ones.
            replication=ranks.group_size() if ranks.group_size() > 1 else None,
            # Given here: left to streaming, it is unknown until the first epoch is read.
            shuffle_block_size=shuffle_block,
        )
        self.text_fingerprint = self.fingerprint = split_fingerprint(folder, index)
        self._continued = (0, 0)

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        if not isinstance(item, dict):
            return item
        place = max(0, self.next_epoch - 1), int(at)
        return item[_COLUMN].astype(np.int64), item.get(_STARTS, _ONE_DOCUMENT).astype(np.int64), place

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
        return noted_failure(self._cache) if self._cache else None

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The numbers of an epoch's sequences, as all ranks together read them, batch after batch."""
        numbers: NDArray[np.int64] = generate_work(self.batching_method, self, World(1, 1, 1, 0), epoch, 0).ravel()
        return numbers[numbers >= 0]

    def sources(self, number: int) -> Starts:
        """The source of each document of a sequence, by its number in meta.json; 0 in shards that know none."""
        item = super().__getitem__(number)
        return np.asarray(item.get(_SOURCES, np.zeros(len(item.get(_STARTS, _ONE_DOCUMENT)))), np.int64)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Position of the training, also before the first epoch, which streaming counts as -1."""
        state = super().state_dict(num_samples, from_beginning)
        return {**state, "epoch": max(0, state["epoch"])}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Seek to a position in an epoch: streaming only seeks forward, and ignores an earlier epoch than its current
        one; only its workers take over the seed of the order."""
        super().load_state_dict(obj)
        self.shuffle_seed = obj["shuffle_seed"]
        self.next_epoch = obj["epoch"]
        self._continued = obj["epoch"], obj["sample_in_epoch"]

    def position(self) -> tuple[int, int]:
        """The epoch that is read next, and how many of its sequences were read before; in the process that trains."""
        epoch, read = self._continued
        return self.next_epoch, read if epoch == self.next_epoch else 0

    def largest(self, count: int) -> list[Any]:
        """Return `count` examples of maximum length; all packed sequences have the same length."""
        return [self[number % self.size] for number in range(count)]


def bytes_in_use(pools: Sequence[Sequence[Mapping[str, Any]]], shuffle_block: int) -> int:
    """Bytes of files that an order of reading needs at once, about. pools: the entries of index.json of each source."""
    found = 0
    for shards in pools:
        sizes = [sum(shard[part]["bytes"] for part in ("raw_data", "zip_data") if shard[part]) for shard in shards]
        sequences = max(shard["samples"] for shard in shards)
        # Maximum distance by which streaming moves a sequence (py1e).
        found += min(sum(sizes), (ceil(1.25 * shuffle_block / sequences) + 2) * max(sizes))
    return found


def read_ahead(shards: Sequence[Mapping[str, Any]], batch_size: int, limit: int | None, in_use: int) -> int:
    """Sequences over which files are fetched ahead, so that fetching one hides behind training: a file's worth, or
    eight batches. shards: the entries of index.json.

    limit: bytes that files may take, None for no bound. in_use: those that the order of reading needs at once. Files
    that do not fit beside these would push out some that are still read from, for which training then waits.
    """
    wanted = max(8 * batch_size, shards[0]["samples"])
    if limit is None:
        return wanted
    largest = max(sum(shard[part]["bytes"] for part in ("raw_data", "zip_data") if shard[part]) for shard in shards)
    room = max(0, limit - in_use) // largest * min(shard["samples"] for shard in shards)
    return max(batch_size, min(wanted, room))


def count_sequences(folder: Path) -> int:
    """Packed sequences in an MDS folder."""
    return sum(shard["samples"] for shard in read_index(folder)["shards"])


def unpacked_bytes(shards: Path, limit_gb: float | None = None) -> int:
    """Bytes on disk of the shards of all splits when fetched or unpacked; 0 for uncompressed local shards, which are
    read in place. limit_gb: limit of the space for remote ones."""
    found = [(path, shard) for path in shards.glob("*/index.json") for shard in read_index(path.parent)["shards"]]
    needed = sum(int(one["raw_data"]["bytes"]) for path, one in found if one["compression"] or location_of(path.parent))
    remote = any(location_of(path.parent) for path, _ in found)
    return min(needed, int(2 * limit_gb * 1e9)) if remote and limit_gb else needed


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


def open_in_order(folder: Path, cache: Path, limit_gb: float | None = None) -> PackedShards:
    """The shards of a folder, of which each rank reads what it wants by number; every rank must call."""
    return PackedShards(folder, cache, batch_size=ranks.data_ranks(), seed=0, shuffle=False, limit_gb=limit_gb)


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """The numbers of at most `limit` of `count` sequences, at equal distances from the first on, so that no part of the
    text is left out."""
    wanted = min(limit, count)
    return np.arange(wanted) * count // wanted


def packed_batches(
    shards: PackedShards, numbers: Sequence[int] | NDArray[np.int64], size: int, *, with_sources: bool = False
) -> Iterator[Packed]:
    """The sequences of these numbers, `size` at a time."""
    for begin in range(0, len(numbers), size):
        some = [int(number) for number in numbers[begin : begin + size]]
        packed = stacked([shards[number] for number in some])
        yield replace(packed, sources=tuple(map(shards.sources, some))) if with_sources else packed


def read_packed(
    folder: Path,
    cache: Path,
    numbers: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    with_sources: bool = False,
    limit_gb: float | None = None,
) -> Packed:
    """The sequences of these numbers (or all) of an MDS folder, in memory; every rank must call."""
    wanted = range(count_sequences(folder)) if numbers is None else numbers
    shards = open_in_order(folder, cache, limit_gb)
    return next(packed_batches(shards, wanted, len(wanted), with_sources=with_sources))


def stacked(items: Sequence[tuple[Tokens, Starts, tuple[int, int]]]) -> Packed:
    """Items of PackedShards as one."""
    tokens, starts, draws = zip(*items, strict=True)
    return Packed(np.stack(tokens), starts, draws=draws)
