"""Compiled loops of substring deduplication: anchors, window hashes, runs of repeated windows, and where they are cut.

A window is a number of bytes in a row of one text. Its anchor is the n-gram in it with the smallest hash, the first of
equal ones (winnowing, Schleimer et al., 2003): equal windows have equal anchors at equal offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.documents.words import ALONE, BASIC, IGNORED, SEPARATOR, Bytes, Hashes, mix64
from infra.native import kernel

Positions = NDArray[np.int64]

WORD_BYTES = 32
"""A cut is moved by at most this many bytes to a word boundary; where there is none, it is made between characters."""


class Rolling(NamedTuple):
    """Two independent rolling polynomial hashes: a random number per byte value (2, 256), and the bases (2,)."""

    values: NDArray[np.uint64]
    bases: NDArray[np.uint64]

    @classmethod
    def of_seed(cls, seed: int) -> Rolling:
        generator = np.random.default_rng(seed)
        values = generator.integers(0, 1 << 63, (2, 256), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        return cls(values, generator.integers(0, 1 << 61, 2, dtype=np.uint64) * np.uint64(8) + np.uint64(5))


@kernel
def _power(base: np.uint64, exponent: int) -> np.uint64:
    value = np.uint64(1)
    for _ in range(exponent):
        value *= base
    return value


class Scan(NamedTuple):
    """Texts to scan: begins (N + 1,) in data; salts (N,) change the hashes of a text; sizes in bytes."""

    data: Bytes
    begins: Positions
    salts: Hashes
    window: int
    ngram: int


@kernel
def find_anchors(scan: Scan, rolling: Rolling, out: Hashes, ends: Positions) -> int:
    """Write the hash of each anchor and the end of its windows; return the number of anchors.

    An anchor's windows start behind those of the anchor before it, or at their text's begin, and before its end.
    out, ends: room for one anchor per byte.
    """
    values, base = rolling.values[0], rolling.bases[0]
    leaves = _power(base, scan.ngram)
    width = scan.window - scan.ngram + 1
    # A queue of n-grams with ascending hashes, of which the first is the smallest of the current window.
    room = 1
    while room < width + 1:
        room *= 2
    hashes, grams = np.empty(room, np.uint64), np.empty(room, np.int64)
    count = 0
    for text in range(scan.begins.size - 1):
        begin, end = scan.begins[text], scan.begins[text + 1]
        if end - begin < scan.window:
            continue
        head = length = 0
        value = np.uint64(0)
        anchor = np.int64(-1)
        for at in range(begin, end):
            value = value * base + values[scan.data[at]]
            gram = at - scan.ngram + 1
            if gram < begin:
                continue
            if gram > begin:
                value -= leaves * values[scan.data[gram - 1]]
            hashed = mix64(value ^ scan.salts[text])
            while length and hashes[(head + length - 1) & (room - 1)] > hashed:
                length -= 1
            slot = (head + length) & (room - 1)
            hashes[slot], grams[slot] = hashed, gram
            length += 1
            start = at - scan.window + 1
            if start < begin:
                continue
            if grams[head] < start:
                head = (head + 1) & (room - 1)
                length -= 1
            if grams[head] != anchor:
                anchor = grams[head]
                out[count] = hashes[head]
                count += 1
            ends[count - 1] = start + 1
    return count


@kernel
def hash_windows(
    scan: Scan,
    rolling: Rolling,
    ends: Positions,
    repeated: NDArray[np.bool_],
    low: np.uint64,
    high: np.uint64,
    first: Hashes,
    second: Hashes,
    starts: NDArray[np.int32],
) -> int:
    """Write both hashes and the start of the windows of repeated anchors; return the number of windows.

    ends, repeated: (A,) of the anchors of `find_anchors`. low, high: bounds of the first hash, both included.
    """
    values, others = rolling.values[0], rolling.values[1]
    base, base_other = rolling.bases[0], rolling.bases[1]
    leaves, leaves_other = _power(base, scan.window), _power(base_other, scan.window)
    anchor = count = 0
    for text in range(scan.begins.size - 1):
        begin, end = scan.begins[text], scan.begins[text + 1]
        last = end - scan.window
        start = int(begin)
        hashed_to = -1
        value = value_other = np.uint64(0)
        while start <= last:
            if not repeated[anchor]:
                start = ends[anchor]
                anchor += 1
                continue
            for at in range(start, ends[anchor]):
                if hashed_to != at - 1 + scan.window:
                    value = value_other = np.uint64(0)
                    for byte in scan.data[at : at + scan.window]:
                        value = value * base + values[byte]
                        value_other = value_other * base_other + others[byte]
                else:
                    new, old = scan.data[at + scan.window - 1], scan.data[at - 1]
                    value = value * base + values[new] - leaves * values[old]
                    value_other = value_other * base_other + others[new] - leaves_other * others[old]
                hashed_to = at + scan.window
                hashed = mix64(value ^ scan.salts[text])
                if low <= hashed <= high:
                    first[count], second[count], starts[count] = hashed, mix64(value_other ^ scan.salts[text]), at
                    count += 1
            start = ends[anchor]
            anchor += 1
    return count


def order_of_hashes(first: Hashes, second: Hashes, shift: int = 0) -> Positions:
    """Return the order (N,) of hashes by the first, the second and their position. shift: the number of
    leading bits that all first hashes have in common."""
    bits = np.uint64(max(1, first.size.bit_length()))
    # Sorting numbers of 64 bits is many times as fast as an argsort: leading bits, then the position.
    packed = first << np.uint64(shift) >> bits << bits
    packed |= np.arange(first.size, dtype=np.uint64)
    packed.sort()
    packed &= (np.uint64(1) << bits) - np.uint64(1)
    order = packed.astype(np.int64)
    _sort_nearly_sorted(order, first, second)
    return order


@kernel
def _sort_nearly_sorted(order: Positions, first: Hashes, second: Hashes) -> None:
    for index in range(1, order.size):
        item = order[index]
        at = index
        while at:
            before = order[at - 1]
            if first[before] != first[item]:
                if first[before] < first[item]:
                    break
            elif second[before] < second[item] or (second[before] == second[item] and before < item):
                break
            order[at] = before
            at -= 1
        order[at] = item


@kernel
def point_back(
    starts: NDArray[np.int32],
    sizes: NDArray[np.int32],
    earlier: Positions,
    part: int,
    window: int,
    out: Positions,
) -> None:
    """Write to out[start] of each repeated window where the same bytes are before: part << 32 | start.

    starts: of the windows, group after group of equal ones, ascending. sizes, earlier: (G,) the windows of each group,
    and the first equal one of an earlier part, -1 for none. A window that overlaps the first one is no repeat.
    """
    begin = 0
    for group in range(sizes.size):
        end = begin + sizes[group]
        if earlier[group] >= 0:
            for start in starts[begin:end]:
                out[start] = earlier[group]
        else:
            for start in starts[begin + 1 : end]:
                if start >= starts[begin] + window:
                    out[start] = np.int64(part) << 32 | np.int64(starts[begin])
        begin = end


@kernel
def find_runs(pointers: Positions) -> tuple[Positions, Positions, Positions]:
    """The runs of windows that repeat windows in a row: the start of each, where it points, and the number of
    windows."""
    count = 0
    for at in range(pointers.size):
        count += pointers[at] >= 0 and (at == 0 or pointers[at] != pointers[at - 1] + 1 or pointers[at - 1] < 0)
    starts, targets, lengths = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    run = -1
    for at in range(pointers.size):
        if pointers[at] < 0:
            continue
        if at == 0 or pointers[at] != pointers[at - 1] + 1 or pointers[at - 1] < 0:
            run += 1
            starts[run], targets[run], lengths[run] = at, pointers[at], 0
        lengths[run] += 1
    return starts, targets, lengths


@kernel
def are_equal(data: Bytes, starts: Positions, other: Bytes, targets: Positions, sizes: Positions) -> bool:
    """Return True if data[start:start + size] equals other[target:target + size] for all of them."""
    for run in range(starts.size):
        start, target = starts[run], targets[run]
        for at in range(sizes[run]):
            if data[start + at] != other[target + at]:
                return False
    return True


@kernel
def repeated_spans(
    begins: Positions, starts: Positions, sizes: Positions
) -> tuple[Positions, Positions, Positions, Positions]:
    """Unite runs that touch in one text. starts, sizes: of the runs in bytes, ascending. Returns the text of each span,
    its begin and end in the data, and its first run."""
    texts, firsts = np.empty(starts.size, np.int64), np.empty(starts.size, np.int64)
    lows, highs = np.empty(starts.size, np.int64), np.empty(starts.size, np.int64)
    count = 0
    for run in range(starts.size):
        text = np.searchsorted(begins, starts[run], side="right") - 1
        if count and texts[count - 1] == text and starts[run] <= highs[count - 1]:
            highs[count - 1] = max(highs[count - 1], starts[run] + sizes[run])
            continue
        texts[count], firsts[count] = text, run
        lows[count], highs[count] = starts[run], starts[run] + sizes[run]
        count += 1
    return texts[:count], lows[:count], highs[:count], firsts[:count]


@kernel
def trim_spans(
    data: Bytes,
    begins: Positions,
    texts: Positions,
    lows: Positions,
    highs: Positions,
    characters: NDArray[np.int32],
    glues: NDArray[np.bool_],
) -> None:
    """Shrink the spans of these arrays to whole characters and, where one is near, to word boundaries.

    White space in front of a span stays. glues: True where two words would become one without a space between them. A
    span of which nothing is left has low == high.
    """
    for span in range(texts.size):
        begin, end = begins[texts[span]], begins[texts[span] + 1]
        low, high = lows[span], highs[span]
        while low < high and data[low] & 0xC0 == 0x80:
            low += 1
        while low < high < end and data[high] & 0xC0 == 0x80:
            high -= 1
        at = low
        while at < high and at <= low + WORD_BYTES:
            if not _is_in_word(data, begin, end, at, characters):
                low = at
                break
            at += 1
        at = high
        while at > low and at >= high - WORD_BYTES:
            if not _is_in_word(data, begin, end, at, characters):
                high = at
                break
            at -= 1
        if low > begin:
            while low < high and (data[low] == 32 or 9 <= data[low] <= 13):
                low += 1
        lows[span], highs[span] = low, high
        glues[span] = begin < low < high < end and _are_joined(
            _class_before(data, begin, end, low, characters), _class_at(data, end, high, characters)
        )


@kernel
def _is_in_word(data: Bytes, begin: int, end: int, at: int, characters: NDArray[np.int32]) -> bool:
    """Return True if a cut at this byte would divide a character or a word."""
    if at in (begin, end):
        return False
    if data[at] & 0xC0 == 0x80:
        return True
    return _are_joined(_class_before(data, begin, end, at, characters), _class_at(data, end, at, characters))


@kernel
def _are_joined(before: int, after: int) -> bool:
    """Return True if characters of these classes in a row belong to one word."""
    if after == IGNORED:
        return True
    if before == SEPARATOR or after == SEPARATOR or after & ALONE:
        return False
    return before == IGNORED or not before & ALONE


@kernel
def _class_before(data: Bytes, begin: int, end: int, at: int, characters: NDArray[np.int32]) -> int:
    at -= 1
    while at > begin and data[at] & 0xC0 == 0x80:
        at -= 1
    return _class_at(data, end, at, characters)


@kernel
def _class_at(data: Bytes, end: int, at: int, characters: NDArray[np.int32]) -> int:
    """The class of the character that begins here, see `corpus.documents.words.character_table`."""
    code = np.int32(data[at])
    if code >= 0xF0:
        return SEPARATOR
    if code >= 0xE0 and at + 2 < end:
        code = (code & 0x0F) << 12 | (np.int32(data[at + 1]) & 0x3F) << 6 | (np.int32(data[at + 2]) & 0x3F)
    elif code >= 0xC0 and at + 1 < end:
        code = (code & 0x1F) << 6 | (np.int32(data[at + 1]) & 0x3F)
    return characters[code] if code < BASIC else SEPARATOR
