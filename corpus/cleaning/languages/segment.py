"""Batches of documents as arrays: code points, chunks between spaces, and their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning import kernels
from corpus.cleaning.languages.characters import class_table
from corpus.cleaning.words import ChunkSplitter

Array = NDArray[Any]
MAX_CHUNKS = 1 << 20


@dataclass(frozen=True)
class SegmentedText:
    """The words of D documents with P code points, C chunks and W words.

    points (P,); doc_starts (D + 1,) into points; bounds (C, 2) into points; doc_chunks (D + 1,) into bounds;
    chunk_words (C + 1,) and doc_words (D + 1,) into the words; hashes, lengths (in code points) and bits (W,).
    Format characters are in none of the three.
    """

    points: Array
    doc_starts: Array
    bounds: Array
    doc_chunks: Array
    chunk_words: Array
    doc_words: Array
    hashes: Array
    lengths: Array
    bits: Array


def code_points(texts: Sequence[str]) -> tuple[Array, Array]:
    """Return all texts' code points one after the other (P,), uint32, and where each begins (D + 1,)."""
    starts = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=starts[1:])
    # In a bytearray the array can be written to, as others are: numba compiles once for both.
    return np.frombuffer(bytearray("".join(texts).encode("utf-32-le")), np.uint32), starts


def hash_table(hashes: Array) -> tuple[Array, Array]:
    """Keys and values of an open-addressing table of hashes → their positions."""
    size = 1 << max(4, int(4 * hashes.size).bit_length())
    keys, values = np.zeros(size, np.uint64), np.zeros(size, np.int32)
    kernels.enter(keys, values, hashes, np.arange(hashes.size, dtype=np.int32))
    return keys, values


def hashes_of(strings: Sequence[str]) -> Array:
    points, starts = code_points(strings)
    spans = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return np.array([kernels.hash_points(points, start, end) for start, end in spans], np.uint64)


class Segmenter:
    """Splits documents into words and remembers the words of each chunk it met, up to a million.

    The memory changes its speed, never its result.
    """

    def __init__(self, stop_words: Sequence[str]) -> None:
        self._splitter = ChunkSplitter()
        self._classes = class_table()
        self._exceptions = hash_table(hashes_of(sorted(self._splitter.exceptions)))
        self._stop_words = hash_table(hashes_of(stop_words))
        self._clear()

    def _clear(self) -> None:
        self._keys, self._values = np.zeros(1 << 16, np.uint64), np.zeros(1 << 16, np.int32)
        self._known = 0
        self._first, self._count = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._hashes, self._lengths = np.zeros(0, np.uint64), np.zeros(0, np.int32)
        self._bits = np.zeros(0, np.uint16)

    def segment(self, points: Array, doc_starts: Array) -> SegmentedText:
        """The words of documents given as code points (P,) and starts (D + 1,)."""
        if self._known > MAX_CHUNKS:
            self._clear()
        capacity = points.size // 2 + doc_starts.size
        bounds, ids = np.empty((capacity, 2), np.int64), np.empty(capacity, np.int32)
        doc_chunks = np.empty(doc_starts.size, np.int64)
        new_bounds = np.empty((capacity, 2), np.int64)
        while True:
            free_slots = self._keys.size // 2 - self._known
            new = kernels.find_chunks(
                points, doc_starts, self._classes, self._keys, self._values, self._known, free_slots, bounds, ids,
                new_bounds, doc_chunks,
            )  # fmt: skip
            if new >= 0:
                break
            self._grow()
        chunks = int(doc_chunks[-1])
        self._learn(points, new_bounds[:new])
        chunk_words, *words = kernels.expand(
            ids[:chunks], self._first, self._count, self._hashes, self._lengths, self._bits
        )
        return SegmentedText(
            points, doc_starts, bounds[:chunks], doc_chunks, chunk_words, chunk_words[doc_chunks], *words
        )  # fmt: skip

    def _grow(self) -> None:
        kept = (self._keys != 0) & (self._values < self._known)
        keys, values = self._keys[kept], self._values[kept]
        self._keys = np.zeros(2 * self._keys.size, np.uint64)
        self._values = np.zeros(self._keys.size, np.int32)
        kernels.enter(self._keys, self._values, keys, values)

    def _learn(self, points: Array, bounds: Array) -> None:
        """Splits new chunks into words."""
        lengths = np.empty(int((bounds[:, 1] - bounds[:, 0]).sum()), np.int32)
        counts = kernels.split_simple(points, bounds, *self._exceptions, lengths)
        simple = lengths[: counts.sum()]
        hard = np.flatnonzero(counts == 0)
        text = points.tobytes().decode("utf-32-le") if hard.size else ""
        split = [list(map(len, self._splitter.split(text[start:end]))) for start, end in bounds[hard].tolist()]
        counts_of_hard = np.array([len(words) for words in split], np.int32)
        order = np.argsort(np.concatenate([np.flatnonzero(counts), hard]), kind="stable")
        # The words of all new chunks: first those of the simple ones, then the others'.
        starts_of = np.concatenate([bounds[counts > 0, 0], bounds[hard, 0]])
        counts = np.concatenate([counts[counts > 0], counts_of_hard])
        lengths = np.concatenate([simple, np.array([n for words in split for n in words], np.int32)])
        ends = np.cumsum(counts)
        first = ends - counts
        # Words of one chunk follow one another in the text.
        running = np.cumsum(lengths) - lengths
        starts = running + np.repeat(starts_of - (running[first] if lengths.size else first), counts)
        hashes, bits, visible = kernels.describe(points, starts, lengths, self._classes, *self._stop_words)
        self._first = np.concatenate([self._first, (first[order] + self._hashes.size).astype(np.int32)])
        self._count = np.concatenate([self._count, counts[order]])
        self._hashes = np.concatenate([self._hashes, hashes])
        self._lengths = np.concatenate([self._lengths, visible])
        self._bits = np.concatenate([self._bits, bits])
        self._known += order.size
