"""Native parts of the segmentation: chunks between spaces, their words, their hashes. Needs numba.

Text is an array of code points (P,), uint32. The hash of a string c0…cn is Σ (ci + 1)·BASE^(n-i) mod 2^64: that
of two strings together follows from theirs, which is how rows of words are compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.languages.characters import FORMAT, LETTER, PUNCTUATION, SPACE, SYMBOL, TERMINAL
from infra.native import kernel

Array = NDArray[Any]

BASE = np.uint64(0x9E3779B97F4A7C15)
ONE = np.uint64(1)
ZERO = np.uint64(0)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

# What a word is, as bits; from bit 8 on the number of the stop word that it is, from 1.
ALPHABETIC, SOLID, SENTENCE_END, ALL_PUNCTUATION = 1, 2, 4, 8
STOP_WORD_SHIFT = 8

_A, _Z, _LOWER_A, _LOWER_Z = 65, 90, 97, 122
_DOT, _HYPHEN, _APOSTROPHE, _CURLY_APOSTROPHE, _LOWER_S = 46, 45, 39, 0x2019, 115
_MAX_CUTS = 8


@kernel(inline=True)
def slot_of(hash_: Any, mask: int) -> Any:
    """Return the first slot for a hash in a hash table of mask + 1 slots."""
    mixed = (hash_ ^ (hash_ >> _HALF)) * _MIX
    return np.int64((mixed ^ (mixed >> _HALF)) & np.uint64(mask))


@kernel
def hash_points(points: Array, start: int, end: int) -> Any:
    value = ZERO
    for i in range(start, end):
        value = value * BASE + np.uint64(points[i]) + ONE
    return value


@kernel
def power(exponent: int) -> Any:
    """BASE^exponent mod 2^64."""
    result, factor = ONE, BASE
    while exponent > 0:
        if exponent & 1:
            result *= factor
        factor *= factor
        exponent >>= 1
    return result


@kernel
def look_up(keys: Array, values: Array, hash_: Any) -> int:
    """Return the value of a hash in an open-addressing table whose empty slots have the key 0; -1 if it is missing."""
    mask = keys.size - 1
    slot = slot_of(hash_, mask)
    while keys[slot] != 0:
        if keys[slot] == hash_:
            return values[slot]
        slot = (slot + 1) & mask
    return -1


@kernel
def enter(keys: Array, values: Array, new_keys: Array, new_values: Array) -> None:
    """Put hashes into an open-addressing table that has room for them."""
    mask = keys.size - 1
    for i in range(new_keys.size):
        slot = slot_of(new_keys[i], mask)
        while keys[slot] != 0 and keys[slot] != new_keys[i]:
            slot = (slot + 1) & mask
        keys[slot] = new_keys[i]
        values[slot] = new_values[i]


@kernel
def find_chunks(
    points: Array,
    doc_starts: Array,
    classes: Array,
    keys: Array,
    values: Array,
    known: int,
    room: int,
    bounds: Array,
    ids: Array,
    new_bounds: Array,
    offsets: Array,
) -> int:
    """Split documents at spaces and look every chunk up; unknown ones are entered with the ids that follow `known`.

    A chunk of nothing but format characters counts as space.

    Fills bounds (C, 2) and ids (C,) with each chunk's start, end and id, new_bounds (N, 2) with where each new id was
    met first, offsets (D + 1,) with each document's first chunk. Returns how many ids are new, -1 if there was no room.

    Args:
        doc_starts (D + 1,): where each document begins among the points.
        keys, values: the hash table of chunks.
        room: how many more may be entered.
    """
    mask = keys.size - 1
    count, new = 0, 0
    for doc in range(doc_starts.size - 1):
        offsets[doc] = count
        i, end = doc_starts[doc], doc_starts[doc + 1]
        while i < end:
            if classes[points[i]] & SPACE:
                i += 1
                continue
            start = i
            value = ZERO
            while i < end and not classes[points[i]] & SPACE:
                value = value * BASE + np.uint64(points[i]) + ONE
                i += 1
            visible = start
            while visible < i and classes[points[visible]] & FORMAT:
                visible += 1
            if visible == i:
                continue
            slot = slot_of(value, mask)
            while keys[slot] != 0 and keys[slot] != value:
                slot = (slot + 1) & mask
            if keys[slot] == 0:
                if new == room:
                    return -1
                keys[slot] = value
                values[slot] = known + new
                new_bounds[new, 0], new_bounds[new, 1] = start, i
                new += 1
            ids[count] = values[slot]
            bounds[count, 0], bounds[count, 1] = start, i
            count += 1
    offsets[doc_starts.size - 1] = count
    return new


@kernel(inline=True)
def _is_letter(point: int) -> bool:
    return _A <= point <= _Z or _LOWER_A <= point <= _LOWER_Z


@kernel
def _closes(points: Array, i: int, start: int) -> bool:
    """Return True if the mark at i is a separate word after ordinary words."""
    point = points[i]
    if point == _DOT:
        before = points[i - 1] if i > start else 0
        # A dot behind a single capital letter belongs to it, behind several or a row of dots others decide.
        return (
            _LOWER_A <= before <= _LOWER_Z
            or before == 33
            or before == 34
            or before == 41
            or before == 44
            or before == 63
        )
    return point == 33 or point == 34 or point == 41 or point == 44 or point == 63


@kernel
def split_simple(points: Array, bounds: Array, exception_keys: Array, exception_values: Array, lengths: Array) -> Array:
    """Split the chunks of ASCII letters, hyphens between them, 's, and common marks around, that no exception touches.

    Returns (N,): how many words each chunk has; 0 for one that is not so simple.

    Args:
        bounds (N, 2): the chunks.
        lengths: filled with the lengths of their words, one chunk behind the other.
    """
    counts = np.zeros(bounds.shape[0], np.int32)
    fronts = np.empty(_MAX_CUTS, np.int64)
    backs = np.empty(_MAX_CUTS, np.int64)
    total = 0
    for chunk in range(bounds.shape[0]):
        start, end = bounds[chunk, 0], bounds[chunk, 1]
        first, last = start, end
        front, back = 1, 1
        fronts[0], backs[0] = start, end
        while first < last and (points[first] == 40 or points[first] == 34) and front < _MAX_CUTS:
            first += 1
            fronts[front] = first
            front += 1
        while last > first and back < _MAX_CUTS and _closes(points, last - 1, start):
            last -= 1
            backs[back] = last
            back += 1
        if back == 1 and front == 1 and last - first > 1 and (points[last - 1] == 58 or points[last - 1] == 59):
            last -= 1
            backs[back] = last
            back += 1
        if (
            last - first > 2
            and back < _MAX_CUTS
            and points[last - 1] == _LOWER_S
            and (points[last - 2] == _APOSTROPHE or points[last - 2] == _CURLY_APOSTROPHE)
        ):
            last -= 2
            backs[back] = last
            back += 1
        if first == last or front == _MAX_CUTS or back == _MAX_CUTS:
            continue
        opening = front - 1
        simple = True
        for i in range(first, last):
            if points[i] == _HYPHEN and first < i < last - 1 and points[i - 1] != _HYPHEN and front < _MAX_CUTS:
                # What follows the hyphen may be an exception with the marks behind it: "so-called Mr."
                fronts[front] = i + 1
                front += 1
            elif not _is_letter(points[i]):
                simple = False
                break
        for i in range(front):
            for j in range(back):
                if simple and look_up(exception_keys, exception_values, hash_points(points, fronts[i], backs[j])) >= 0:
                    simple = False
        if not simple:
            continue
        before = total
        for _ in range(opening):
            lengths[total] = 1
            total += 1
        word = first
        for i in range(first, last + 1):
            if i == last or points[i] == _HYPHEN:
                lengths[total] = i - word
                total += 1
                if i < last:
                    lengths[total] = 1
                    total += 1
                word = i + 1
        for j in range(back - 1, 0, -1):
            lengths[total] = backs[j - 1] - backs[j]
            total += 1
        counts[chunk] = total - before
    return counts


@kernel
def describe(
    points: Array, starts: Array, lengths: Array, classes: Array, stop_keys: Array, stop_values: Array
) -> tuple[Array, Array, Array]:
    """Hash, bits and visible length of words at starts (W,) with lengths (W,): as without their format characters."""
    visible = np.empty(starts.size, np.int32)
    hashes = np.empty(starts.size, np.uint64)
    bits = np.zeros(starts.size, np.uint16)
    for word in range(starts.size):
        start, end = starts[word], starts[word] + lengths[word]
        flags, punctuation, count, value, last = 0, True, 0, ZERO, 0
        for i in range(start, end):
            kind = classes[points[i]]
            if kind & FORMAT:
                continue
            count, last = count + 1, kind
            value = value * BASE + np.uint64(points[i]) + ONE
            if kind & LETTER:
                flags |= ALPHABETIC
            if not kind & SYMBOL:
                flags |= SOLID
            if not kind & PUNCTUATION:
                punctuation = False
        if punctuation:
            flags |= ALL_PUNCTUATION
        if count == 1 and last & TERMINAL:
            flags |= SENTENCE_END
        hashes[word], visible[word] = value, count
        flags |= (look_up(stop_keys, stop_values, hashes[word]) + 1) << STOP_WORD_SHIFT
        bits[word] = flags
    return hashes, bits, visible


@kernel
def expand(
    ids: Array, first: Array, count: Array, hashes: Array, lengths: Array, bits: Array
) -> tuple[Array, Array, Array, Array]:
    """Return where each chunk's words begin, (C + 1,), and the hashes, lengths and bits of the words (W,), in order.

    Args:
        ids (C,): the chunks; first, count: of every known chunk the first of its words and how many it has.
        hashes, lengths, bits: of the words of all known chunks.
    """
    chunk_words = np.empty(ids.size + 1, np.int64)
    total = 0
    for chunk in range(ids.size):
        chunk_words[chunk] = total
        total += count[ids[chunk]]
    chunk_words[ids.size] = total
    its_hashes = np.empty(total, np.uint64)
    its_lengths = np.empty(total, np.int32)
    its_bits = np.empty(total, np.uint16)
    target = 0
    for chunk in range(ids.size):
        word = first[ids[chunk]]
        for source in range(word, word + count[ids[chunk]]):
            its_hashes[target], its_lengths[target], its_bits[target] = hashes[source], lengths[source], bits[source]
            target += 1
    return chunk_words, its_hashes, its_lengths, its_bits
