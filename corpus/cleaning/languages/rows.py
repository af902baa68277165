"""Repetitions in texts of scripts that put no space between words, whose rows of n words are rows of characters.

A unit is a character of such a script, a mark, or a word of a script with spaces, which weighs as much as a word of the
text: "git config" in a Chinese text is two words of it, not nine characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.kernels import BASE, ONE, slot_of
from corpus.cleaning.languages.characters import in_categories, spaces, without_format
from corpus.cleaning.languages.known import measure_unspaced, unspaced_table
from corpus.cleaning.languages.segment import code_points
from corpus.cleaning.repeats import mark, row_key, table_size
from corpus.documents.words import CHARACTERS_PER_WORD
from infra.native import kernel

Array = NDArray[Any]

_OTHER, _BLANK, _IN_WORD = range(3)


@cache
def _kinds() -> NDArray[np.uint8]:
    """_BLANK, _IN_WORD for letters, marks and digits of scripts with spaces, else _OTHER, of every code point."""
    kinds = np.where(in_categories("L", "M", "N") & ~unspaced_table(), np.uint8(_IN_WORD), np.uint8(_OTHER))
    kinds[spaces()] = _BLANK
    return kinds


def repeated_rows(text: str, common: Sequence[int], repeated: Sequence[int]) -> tuple[Array, Array]:
    """Return the shares of a text in its most common rows of n words, and in rows of n words that occurred before.

    Args:
        common, repeated: the n of either kind.
    """
    points, _ = code_points([without_format(text)])
    per_word = CHARACTERS_PER_WORD[measure_unspaced(text).language]
    hashes, weights = _units(points, _kinds(), 2, round(2 * per_word))
    sizes = [np.array([2 * round(n * per_word) for n in ns], np.int64) for ns in (common, repeated)]
    shares: tuple[Array, Array] = _shares(hashes, weights, *sizes)
    return shares


@kernel
def _units(points: Array, kinds: Array, of_character: int, of_word: int) -> tuple[Array, Array]:
    """Return the hashes and the weights of a text's units."""
    hashes, weights = np.empty(points.size, np.uint64), np.empty(points.size, np.int64)
    count, i = 0, 0
    while i < points.size:
        kind = kinds[points[i]]
        value = np.uint64(points[i]) + ONE
        i += 1
        if kind == _BLANK:
            continue
        if kind == _IN_WORD:
            while i < points.size and kinds[points[i]] == _IN_WORD:
                value = value * BASE + np.uint64(points[i]) + ONE
                i += 1
        hashes[count], weights[count] = value, of_word if kind == _IN_WORD else of_character
        count += 1
    return hashes[:count], weights[:count]


@kernel
def _row_end(position: Array, start: int, size: int) -> int:
    """Return the end of the row of units that begins at `start` and comes nearest to a size; 0 if the text ends before.

    Args:
        position (U + 1,): the weight of all units before each.
    """
    end = start
    while end < position.size - 1 and position[end] - position[start] < size:
        end += 1
    over = position[end] - position[start] - size
    if over < 0:
        return 0
    under = size - (position[end - 1] - position[start])
    return end - 1 if under < over and end - 1 > start else end


@kernel
def _shares(hashes: Array, weights: Array, common: Array, repeated: Array) -> tuple[Array, Array]:
    units = hashes.size
    prefix, position = np.zeros(units + 1, np.uint64), np.zeros(units + 1, np.int64)
    powers = np.empty(units + 1, np.uint64)
    powers[0] = ONE
    for i in range(units):
        prefix[i + 1] = prefix[i] * BASE + hashes[i]
        position[i + 1] = position[i] + weights[i]
        powers[i + 1] = powers[i] * BASE
    total = max(1, position[units])
    keys = np.empty(table_size(units), np.uint64)
    of_common, of_repeated = np.zeros(common.size), np.zeros(repeated.size)
    for k in range(common.size):
        of_common[k] = _most_common(prefix, position, powers, common[k], keys) / total
    for k in range(repeated.size):
        of_repeated[k] = _repeated(prefix, position, powers, repeated[k], keys) / total
    return of_common, of_repeated


@kernel
def _most_common(prefix: Array, position: Array, powers: Array, size: int, keys: Array) -> int:
    """Return the weight of the most common row of a size times its count; the first of equals."""
    keys[:] = 0
    mask = keys.size - 1
    counts, row_weights = np.zeros(keys.size, np.int64), np.zeros(keys.size, np.int64)
    best, best_slot = 0, -1
    for start in range(position.size - 1):
        end = _row_end(position, start, size)
        if end == 0:
            break
        key = row_key(prefix[end] - prefix[start] * powers[end - start], end - start)
        slot = slot_of(key, mask)
        while keys[slot] != 0 and keys[slot] != key:
            slot = (slot + 1) & mask
        if keys[slot] == 0:
            keys[slot] = key
            row_weights[slot] = position[end] - position[start]
        counts[slot] += 1
        if counts[slot] > best:
            best, best_slot = counts[slot], slot
    return 0 if best_slot < 0 else best * row_weights[best_slot]


@kernel
def _repeated(prefix: Array, position: Array, powers: Array, size: int, keys: Array) -> int:
    """Return the weight of the rows of a size that occurred before; a repeated row is stepped over as a whole."""
    keys[:] = 0
    weight, start = 0, 0
    while start < position.size - 1:
        end = _row_end(position, start, size)
        if end == 0:
            break
        if mark(keys, row_key(prefix[end] - prefix[start] * powers[end - start], end - start)):
            weight += position[end] - position[start]
            start = end
        else:
            start += 1
    return weight
