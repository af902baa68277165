"""The compiled search for test items in texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.decontaminate.items import has_spaces, with_spaces
from corpus.documents.words import (
    NGRAM_BASE,
    Bytes,
    Hashes,
    character_table,
    has_unspaced,
    hash_ngrams,
    hash_words,
    mix64,
    text_buffers,
)
from infra.native import kernel

FILTER_BITS = 16
"""Bits of the filter for each hash that is looked for: one in sixteen others passes it."""
_LARGE_BUCKET = 64
"""Hashes with the same top bits, eight on average: more are an n-gram that many items have."""


class GramIndex(NamedTuple):
    """The hashes that are looked for.

    ngram: words of an n-gram; those of more words are of scripts without spaces between words.
    lengths: (L,) how many words the n-grams have, and the texts that are shorter and matched whole. grams: (G,) the
    hashes of all of these, ascending. alone: (A,) the hashes of whole texts that count only where they stand alone,
    ascending; longest_alone: the most words that one has.
    questions: (Q,) the hashes of short questions, ascending; longest_question: the most words that one has.
    answers: (P,) hashes of right answers, those of question i from answer_begins[i] to answer_begins[i + 1], each of
    answer_words words and beginning at most `within` words after the question.
    """

    ngram: int
    lengths: NDArray[np.int64]
    grams: Hashes
    alone: Hashes
    longest_alone: int
    questions: Hashes
    longest_question: int
    answer_begins: NDArray[np.int64]
    answers: Hashes
    answer_words: NDArray[np.int64]
    within: NDArray[np.int64]


def make_filter(hashes: Hashes) -> NDArray[np.uint8]:
    """A table of flags, one for each value that the top bits of a hash can have; its size is a power of two."""
    size = 1 << max(10, int(np.ceil(np.log2(max(1, hashes.size) * FILTER_BITS))))
    flags = np.zeros(size, np.uint8)
    flags[(hashes >> np.uint64(64 - (size - 1).bit_length())).astype(np.int64)] = 1
    return flags


def sorted_by_hash(hashes: Hashes, values: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Return hashes in ascending order, and the value of each; values of equal hashes stay in their order.

    Hashes are spread evenly, so their top bits put nearly each of them in its place.
    """
    bits = max(1, (hashes.size // 8).bit_length())
    out_hashes, out_values = np.empty_like(hashes), np.empty_like(values)
    ends = _sort_buckets(hashes, values, bits, out_hashes, out_values)
    sizes = np.diff(ends, prepend=0)
    for bucket in np.flatnonzero(sizes > _LARGE_BUCKET).tolist():
        part = slice(ends[bucket] - sizes[bucket], ends[bucket])
        order = np.argsort(out_hashes[part], kind="stable")
        out_hashes[part], out_values[part] = out_hashes[part][order], out_values[part][order]
    return out_hashes, out_values


@kernel
def _sort_buckets(
    hashes: Hashes, values: NDArray[np.int64], bits: int, out_hashes: Hashes, out_values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Write hashes by their top bits, sorted among those with the same ones unless these are a large bucket; return
    the end of each bucket, (2**bits,)."""
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for value in hashes:
        ends[np.int64(value >> shift) + 1] += 1
    for bucket in range(1 << bits):
        ends[bucket + 1] += ends[bucket]
    for number in range(hashes.size):
        top = np.int64(hashes[number] >> shift)
        out_hashes[ends[top]], out_values[ends[top]] = hashes[number], values[number]
        ends[top] += 1
    begin = 0
    for bucket in range(1 << bits):
        end = ends[bucket]
        for number in range(begin + 1, end if end - begin <= _LARGE_BUCKET else begin):
            key, moved = out_hashes[number], out_values[number]
            at = number
            while at > begin and out_hashes[at - 1] > key:
                out_hashes[at], out_values[at] = out_hashes[at - 1], out_values[at - 1]
                at -= 1
            out_hashes[at], out_values[at] = key, moved
        begin = end
    return ends[: 1 << bits]


@kernel
def _find(hashes: Hashes, target: np.uint64) -> int:
    """Return the place of a hash among ascending ones, -1 where it is missing."""
    low, high = 0, hashes.size
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low if low < hashes.size and hashes[low] == target else -1


_SENTENCE_ENDS = (
    0x0589,  # ։ of Armenian
    0x061B, 0x061F, 0x06D4,  # ؛ ؟ ۔ of Arabic and Urdu
    0x0964, 0x0965,  # । ॥ of Devanagari and other scripts of India
    0x104B, 0x17D4, 0x17D5,  # ။ of Burmese, ។ ៕ of Khmer
    0x1362, 0x1364, 0x1365, 0x1367,  # ። ፤ ፥ ፧ of Ethiopic
    0x2026, 0x2028, 0x2029,  # … and separators of lines and paragraphs
    0x3002, 0xFF01, 0xFF0E, 0xFF1A, 0xFF1B, 0xFF1F, 0xFF61,  # 。 ！ ． ： ； ？ ｡
)  # fmt: skip
"""Marks that end a sentence or clause as ASCII's do. Thai and Lao have none."""


@kernel
def _ends_sentence(data: Bytes, begin: int, end: int) -> bool:
    """Return True if a line or sentence ends between two words."""
    for at in range(begin, end):
        first = np.int32(data[at])
        if first in (10, 13, 33, 46, 58, 59, 63):  # line breaks ! . : ; ?
            return True
        if 0xC0 <= first < 0xE0 and at + 1 < end:
            point = (first & 0x1F) << 6 | (np.int32(data[at + 1]) & 0x3F)
        elif 0xE0 <= first < 0xF0 and at + 2 < end:
            point = (first & 0x0F) << 12 | (np.int32(data[at + 1]) & 0x3F) << 6 | (np.int32(data[at + 2]) & 0x3F)
        else:
            continue
        if point in _SENTENCE_ENDS:
            return True
    return False


@kernel
def _with_room(hits: NDArray[np.int64], filled: int) -> NDArray[np.int64]:
    """The rows, in an array twice as long where this one is full."""
    if filled < len(hits):
        return hits
    longer = np.empty((2 * filled, hits.shape[1]), np.int64)
    longer[:filled] = hits
    return longer


@kernel
def _bits(size: int) -> int:
    """The logarithm of a power of two."""
    bits = 0
    while size > 1:
        size >>= 1
        bits += 1
    return bits


@kernel
def _is_set_off(data: Bytes, begin: int, end: int) -> bool:
    """Return True if anything but spaces and an apostrophe is between two words, as before the value of a field."""
    for byte in data[begin:end]:  # noqa: SIM110 - numba compiles no any()
        if byte not in (32, 39):
            return True
    return False


@kernel
def _find_after(words: Hashes, first: int, last: int, size: int, target: np.uint64, scratch: Hashes) -> int:
    """The first place from `first` up to `last` at which `size` words have this hash together, -1 where none has."""
    for start in range(first, last + 1):
        hash_ngrams(words[start : start + size], size, size, scratch)
        if scratch[0] == target:
            return start
    return -1


@kernel
def find_items(
    data: Bytes,
    begins: NDArray[np.int64],
    table: NDArray[np.int32],
    index: GramIndex,
    gram_flags: NDArray[np.uint8],
    alone_flags: NDArray[np.uint8],
    question_flags: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Every place at which a test item shows: rows (H, 4) of text, number of the hash, first byte, end; in bytes from
    the text's beginning. The numbers of `alone` come after those of `grams`, those of `answers` last."""
    longest = max(1, np.max(np.diff(begins)))
    words, hashes = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    starts, ends = np.empty(longest, np.int64), np.empty(longest, np.int64)
    gram_shift, alone_shift = np.uint64(64 - _bits(gram_flags.size)), np.uint64(64 - _bits(alone_flags.size))
    question_shift = np.uint64(64 - _bits(question_flags.size))
    first_alone = index.grams.size
    first_answer = first_alone + index.alone.size
    hits = np.empty((1024, 4), np.int64)
    filled = 0
    for text in range(begins.size - 1):
        begin = begins[text]
        count = hash_words(data, begin, begins[text + 1], table, words, starts, ends)
        unspaced = (
            index.lengths.size > 0
            and index.lengths[-1] > index.ngram
            and has_unspaced(data, begin, begins[text + 1], starts, count)
        )
        for length in index.lengths:
            if length > count or (length > index.ngram and not unspaced):
                continue
            for i in range(hash_ngrams(words, count, length, hashes)):
                if gram_flags[hashes[i] >> gram_shift] == 0:
                    continue
                entry = _find(index.grams, hashes[i])
                if entry >= 0:
                    hits = _with_room(hits, filled)
                    hits[filled, 0], hits[filled, 1] = text, entry
                    hits[filled, 2], hits[filled, 3] = starts[i] - begin, ends[i + length - 1] - begin
                    filled += 1
        for first in range(count if index.alone.size else 0):
            if first > 0 and not _ends_sentence(data, ends[first - 1], starts[first]):
                continue
            value = np.uint64(0)
            for last in range(first, min(count, first + index.longest_alone)):
                value = value * NGRAM_BASE + words[last]
                if last + 1 < count and not _ends_sentence(data, ends[last], starts[last + 1]):
                    continue
                gram = mix64(value)
                if alone_flags[gram >> alone_shift] == 0:
                    continue
                entry = _find(index.alone, gram)
                if entry >= 0:
                    hits = _with_room(hits, filled)
                    hits[filled, 0], hits[filled, 1] = text, first_alone + entry
                    hits[filled, 2], hits[filled, 3] = starts[first] - begin, ends[last] - begin
                    filled += 1
        for first in range(count if index.questions.size else 0):
            if first > 0 and not _is_set_off(data, ends[first - 1], starts[first]):
                continue
            value = np.uint64(0)
            for end in range(first + 1, min(count, first + index.longest_question) + 1):
                value = value * NGRAM_BASE + words[end - 1]
                gram = mix64(value)
                if question_flags[gram >> question_shift] == 0:
                    continue
                question = _find(index.questions, gram)
                if question < 0:
                    continue
                for answer in range(index.answer_begins[question], index.answer_begins[question + 1]):
                    size = index.answer_words[answer]
                    last = min(end + index.within[answer], count - size)
                    entry = _find_after(words, end, last, size, index.answers[answer], hashes)
                    if entry >= 0:
                        hits = _with_room(hits, filled)
                        hits[filled, 0], hits[filled, 1] = text, first_answer + answer
                        hits[filled, 2], hits[filled, 3] = starts[first] - begin, ends[entry + size - 1] - begin
                        filled += 1
    return hits[:filled]


class Searcher:
    """A search for the hashes of an index."""

    def __init__(self, index: GramIndex) -> None:
        self._index = index
        self._flags = [make_filter(hashes) for hashes in (index.grams, index.alone, index.questions)]

    def __call__(self, texts: pa.ChunkedArray) -> NDArray[np.int64]:
        """Every place at which a test item shows in a column of texts, see `find_items`."""
        data, begins = text_buffers(texts)
        if has_spaces(data.data):
            data = np.frombuffer(with_spaces(data.tobytes()), np.uint8)
        hits: NDArray[np.int64] = find_items(data, begins, character_table(), self._index, *self._flags)
        return hits
