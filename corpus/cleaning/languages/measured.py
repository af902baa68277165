"""Native measures of prose in other languages than English: texts are read as code points, a batch at a time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.kernels import BASE, ONE, ZERO, look_up
from corpus.cleaning.languages.characters import LETTER, class_table, in_class, lower_table, without_format
from corpus.cleaning.languages.known import (
    MEASURED_CHARACTERS,
    MIN_STOP_WORD_SHARE,
    SHARED_SCRIPTS,
    STOP_LISTS,
    WORD_CHARACTERS,
    Prose,
    is_unspaced,
    measure_unspaced,
    script_of,
    stop_words,
)
from corpus.cleaning.languages.segment import code_points, hash_table, hashes_of
from infra.native import kernel

Array = NDArray[Any]

_SAMPLED_WORDS = MEASURED_CHARACTERS // 6
_DECLARED_SHARE = 0.8
"""A declared language counts where it has this share of the stop words of the likeliest one."""
_LANGUAGES = sorted(STOP_LISTS)
_ENGLISH = _LANGUAGES.index("en")
# What is found in place of a language's number.
_NO_WORDS, _FEW_STOP_WORDS = -1, -2
_APOSTROPHE, _CURLY_APOSTROPHE, _CAPITAL_I_WITH_DOT, _LOWER_I, _DOT_ABOVE = 39, 0x2019, 0x130, 0x69, 0x307

# Columns of what `_tally` returns.
_LANGUAGE, _WORDS, _LENGTH, _WITH_LETTERS, _STOP_WORDS = range(5)


@dataclass(frozen=True)
class _Tables:
    """words, letters (1,114,112,): masks of characters in words and of letters; lower: their lower case.

    keys, values: the hash table of S stop words; languages (L,) of which word s has those from firsts[s] to
    firsts[s + 1], as positions in `_LANGUAGES`.
    """

    words: Array
    letters: Array
    lower: Array
    keys: Array
    values: Array
    firsts: Array
    languages: Array


@cache
def _tables() -> _Tables:
    position = {language: number for number, language in enumerate(_LANGUAGES)}
    by_word = stop_words()
    keys, values = hash_table(hashes_of(list(by_word)))
    firsts = np.zeros(len(by_word) + 1, np.int64)
    np.cumsum([len(languages) for languages in by_word.values()], out=firsts[1:])
    numbers = [position[language] for languages in by_word.values() for language in languages]
    return _Tables(
        in_class(WORD_CHARACTERS), class_table() & LETTER != 0, lower_table(), keys, values, firsts,
        np.array(numbers, np.int64),
    )  # fmt: skip


def measure(text: str, language: str = "") -> Prose | None:
    """Measures of a text that is not in English; None for one that is, or whose language is not known.

    language: its ISO code where that is known; else it is found. Format characters are no part of words.
    """
    return measure_texts([text], [language])[0]


def measure_texts(texts: Sequence[str], languages: Sequence[str]) -> list[Prose | None]:
    """Measures of each text as of `measure`. languages: their ISO codes; "" where not known."""
    measured: list[Prose | None] = [None] * len(texts)
    spaced: dict[int, str] = {}
    for number, text in enumerate(texts):
        if text.isascii():
            spaced[number] = text
        elif is_unspaced(visible := without_format(text)):
            measured[number] = measure_unspaced(visible)
        else:
            spaced[number] = _with_small_sigmas(unicodedata.normalize("NFC", visible))
    if not spaced:
        return measured
    tables = _tables()
    position = {language: number for number, language in enumerate(_LANGUAGES)}
    declared = np.array([position.get(languages[number], -1) for number in spaced], np.int64)
    rows = _tally(
        *code_points(list(spaced.values())), declared, tables.words, tables.letters, tables.lower, tables.keys,
        tables.values, tables.firsts, tables.languages, len(_LANGUAGES),
    )  # fmt: skip
    other = (rows[:, _LANGUAGE] != _NO_WORDS) & (rows[:, _LANGUAGE] != _ENGLISH)
    numbers = list(spaced)
    for row in np.flatnonzero(other).tolist():
        number = numbers[row]
        measured[number] = _prose_of(spaced[number], rows[row].tolist())
    return measured


def _prose_of(text: str, row: list[int]) -> Prose | None:
    """The measures of a text as `_tally` counted them; None if its language is not known."""
    stop_words_met: int | None = row[_STOP_WORDS]
    if row[_LANGUAGE] == _FEW_STOP_WORDS:
        # The words of Korean or Tamil take too many endings for a list, but their scripts show them.
        language, stop_words_met = "LATIN" if text.isascii() else script_of(text), None
        if language in SHARED_SCRIPTS:
            return None
    else:
        language = _LANGUAGES[row[_LANGUAGE]]
    words = row[_WORDS]
    return Prose(language, words, row[_LENGTH] / words, row[_WITH_LETTERS] / words, stop_words_met)


_WORD = re.compile(f"[{WORD_CHARACTERS}]+")


def _with_small_sigmas(text: str) -> str:
    """The text with the capital sigmas of its words in lower case, which depends on where in a word they are."""
    if "Σ" not in text:
        return text
    return _WORD.sub(lambda match: _with_small_sigma(match[0]) if "Σ" in match[0] else match[0], text)


def _with_small_sigma(word: str) -> str:
    # İ is the one letter whose lower case is longer.
    lower = word.replace("İ", "I").lower()
    return "".join(small if letter == "Σ" else letter for letter, small in zip(word, lower, strict=True))


@kernel(inline=True)
def _is_quote(point: int) -> bool:
    return point in (_APOSTROPHE, _CURLY_APOSTROPHE)


@kernel
def _likeliest(counts: Array, words: int, declared: int) -> int:
    """The language with most stop words among the words of a sample, or the declared one if it has almost as many; of
    equals English, then the first by its code."""
    if words == 0:
        return _NO_WORDS
    highest = counts.max()
    if highest < MIN_STOP_WORD_SHARE * words:
        return _FEW_STOP_WORDS
    if declared >= 0 and counts[declared] >= _DECLARED_SHARE * highest:
        return declared
    return _ENGLISH if counts[_ENGLISH] == highest else counts.argmax()


@kernel
def _tally(
    points: Array,
    starts: Array,
    declared: Array,
    in_word: Array,
    is_letter: Array,
    lower: Array,
    keys: Array,
    values: Array,
    firsts: Array,
    languages: Array,
    known: int,
) -> Array:
    """Return (D, 5) the language of each text and counts of its words; columns above. Of English texts and those
    without words only the language.

    Args:
        starts (D + 1,): where each text begins among the points; declared (D,): its language's number, or -1.
        known: how many languages there are; the others are those of `_Tables`.
    """
    rows = np.zeros((starts.size - 1, 5), np.int64)
    last_met = np.zeros(firsts.size - 1, np.int64)
    for doc in range(starts.size - 1):
        # Stop words by language: how many, and how many different ones.
        counts, different = np.zeros(known, np.int64), np.zeros(known, np.int64)
        words, length, with_letters = 0, 0, 0
        language = _NO_WORDS
        i, end = starts[doc], starts[doc + 1]
        while i < end:
            if not in_word[points[i]]:
                i += 1
                continue
            first = i
            while i < end and in_word[points[i]]:
                i += 1
            last = i
            while first < last and _is_quote(points[first]):
                first += 1
            while last > first and _is_quote(points[last - 1]):
                last -= 1
            if first == last:
                continue
            words += 1
            length += last - first
            for j in range(first, last):
                if is_letter[points[j]]:
                    with_letters += 1
                    break
            if words > _SAMPLED_WORDS:
                continue
            value = ZERO
            for j in range(first, last):
                point = points[j]
                if point == _CAPITAL_I_WITH_DOT:
                    value = value * BASE + np.uint64(_LOWER_I) + ONE
                    value = value * BASE + np.uint64(_DOT_ABOVE) + ONE
                else:
                    value = value * BASE + np.uint64(lower[point]) + ONE
            word = look_up(keys, values, value)
            if word >= 0:
                is_new = last_met[word] != doc + 1
                last_met[word] = doc + 1
                for k in range(firsts[word], firsts[word + 1]):
                    counts[languages[k]] += 1
                    different[languages[k]] += is_new
            if words == _SAMPLED_WORDS:
                language = _likeliest(counts, words, declared[doc])
                if language == _ENGLISH:
                    break
        if words < _SAMPLED_WORDS:
            language = _likeliest(counts, words, declared[doc])
        rows[doc, _LANGUAGE] = language
        rows[doc, _WORDS], rows[doc, _LENGTH], rows[doc, _WITH_LETTERS] = words, length, with_letters
        if language >= 0:
            rows[doc, _STOP_WORDS] = different[language]
    return rows
