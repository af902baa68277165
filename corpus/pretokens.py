"""GPT-2's pre-tokeniser over UTF-8 bytes, with a table of the pre-tokens seen so far; compiled by numba.

A text falls into pre-tokens (words with the space before them, mostly), and a model of the `tokenizers` package turns
each into ids without looking at the others. So whatever has been encoded once need only be looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from infra.native import kernel

UNKNOWN, LETTER, NUMBER, SPACE, OTHER = range(5)
DONE, FULL, UNKNOWN_CHARACTER = range(3)

ENTRIES = 1 << 20
BYTES_AN_ENTRY = 16

Bytes = NDArray[np.uint8]


@dataclass
class Table:
    """Pre-tokens by hash (open addressing, linear probing): entry number → its bytes in `words`.

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
        """The pre-tokens of the entries from `first` on."""
        ends = self.ends[first : self.entries + 1].tolist()
        content = self.words[ends[0] : ends[-1]].tobytes()
        return [content[a - ends[0] : b - ends[0]].decode() for a, b in pairwise(ends)]


@kernel
def _character(text: Bytes, at: int) -> tuple[int, int]:
    """The code point at a byte of valid UTF-8, and how many bytes it has."""
    first = text[at]
    if first < 0x80:
        return int(first), 1
    if first < 0xE0:
        return (np.int64(first & 0x1F) << 6) | (text[at + 1] & 0x3F), 2
    if first < 0xF0:
        return (np.int64(first & 0x0F) << 12) | (np.int64(text[at + 1] & 0x3F) << 6) | (text[at + 2] & 0x3F), 3
    high = (np.int64(first & 0x07) << 18) | (np.int64(text[at + 1] & 0x3F) << 12)
    return high | (np.int64(text[at + 2] & 0x3F) << 6) | (text[at + 3] & 0x3F), 4


@kernel
def _contraction(text: Bytes, at: int, end: int) -> int:
    """Bytes of 's, 't, 'm, 'd, 're, 've or 'll at an apostrophe; 0 if there is none of them."""
    if at + 1 >= end:
        return 0
    first = text[at + 1]
    if first == ord("s") or first == ord("t") or first == ord("m") or first == ord("d"):
        return 2
    if at + 2 >= end:
        return 0
    second = text[at + 2]
    if (first == ord("r") or first == ord("v")) and second == ord("e"):
        return 3
    return 3 if first == ord("l") and second == ord("l") else 0


@kernel
def _pretoken_end(text: Bytes, begin: int, end: int, classes: Bytes) -> int:
    """Where the pre-token that begins at `begin` ends; -1 where a character of unknown class is met.

    GPT-2's regular expression: 's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
    """
    if text[begin] == ord("'"):
        length = _contraction(text, begin, end)
        if length:
            return begin + length
    at = begin
    point, size = _character(text, at)
    kind = classes[point]
    if point == ord(" ") and at + 1 < end:
        after, after_size = _character(text, at + 1)
        after_kind = classes[after]
        if after_kind == UNKNOWN:
            return -1
        if after_kind != SPACE:
            at, size, kind = at + 1, after_size, after_kind
    if kind == UNKNOWN:
        return -1
    last = at
    while True:
        last, at = at, at + size
        if at >= end:
            return at
        point, size = _character(text, at)
        if classes[point] == UNKNOWN:
            return -1
        if classes[point] != kind:
            # The last of several spaces goes with what follows.
            return last if kind == SPACE and last > begin else at


@kernel
def _entry(text: Bytes, begin: int, end: int, slots, ends, words, state) -> int:  # type: ignore[no-untyped-def]
    """The number of a pre-token's entry, which is made if there is none; -1 if the table is full."""
    hashed = np.uint64(0xCBF29CE484222325)
    for at in range(begin, end):
        hashed = (hashed ^ np.uint64(text[at])) * np.uint64(0x100000001B3)
    slot = np.int64((hashed ^ (hashed >> np.uint64(32))) & np.uint64(len(slots) - 1))
    length = end - begin
    while slots[slot] >= 0:
        entry = slots[slot]
        start = ends[entry]
        if ends[entry + 1] - start == length:
            same = True
            for at in range(length):
                if words[start + at] != text[begin + at]:
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
def find(text: Bytes, offsets, first: int, classes: Bytes, slots, ends, words, state, found, counts):  # type: ignore[no-untyped-def]
    """Entry numbers of the pre-tokens of documents `first`, `first` + 1, … into `found`, their number into `counts`.

    text: UTF-8 of all documents; document i lies between offsets i and i + 1.
    Returns (reason, document): all DONE; or the table FULL, or an UNKNOWN_CHARACTER met, in that document, which has
    left nothing in `found` then.
    """
    used = 0
    for document in range(first, len(offsets) - 1):
        at, end, begun = offsets[document], offsets[document + 1], used
        while at < end:
            stop = _pretoken_end(text, at, end, classes)
            if stop < 0:
                return UNKNOWN_CHARACTER, document
            entry = _entry(text, at, stop, slots, ends, words, state)
            if entry < 0:
                return FULL, document
            found[used] = entry
            used += 1
            at = stop
        counts[document] = used - begun
    return DONE, len(offsets) - 1


@kernel
def gather(found, counts, id_ends, ids, closing, out, lengths):  # type: ignore[no-untyped-def]
    """The ids of the pre-tokens in `found`, document by document, each closed by the id `closing`; returns how many.

    id_ends: entry e has the ids between id_ends e and e + 1. lengths: tokens of each document.
    """
    used, place = 0, 0
    for document in range(len(counts)):
        begun = used
        for _ in range(counts[document]):
            entry = found[place]
            place += 1
            for at in range(id_ends[entry], id_ends[entry + 1]):
                out[used] = ids[at]
                used += 1
        out[used] = closing
        used += 1
        lengths[document] = used - begun
    return used
