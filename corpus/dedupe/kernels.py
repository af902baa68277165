"""Compiled loops of dedupe: signatures, sets of shingles, and the choice of duplicates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.documents.marks import MarkTables, add_marks_at_the_ends, hash_marked_words
from corpus.documents.words import Bytes, Hashes, has_unspaced, hash_ngrams, hash_script_ngrams, hash_words, mix64
from infra.native import kernel

SET_LIMIT = 16_384
"""Longer texts are represented by this number of their smallest shingles: a bottom sketch (Broder, 1997), whose
estimate of a similarity of 0.8 has a standard error of 0.3 %."""


@kernel
def hash_texts(data: Bytes, begins: NDArray[np.int64], out: Hashes) -> None:
    """The hash of each text but for its white space: runs of it count as one space, none at the ends. out: (N,)."""
    for text in range(out.size):
        value = np.uint64(0xCBF29CE484222325)
        gap = inside = False
        for at in range(begins[text], begins[text + 1]):
            byte = data[at]
            if byte == 32 or 9 <= byte <= 13:
                gap = inside
            else:
                if gap:
                    value = (value ^ np.uint64(32)) * np.uint64(0x100000001B3)
                    gap = False
                value = (value ^ np.uint64(byte)) * np.uint64(0x100000001B3)
                inside = True
        out[text] = mix64(value)


class Room(NamedTuple):
    """Room for the words and n-grams of one text, and scratch."""

    words: Hashes
    grams: Hashes
    marks: Hashes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]


@kernel
def _room_for(longest: int, ngram: int) -> Room:
    """longest: bytes of the longest text."""
    return Room(
        np.empty(longest, np.uint64), np.empty(longest + ngram * ngram, np.uint64), np.empty(longest + 1, np.uint64),
        np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64),
    )  # fmt: skip


@kernel
def _hash_text(
    data: Bytes, begin: int, end: int, tables: MarkTables, with_marks: bool, ngram: int, room: Room
) -> tuple[int, int]:
    """Write the n-grams of a text to the room; return the number of its words and of its n-grams."""
    words, starts = room.words, room.starts
    if with_marks:
        count = hash_marked_words(data, begin, end, tables, words, starts, room.marks, room.ends, room.sizes)
    else:
        count = hash_words(data, begin, end, tables.words, words, starts, room.ends)
    if has_unspaced(data, begin, end, starts, count):
        size = hash_script_ngrams(data, starts, words, count, ngram, room.grams, room.sizes)
    else:
        size = hash_ngrams(words, count, ngram, room.grams)
    if with_marks:
        size = add_marks_at_the_ends(data, starts, end, words, room.marks, count, ngram, size, tables.ascii, room.grams)
    return count, size


@kernel
def sign_texts(
    data: Bytes,
    begins: NDArray[np.int64],
    tables: MarkTables,
    with_marks: bool,
    ngram: int,
    factors: NDArray[np.uint32],
    shifts: NDArray[np.uint32],
    out: Hashes,
) -> None:
    """MinHash (Broder, 1997) of each text's word n-grams, hashed by bands. factors, shifts: (H,); out: (bands, N).

    with_marks: whether the marks of `corpus.documents.marks` are part of the words. Texts without words get bands that
    no other text has.
    """
    bands = out.shape[0]
    hashes = factors.size
    rows = hashes // bands
    room = _room_for(max(1, np.max(np.diff(begins))), ngram)
    signature = np.empty(hashes, np.uint32)
    for text in range(out.shape[1]):
        count, size = _hash_text(data, begins[text], begins[text + 1], tables, with_marks, ngram, room)
        signature[:] = np.uint32(0xFFFFFFFF)
        for gram in room.grams[:size]:
            shingle = np.uint32(gram)
            for i in range(hashes):
                value = np.uint32(shingle * factors[i] + shifts[i])
                signature[i] = min(signature[i], value)
        for band in range(bands):
            value = mix64(np.uint64(band + 1))
            for i in range(band * rows, (band + 1) * rows):
                value = mix64(value ^ np.uint64(signature[i]))
            out[band, text] = value if count else mix64(value ^ np.uint64(begins[text]))


@kernel
def shingle_texts(
    data: Bytes,
    begins: NDArray[np.int64],
    tables: MarkTables,
    with_marks: bool,
    ngram: int,
    chosen: NDArray[np.int64],
) -> Hashes:
    """The shingles of the chosen texts, unordered: place in `chosen` << 32 | 32-bit hash. with_marks: see
    `sign_texts`."""
    total = longest = 1
    for text in chosen:
        size = begins[text + 1] - begins[text]
        total += size // 2 + 1 + ngram * ngram
        longest = max(longest, size)
    room = _room_for(longest, ngram)
    out = np.empty(total, np.uint64)
    filled = 0
    for place in range(chosen.size):
        text = chosen[place]
        _, size = _hash_text(data, begins[text], begins[text + 1], tables, with_marks, ngram, room)
        for gram in room.grams[:size]:
            out[filled] = np.uint64(place) << np.uint64(32) | np.uint64(np.uint32(gram))
            filled += 1
    return out[:filled]


class Sets(NamedTuple):
    """Sets of ascending shingles: set i is shingles[begins[i]:begins[i] + sizes[i]]."""

    shingles: NDArray[np.uint32]
    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]


@kernel
def similarity(sets: Sets, first: int, second: int) -> float:
    """Jaccard similarity of two sets."""
    a, b = sets.begins[first], sets.begins[second]
    a_end, b_end = a + sets.sizes[first], b + sets.sizes[second]
    sketched = a_end - a == SET_LIMIT or b_end - b == SET_LIMIT
    both = union = 0
    while a < a_end and b < b_end and not (sketched and union == SET_LIMIT):
        left, right = sets.shingles[a], sets.shingles[b]
        both += left == right
        union += 1
        a += left <= right
        b += right <= left
    if not sketched:
        union += a_end - a + b_end - b
    return both / union if union else 0.0


@kernel
def sign_sets(sets: Sets, factors: NDArray[np.uint32], shifts: NDArray[np.uint32], out: Hashes) -> None:
    """MinHash of each set, hashed by bands, as `sign_texts` of the texts. factors, shifts: (H,); out: (bands, N)."""
    bands = out.shape[0]
    rows = factors.size // bands
    signature = np.empty(factors.size, np.uint32)
    for text in range(out.shape[1]):
        signature[:] = np.uint32(0xFFFFFFFF)
        for shingle in sets.shingles[sets.begins[text] : sets.begins[text] + sets.sizes[text]]:
            for i in range(factors.size):
                signature[i] = min(signature[i], np.uint32(shingle * factors[i] + shifts[i]))
        for band in range(bands):
            value = mix64(np.uint64(band + 1))
            for i in range(band * rows, (band + 1) * rows):
                value = mix64(value ^ np.uint64(signature[i]))
            out[band, text] = value


@kernel
def first_of(parents: NDArray[np.int64], text: int) -> int:
    """The first text of the group that a text is in, with its path shortened."""
    while parents[text] != text:
        parents[text] = parents[parents[text]]
        text = parents[text]
    return text


@kernel
def join_alike(
    members: NDArray[np.int64],
    buckets: NDArray[np.int64],
    sets: Sets,
    threshold: float,
    parents: NDArray[np.int64],
) -> None:
    """Joins the texts of each bucket, members[buckets[i]:buckets[i + 1]], that are alike to groups, whose first texts
    are in `parents` afterwards."""
    for bucket in range(buckets.size - 1):
        inside = members[buckets[bucket] : buckets[bucket + 1]]
        for place in range(inside.size):
            text = inside[place]
            for other in inside[:place]:
                first, second = first_of(parents, text), first_of(parents, other)
                sizes = sets.sizes[text], sets.sizes[other]
                if first == second or min(sizes) < threshold * max(sizes):
                    continue
                if similarity(sets, text, other) >= threshold:
                    parents[max(first, second)] = min(first, second)
    for text in range(parents.size):
        parents[text] = first_of(parents, text)


@kernel
def compare_buckets(
    members: NDArray[np.int64],
    buckets: NDArray[np.int64],
    sets: Sets,
    threshold: float,
    originals: NDArray[np.int64],
    similarities: NDArray[np.float32],
) -> None:
    """Compares the texts of each bucket, members[buckets[i]:buckets[i + 1]], the ones to keep first. A text that is
    like an earlier one gets it as its original. Each text is compared with all earlier ones that are kept."""
    kept = np.empty(max(1, np.max(np.diff(buckets))) if buckets.size > 1 else 1, np.int64)
    for bucket in range(buckets.size - 1):
        count = 0
        for text in members[buckets[bucket] : buckets[bucket + 1]]:
            for other in kept[:count]:
                sizes = sets.sizes[text], sets.sizes[other]
                if min(sizes) < threshold * max(sizes):
                    continue
                found = similarity(sets, text, other)
                if found >= threshold:
                    originals[text], similarities[text] = other, found
                    break
            else:
                kept[count] = text
                count += 1


@kernel
def settle_chains(sets: Sets, threshold: float, originals: NDArray[np.int64], similarities: NDArray[np.float32]) -> int:
    """Makes every original one that is kept; returns how many texts came back.

    Where a text's original has itself gone as a duplicate of a third one, the text is compared with that one, then with
    the others that came back the same way; if it is like none it comes back too.
    """
    came_back = 0
    first_back = np.full(originals.size, -1, np.int64)
    next_back = np.full(originals.size, -1, np.int64)
    direct = originals.copy()
    for text in range(originals.size):
        gone = direct[text]
        if gone == -1 or originals[gone] == -1:
            continue
        other, following, found = originals[gone], first_back[gone], 0.0
        while other != -1:
            found = similarity(sets, text, other)
            if found >= threshold:
                break
            other = following
            following = next_back[following] if following != -1 else -1
        originals[text] = other
        similarities[text] = found if other != -1 else 0.0
        if other == -1:
            next_back[text], first_back[gone] = first_back[gone], text
            came_back += 1
    return came_back
