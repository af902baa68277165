"""Words of UTF-8 text as 64-bit hashes, compiled: what dedupe and decontaminate compare texts by.

A word is a run of letters and digits, in lower case and without accents; all else separates. A character of a script
that puts no space between words (Han, Kana, Thai, …) is hashed like a word, and n-grams that begin with one are longer:
see `ngram_size`. `corpus.documents.marks` reads the same words together with the marks that carry meaning.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infra.native import kernel

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]

SEPARATOR, IGNORED = 0, -1
ALONE = 1 << 24
"""Marks a character of a script without spaces between words."""
BASIC = 1 << 16
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility forms
)
CHARACTERS_PER_WORD = {"han": 1.5, "kana": 2.0, "southeast": 4.0}
"""Mean word length of Chinese, of Japanese, and of Thai, Lao, Khmer and Burmese, whose words no space separates. The
Universal Declaration of Human Rights has 1.4 to 1.5, 2.1 to 2.2, and 4.1 to 5.1 characters for a word of English."""
_HAN, _KANA, _SOUTHEAST = CHARACTERS_PER_WORD.values()
_UNCHANGED = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3))
"""Letters of Han and Hangul, which have no case and no accents: two thirds of all code points below U+10000."""
_SEPARATORS = (0xD800, 0xF8FF)
"""Surrogates and private use."""
NGRAM_BASE = np.uint64(0xD6E8FEB86659FD93)
"""The base of the polynomial of an n-gram's words."""


def folded_code_points() -> Iterator[int]:
    """The code points below U+10000 whose properties have to be looked up."""
    begin = 0
    for low, high in (*_UNCHANGED, _SEPARATORS):
        yield from range(begin, low)
        begin = high + 1
    yield from range(begin, BASIC)


@cache
def character_table() -> NDArray[np.int32]:
    """Return the class of each character below U+10000, (65536,): SEPARATOR, IGNORED, or its folded code point."""
    table = np.zeros(BASIC, np.int32)
    for low, high in _UNCHANGED:
        table[low : high + 1] = np.arange(low, high + 1)
    for code in folded_code_points():
        table[code] = _fold(chr(code))
    for low, high in _UNSPACED:
        block = table[low : high + 1]
        block[block > 0] |= ALONE
    return table


def _fold(character: str) -> int:
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me", "Cf"):
        return IGNORED
    if kind[0] not in "LN" and kind != "Mc":
        return SEPARATOR
    lower = character.lower()
    plain = [c for c in unicodedata.normalize("NFKD", lower) if unicodedata.category(c) not in ("Mn", "Me")]
    if len(plain) == 1:
        return ord(plain[0])
    return ord(lower) if len(lower) == 1 else ord(character)


def text_buffers(column: pa.ChunkedArray) -> tuple[Bytes, NDArray[np.int64]]:
    """The bytes of a string column and where each text begins in them, (N + 1,); without a copy of the text."""
    texts = column.cast(pa.large_string()).combine_chunks()
    _, offsets, data = texts.buffers()
    begins = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return (np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)), begins


@kernel(inline=True)
def mix64(value: np.uint64) -> np.uint64:
    """Spread every bit over all 64 (the finaliser of MurmurHash3)."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@kernel
def hash_words(
    data: Bytes,
    begin: int,
    end: int,
    table: NDArray[np.int32],
    hashes: Hashes,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> int:
    """Write the hash and the place in `data` of each word of data[begin:end]; return how many there are.

    Args:
        hashes, starts, ends: room for one word a byte.
    """
    count = 0
    inside = False
    value = np.uint64(0)
    at = begin
    while at < end:
        here = at
        first = np.int32(data[at])
        if first < 0x80:
            code = table[first]
            at += 1
        elif first < 0xE0 and at + 1 < end:
            code = table[(first & 0x1F) << 6 | (np.int32(data[at + 1]) & 0x3F)]
            at += 2
        elif first < 0xF0 and at + 2 < end:
            second, third = np.int32(data[at + 1]) & 0x3F, np.int32(data[at + 2]) & 0x3F
            code = table[(first & 0x0F) << 12 | second << 6 | third]
            at += 3
        elif at + 3 < end:
            second, third = np.int32(data[at + 1]) & 0x3F, np.int32(data[at + 2]) & 0x3F
            point = (first & 0x07) << 18 | second << 12 | third << 6 | (np.int32(data[at + 3]) & 0x3F)
            # Above U+10000: Han stands alone, U+1Fxxx are pictures, the rest are letters of old and rare scripts.
            code = point | ALONE if point >= 0x20000 else SEPARATOR if point >= 0x1F000 else point
            at += 4
        else:
            break
        if code > 0 and code < ALONE:
            if not inside:
                inside = True
                value = np.uint64(0x9E3779B97F4A7C15)
                starts[count] = here
            value = (value ^ np.uint64(code)) * np.uint64(0x100000001B3)
        elif code != IGNORED:
            if inside:
                hashes[count], ends[count] = mix64(value), here
                count += 1
                inside = False
            if code >= ALONE:
                hashes[count], starts[count], ends[count] = mix64(np.uint64(code)), here, at
                count += 1
    if inside:
        hashes[count], ends[count] = mix64(value), end
        count += 1
    return count


@kernel
def characters_per_word(data: Bytes, at: int) -> float:
    """Return the average number of characters like the one at data[at] in a word; 1 for words between spaces."""
    first = np.int32(data[at])
    if first < 0xE0:
        return 1.0
    second, third = np.int32(data[at + 1]) & 0x3F, np.int32(data[at + 2]) & 0x3F
    point = (first & 0x0F) << 12 | second << 6 | third
    if first >= 0xF0:
        point = (first & 0x07) << 18 | second << 12 | third << 6
        return _HAN if point >= 0x20000 else 1.0
    if 0x0E00 <= point <= 0x0EFF or 0x1000 <= point <= 0x109F or 0x1780 <= point <= 0x17FF:
        return _SOUTHEAST
    if 0x3040 <= point <= 0x30FF:
        return _KANA
    return _HAN if 0x3400 <= point <= 0x9FFF or 0xF900 <= point <= 0xFAFF else 1.0


@kernel
def ngram_size(characters: float, n: int) -> int:
    """Return the characters of an n-gram of a script whose words have `characters` on average, n for one with spaces.

    A word that is replaced changes as many n-grams per word as in a script with spaces: n.
    """
    return int(characters * (n - 1) + 1.5)


@kernel
def words_in(data: Bytes, starts: NDArray[np.int64], count: int) -> float:
    """Return the number of words of a text; those of scripts without spaces are estimated by their characters."""
    total = 0.0
    for word in range(count):
        total += 1.0 / characters_per_word(data, starts[word])
    return total


@kernel
def has_unspaced(data: Bytes, begin: int, end: int, starts: NDArray[np.int64], count: int) -> bool:
    """Return True if any word of data[begin:end] is a character of a script without spaces between words."""
    largest = np.uint8(0)
    for byte in data[begin:end]:
        largest = max(largest, byte)
    if largest >= 0xE0:  # the first byte of characters of three bytes and more
        for word in range(count):
            if characters_per_word(data, starts[word]) > 1:
                return True
    return False


@kernel
def hash_script_ngrams(
    data: Bytes, starts: NDArray[np.int64], words: Hashes, count: int, n: int, out: Hashes, sizes: NDArray[np.int64]
) -> int:
    """Hash n-grams as `hash_ngrams` does, with the n of each script: each n-gram has the size of the script that it
    begins with.

    Words at the end that are in none of them get one more.

    Args:
        sizes: the number of words of each n-gram; room for `count`, as in `out`.
    """
    filled = covered = 0
    # The last n-gram's size, its value, and the factor of its first word: one of the same size goes on from it.
    before, value, top = 0, np.uint64(0), np.uint64(1)
    for word in range(count):
        size = ngram_size(characters_per_word(data, starts[word]), n)
        if word + size > count:
            before = 0
            continue
        if size == before:
            value = value * NGRAM_BASE + words[word + size - 1] - top * words[word - 1]
        else:
            before, value, top = size, np.uint64(0), np.uint64(1)
            for i in range(word, word + size):
                value = value * NGRAM_BASE + words[i]
                top *= NGRAM_BASE
        out[filled] = mix64(value)
        sizes[filled] = size
        filled += 1
        covered = word + size if word + size > covered else covered
    if covered < count:
        size = min(count, ngram_size(characters_per_word(data, starts[covered]), n))
        hash_ngrams(words[count - size : count], size, size, out[filled:])
        sizes[filled] = size
        filled += 1
    return filled


@kernel
def hash_ngrams(words: Hashes, count: int, n: int, out: Hashes) -> int:
    """Write the hash of each n words that follow each other; a text of fewer words gives one of all of them.

    Returns how many there are: max(1, count - n + 1), and 0 for a text without words.
    """
    if count == 0:
        return 0
    n = min(n, count)
    top = np.uint64(1)
    for _ in range(n):
        top *= NGRAM_BASE
    value = np.uint64(0)
    for i in range(n):
        value = value * NGRAM_BASE + words[i]
    out[0] = mix64(value)
    for i in range(n, count):
        value = value * NGRAM_BASE + words[i] - top * words[i - n]
        out[i - n + 1] = mix64(value)
    return count - n + 1
