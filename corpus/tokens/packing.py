"""The order of documents in the shards, and the bounds and contents of each shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corpus.tokens.tokenise import TOKENS, Index
from infra.process.pace import report

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def in_order(index: Index) -> Index:
    """The documents in the order of a hash of their ids: one that no number of workers, no order of files and no size
    of partitions changes, and in which every stretch mixes all sources.

    Copies of one document (a mixture that repeats a source) are numbered and apart from each other.
    """
    index = index[np.lexsort((index["language"], index["source"], index["heldout"], index["id"]))]
    position = np.arange(len(index))
    is_first = np.r_[True, index["id"][1:] != index["id"][:-1]]
    copy = (position - np.maximum.accumulate(np.where(is_first, position, 0))).astype(np.uint64)
    return index[np.argsort(splitmix(index["id"] + copy * np.uint64(0x9E3779B97F4A7C15)), kind="stable")]


def splitmix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al., 2014): a one-to-one map that scatters its numbers."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def by_source(index: Index) -> Index:
    """The documents of the training side source after source, each in the order that it was given in."""
    return index[np.argsort(np.where(index["heldout"], 0, index["source"]), kind="stable")]


@dataclass(frozen=True)
class Form:
    """Properties that all shards of a run share.

    partitions: folder with the tokenised partitions, NNNNN/tokens.bin, of the type `dtype`.
    before_text: tokens that each document begins with before its text.
    """

    partitions: Path
    dtype: str
    length: int
    compression: str | None
    hashes: tuple[str, ...]
    before_text: int = 0


@dataclass(frozen=True)
class Slice:
    """The sequences of one shard: documents `first` to `last` of the side's order, without the first `skip` tokens."""

    order: Path
    first: int
    last: int
    skip: int
    sequences: int


def slices_of(order: Path, index: Index, length: int, shard_sequences: int) -> list[Slice]:
    """Cut a side's documents, in their order, into shards; what fills no last sequence is left out."""
    ends = np.cumsum(index["tokens"], dtype=np.int64)
    total = int(ends[-1]) // length if len(ends) else 0
    slices = []
    for begin in range(0, total, shard_sequences):
        count = min(shard_sequences, total - begin)
        first = int(np.searchsorted(ends, begin * length, "right"))
        last = int(np.searchsorted(ends, (begin + count) * length, "left")) + 1
        skip = begin * length - (int(ends[first - 1]) if first else 0)
        slices.append(Slice(order, first, last, skip, count))
    return slices


def write_shards(form: Form, slices: Sequence[Slice], out: Path) -> Mapping[str, Any]:
    """Write an MDS folder of one shard for each slice: out/0, out/1, …"""
    done = 0
    for number, item in enumerate(slices):
        _write_shard(form, item, out / str(number))
        done += item.sequences
        report(out, done)
    return {}


def _write_shard(form: Form, item: Slice, folder: Path) -> None:
    from streaming import MDSWriter

    documents = np.load(item.order, mmap_mode="r")[item.first : item.last]
    begins = np.cumsum(documents["tokens"], dtype=np.int64) - documents["tokens"] - item.skip
    tokens = _read_tokens(form, documents, begins, item.sequences * form.length)
    edges = np.arange(item.sequences, dtype=np.int64) * form.length
    # A sequence begins with the rest of a document or with a new one: position 0 is a start either way.
    text_starts = begins + form.before_text
    is_new = (begins >= 0) & (text_starts < len(tokens)) & (begins % form.length + form.before_text < form.length)
    if form.before_text:
        is_new &= begins % form.length != 0  # at its very beginning, the token before the text is of that document
    boundaries = np.union1d(text_starts[is_new], edges)
    sources = documents["source"][np.searchsorted(begins, boundaries, "right") - 1].astype(np.uint16)
    starts = (boundaries % form.length).astype(np.uint32)
    cuts = np.searchsorted(boundaries, edges)[1:]
    columns = {"tokens": f"ndarray:{form.dtype}:{form.length}", "starts": "ndarray:uint32", "sources": "ndarray:uint16"}
    writer = MDSWriter(
        out=str(folder),
        columns=columns,
        compression=form.compression,
        hashes=list(form.hashes),
        size_limit=None,
    )
    with writer:
        rows = zip(tokens.reshape(-1, form.length), np.split(starts, cuts), np.split(sources, cuts), strict=True)
        for sequence, its_starts, its_sources in rows:
            writer.write({"tokens": sequence, "starts": its_starts, "sources": its_sources})


def _read_tokens(form: Form, documents: Index, begins: NDArray[np.int64], count: int) -> NDArray[Any]:
    tokens = np.empty(count, form.dtype)
    size = tokens.itemsize
    target = tokens.view(np.uint8).data
    opened = lru_cache(maxsize=256)(lambda number: _token_file(form.partitions, number))
    columns = (documents[name].tolist() for name in ("partition", "at", "tokens"))
    for partition, start, length, begin in zip(*columns, begins.tolist(), strict=True):
        skipped = max(0, -begin)
        end = min(begin + length, count)
        part = target[(begin + skipped) * size : end * size]
        os.preadv(opened(partition).fileno(), [part], (start + skipped) * size)
    return tokens


def _token_file(partitions: Path, number: int) -> FileIO:
    return open(partitions / f"{number:05}" / TOKENS, "rb", buffering=0)


class PackingSide:
    """Tokens and bytes of one side that are in its sequences, in all and by source.

    stretches: documents that are packed by themselves, with how many sequences they fill.
    """

    def __init__(self, stretches: Sequence[tuple[Index, int]], form: Form, tokenizer: Tokenizer) -> None:
        index = np.concatenate([documents for documents, _ in stretches])
        written = np.concatenate([_written(documents, count * form.length) for documents, count in stretches])
        self.documents = len(index)
        self.sequences = sum(count for _, count in stretches)
        self.tokens = self.sequences * form.length
        self.left_out_tokens = int(index["tokens"].sum(dtype=np.int64)) - self.tokens
        text_bytes = np.where(written == index["tokens"], index["bytes"], 0).astype(np.int64)
        for cut in np.flatnonzero((written > 0) & (written < index["tokens"])):
            # Bits per byte divides by the bytes that the written tokens stand for, so those of the rest are taken off.
            remaining_ids = _tokens_of(form, index[cut])[written[cut] :].tolist()
            text_bytes[cut] = int(index["bytes"][cut]) - len(
                tokenizer.decode(remaining_ids, skip_special_tokens=True).encode()
            )
        self.bytes = int(text_bytes.sum())
        self._index, self._written, self._text_bytes = index, written, text_bytes

    def of_source(self, number: int) -> dict[str, int]:
        is_of_source = self._index["source"] == number
        return {
            "documents": int(is_of_source.sum()),
            "tokens": int(self._written[is_of_source].sum()),
            "bytes": int(self._text_bytes[is_of_source].sum()),
        }


def _written(documents: Index, limit: int) -> NDArray[np.int64]:
    """Return the number of tokens of each document among the first `limit`."""
    begins = np.cumsum(documents["tokens"], dtype=np.int64) - documents["tokens"]
    return np.clip(limit - begins, 0, documents["tokens"])


def _tokens_of(form: Form, document: np.void) -> Index:
    itemsize = np.dtype(form.dtype).itemsize
    path = form.partitions / f"{document['partition']:05}" / TOKENS
    return np.fromfile(path, form.dtype, int(document["tokens"]), offset=int(document["at"]) * itemsize)
