"""Native counts of repetitions in a document: lines, paragraphs and rows of words, as datatrove's filters count
them."""

from __future__ import annotations

import numpy as np

from corpus.cleaning.kernels import BASE, ONE, ZERO, Array, power, slot_of
from corpus.cleaning.languages.characters import SPACE
from infra.native import kernel

_NEW_LINE = 10
_LENGTH_SALT = np.uint64(0xA0761D6478BD642F)
_POWERS = 4096


@kernel(inline=True)
def row_key(hash_: int, length: int) -> int:
    """Return the key of a piece of text in a set: its hash and length, mixed (the last character is in the last bits of
    a hash, and one bit is lost), never 0."""
    return ((hash_ + np.uint64(length) * _LENGTH_SALT) * BASE) | ONE  # type: ignore[return-value]


@kernel(inline=True)
def mark(keys: Array, hash_: int) -> bool:
    """Add a hash to a set; return True if it was already there."""
    mask = keys.size - 1
    slot = slot_of(hash_, mask)
    while keys[slot] != 0:
        if keys[slot] == hash_:
            return True
        slot = (slot + 1) & mask
    keys[slot] = hash_
    return False


@kernel(inline=True)
def table_size(entries: int) -> int:
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@kernel
def repeated_pieces(points: Array, start: int, end: int, least_breaks: int, skip_blank: bool, classes: Array) -> Array:
    """Return (pieces, repeated pieces, their characters) of a text cut at rows of at least `least_breaks` newlines.

    A row of newlines is one cut; with skip_blank each newline is one, and pieces of nothing but space do not count.
    """
    breaks = 1
    for i in range(start, end):
        if points[i] == _NEW_LINE:
            breaks += 1
    keys = np.zeros(table_size(breaks), np.uint64)
    counts = np.zeros(3, np.int64)
    piece, i, value, blank = start, start, ZERO, True
    while i <= end:
        run = 0
        while i + run < end and points[i + run] == _NEW_LINE and not (skip_blank and run == 1):
            run += 1
        if i == end or run >= least_breaks:
            if not (skip_blank and blank):
                counts[0] += 1
                if mark(keys, row_key(value, i - piece)):
                    counts[1] += 1
                    counts[2] += i - piece
            i += max(run, 1)
            piece, value, blank = i, ZERO, True
        else:
            for _ in range(max(run, 1)):
                value = value * BASE + np.uint64(points[i]) + ONE
                blank = blank and classes[points[i]] & SPACE != 0
                i += 1
    return counts


@kernel
def _most_common_row(
    hashes: Array,
    lengths: Array,
    start: int,
    end: int,
    n: int,
    row_hashes: Array,
    hashed: int,
    keys: Array,
    counts: Array,
) -> int:
    """Characters of the most common row of n words, its spaces included, times its count; the first of equals.

    Args:
        row_hashes (words,): the hashes of the rows of `hashed` words from each word on; of n words afterwards.
    """
    mask = keys.size - 1
    keys[:] = 0
    best, best_count = -1, 0
    firsts = np.empty(max(0, end - start - n + 1), np.int64)
    slots = np.empty(firsts.size, np.int64)
    rows = 0
    for i in range(start, end - n + 1):
        value = row_hashes[i - start]
        for j in range(i + hashed, i + n):
            value = (value ^ hashes[j]) * BASE
            value ^= value >> np.uint64(29)
        row_hashes[i - start] = value
        value |= ONE
        slot = slot_of(value, mask)
        while keys[slot] != 0 and keys[slot] != value:
            slot = (slot + 1) & mask
        if keys[slot] == 0:
            keys[slot] = value
            counts[slot] = 0
            firsts[rows], slots[rows] = i, slot
            rows += 1
        counts[slot] += 1
    for row in range(rows):
        if counts[slots[row]] > best_count:
            best, best_count = firsts[row], counts[slots[row]]
    if best < 0:
        return 0
    characters = n - 1
    for j in range(best, best + n):
        characters += lengths[j]
    return characters * best_count


@kernel
def _repeated_rows(prefix: Array, position: Array, words: int, n: int, powers: Array, keys: Array) -> int:
    """Characters in rows of n words that occurred before; a repeated row is stepped over as a whole."""
    keys[:] = 0
    characters, i = 0, 0
    while i < words - n + 1:
        span = position[i + n] - position[i]
        factor = powers[span] if span < powers.size else power(span)
        value = prefix[i + n] - prefix[i] * factor
        if mark(keys, row_key(value, span)):
            characters += span
            i += n
        else:
            i += 1
    return characters


@kernel
def repeated_words(
    hashes: Array,
    lengths: Array,
    doc_words: Array,
    doc_lengths: Array,
    selected: Array,
    common: Array,
    common_limits: Array,
    repeated: Array,
    repeated_limits: Array,
) -> Array:
    """Shares of a document's characters in its most common rows of words and in repeated rows of words.

    doc_words (D + 1,) into hashes and lengths (W,); doc_lengths (D,) in characters; wanted (D,): which documents.

    Returns (D, A + B); once a share is above its limit those that follow are left at 0.

    Args:
        common (A,), repeated (B,): the n of either kind.
    """
    shares = np.zeros((doc_words.size - 1, common.size + repeated.size))
    powers = np.empty(_POWERS, np.uint64)
    powers[0] = ONE
    for i in range(1, _POWERS):
        powers[i] = powers[i - 1] * BASE
    for doc in range(doc_words.size - 1):
        start, end = doc_words[doc], doc_words[doc + 1]
        words, size = end - start, doc_lengths[doc]
        if not selected[doc] or words == 0:
            continue
        keys = np.empty(table_size(words), np.uint64)
        counts = np.empty(keys.size, np.int32)
        row_hashes = np.zeros(words, np.uint64)
        hashed = 0
        broken = False
        for k in range(common.size):
            if not broken:
                if common[k] < hashed:
                    row_hashes[:], hashed = ZERO, 0
                shares[doc, k] = (
                    _most_common_row(hashes, lengths, start, end, common[k], row_hashes, hashed, keys, counts) / size
                )
                hashed = common[k]
                broken = shares[doc, k] > common_limits[k]
        if broken or repeated.size == 0:
            continue
        prefix = np.zeros(words + 1, np.uint64)
        position = np.zeros(words + 1, np.int64)
        for i in range(words):
            length = lengths[start + i]
            factor = powers[length] if length < _POWERS else power(length)
            prefix[i + 1] = prefix[i] * factor + hashes[start + i]
            position[i + 1] = position[i] + length
        for k in range(repeated.size):
            if not broken:
                characters = _repeated_rows(prefix, position, words, repeated[k], powers, keys)
                shares[doc, common.size + k] = characters / size
                broken = shares[doc, common.size + k] > repeated_limits[k]
    return shares
