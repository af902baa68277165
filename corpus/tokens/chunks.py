"""Texts cut into chunks (words with the space before them, mostly), with a table of the chunks seen so far.

Compiled by numba. Chunks that the tokenizer has encoded once are only looked up: `corpus/tokens/cuts.py` describes the
cuts that do not change ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from corpus.tokens.cuts import ALWAYS, LAST, LINE, PLAIN, Cuts
from infra.native import kernel

ENTRIES = 1 << 20
BYTES_AN_ENTRY = 16

Bytes = NDArray[np.uint8]


@dataclass
class ChunkTable:
    """Chunks by hash (open addressing, linear probing): entry number → its bytes in `words`.

    size: most entries, a power of two. state: entries used, bytes of `words` used.
    """

    size: int = ENTRIES

    def __post_init__(self) -> None:
        self.slots = np.full(2 * self.size, -1, np.int32)
        self.ends = np.zeros(self.size + 1, np.int64)
        self.words = np.empty(BYTES_AN_ENTRY * self.size, np.uint8)
        self.state = np.zeros(2, np.int64)

    @property
    def entries(self) -> int:
        return int(self.state[0])

    def clear(self) -> None:
        self.slots.fill(-1)
        self.state.fill(0)

    def added_since(self, first: int) -> list[str]:
        """The chunks of the entries from `first` on."""
        ends = self.ends[first : self.entries + 1].tolist()
        content = self.words[ends[0] : ends[-1]].tobytes()
        return [content[a - ends[0] : b - ends[0]].decode() for a, b in pairwise(ends)]


@kernel
def _kind(text: Bytes, at: int, kinds: Bytes) -> tuple[int, int]:
    """The kind of the character at a byte of valid UTF-8, and how many bytes it has."""
    first = text[at]
    if first < 0x80:
        return kinds[first], 1
    if first < 0xE0:
        return kinds[(np.int64(first & 0x1F) << 6) | (text[at + 1] & 0x3F)], 2
    if first < 0xF0:
        return kinds[(np.int64(first & 0x0F) << 12) | (np.int64(text[at + 1] & 0x3F) << 6) | (text[at + 2] & 0x3F)], 3
    return PLAIN, 4


@kernel
def _chunk(text: Bytes, begin: int, end: int, kinds: Bytes, cuts: Cuts) -> tuple[int, np.uint64]:
    """Return the end of the chunk that begins at `begin`, and its hash (FNV-1a)."""
    hashed = np.uint64(0xCBF29CE484222325)
    position = begin
    kind, size = _kind(text, position, kinds)
    while True:
        for _ in range(size):
            hashed = (hashed ^ np.uint64(text[position])) * np.uint64(0x100000001B3)
            position += 1
        if position == end:
            return position, hashed
        before = kind
        kind, size = _kind(text, position, kinds)
        cut = cuts[before, kind]
        if cut == ALWAYS or (cut == LAST and position + size < end and _kind(text, position + size, kinds)[0] > LINE):
            return position, hashed


@kernel
def _entry(text: Bytes, begin: int, end: int, hashed: np.uint64, slots, ends, words, state) -> int:  # type: ignore[no-untyped-def]
    """The number of a chunk's entry, which is made if there is none; -1 if the table is full."""
    slot = np.int64((hashed ^ (hashed >> np.uint64(32))) & np.uint64(len(slots) - 1))
    length = end - begin
    while slots[slot] >= 0:
        entry = slots[slot]
        start = ends[entry]
        if ends[entry + 1] - start == length:
            same = True
            for offset in range(length):
                if words[start + offset] != text[begin + offset]:
                    same = False
                    break
            if same:
                return entry
        slot = (slot + 1) & (len(slots) - 1)
    entry, used = state[0], state[1]
    if entry + 1 >= len(ends) or used + length > len(words):
        return -1
    words[used : used + length] = text[begin:end]
    slots[slot] = entry
    ends[entry + 1] = used + length
    state[0], state[1] = entry + 1, used + length
    return entry


@kernel
def find(text: Bytes, offsets, kinds: Bytes, cuts: Cuts, slots, ends, words, state, entries, counts) -> int:  # type: ignore[no-untyped-def]
    """Entry numbers of the chunks of documents into `entries`, their number into `counts`.

    Returns the first document for which the table had no room, or the number of documents.

    Args:
        text: UTF-8 of all documents; document i lies between offsets i and i + 1.
    """
    used = 0
    for document in range(len(counts)):
        position, end, first = offsets[document], offsets[document + 1], used
        while position < end:
            stop, hashed = _chunk(text, position, end, kinds, cuts)
            entry = _entry(text, position, stop, hashed, slots, ends, words, state)
            if entry < 0:
                return document
            entries[used] = entry
            used += 1
            position = stop
        counts[document] = used - first
    return len(counts)


@kernel
def gather(entries, counts, id_ends, ids, closing, out, lengths):  # type: ignore[no-untyped-def]
    """The ids of the chunks in `entries`, document by document, each closed by the id `closing`; returns how many.

    Args:
        id_ends: entry e has the ids between id_ends e and e + 1.
        lengths: tokens of each document.
    """
    used, chunk_index = 0, 0
    for document in range(len(counts)):
        first = used
        for _ in range(counts[document]):
            entry = entries[chunk_index]
            chunk_index += 1
            for index in range(id_ends[entry], id_ends[entry + 1]):
                out[used] = ids[index]
                used += 1
        out[used] = closing
        used += 1
        lengths[document] = used - first
    return used
