"""Native measures of prose in other languages than English: texts are read as code points, a batch at a time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
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
    measure_unspaced,
    script_of,
    stop_words,
    unspaced_table,
)
from corpus.cleaning.languages.segment import code_points, hash_table, hashes_of
from corpus.cleaning.measures import UNSPACED, VISIBLE, characters
from infra.native import kernel

Array = NDArray[Any]

_SAMPLED_WORDS = MEASURED_CHARACTERS // 6
_DECLARED_SHARE = 0.8
"""A declared language counts where it has this share of the stop words of the likeliest one."""
_LANGUAGES = sorted(STOP_LISTS)
_NUMBERS = {language: number for number, language in enumerate(_LANGUAGES)}
_KNOWN, _ENGLISH = len(_LANGUAGES), _NUMBERS["en"]
# What is found in place of a language's number.
_UNKNOWN, _FEW_STOP_WORDS, _NOT_SAMPLED = -1, -2, -3
_APOSTROPHE, _CURLY_APOSTROPHE, _CAPITAL_I_WITH_DOT, _LOWER_I, _DOT_ABOVE = 39, 0x2019, 0x130, 0x69, 0x307

# Columns of what `_tally` returns.
_LANGUAGE, _WORDS, _LENGTH, _WITH_LETTERS, _STOP_WORDS = range(5)


@dataclass(frozen=True)
class _Tables:
    """words, letters (1,114,112,): masks of characters in words and of letters; lower: their lower case.

    keys, values: the hash table of S stop words; languages (L,) of which word s has those from firsts[s] to
    firsts[s + 1], as positions in `_LANGUAGES`; english (S,): whether English is one of them.
    """

    words: Array
    letters: Array
    lower: Array
    keys: Array
    values: Array
    firsts: Array
    languages: Array
    english: Array


@cache
def _tables() -> _Tables:
    by_word = stop_words()
    keys, values = hash_table(hashes_of(list(by_word)))
    firsts = np.zeros(len(by_word) + 1, np.int64)
    np.cumsum([len(languages) for languages in by_word.values()], out=firsts[1:])
    numbers = [_NUMBERS[language] for languages in by_word.values() for language in languages]
    return _Tables(
        in_class(WORD_CHARACTERS), class_table() & LETTER != 0, lower_table(), keys, values, firsts,
        np.array(numbers, np.int64), np.array(["en" in languages for languages in by_word.values()]),
    )  # fmt: skip


def measure(text: str, language: str = "") -> Prose | None:
    """Measures of a text that is not in English; None for English or an unknown language.

    language: its ISO code where that is known; else it is found. Format characters are no part of words.
    """
    points, starts = code_points([text])
    counts = characters(points, starts, class_table(), unspaced_table())
    return measure_documents([0], [text], [language], points, starts, counts).get(0)


def measure_documents(
    documents: Sequence[int],
    texts: Sequence[str],
    languages: Sequence[str],
    points: Array,
    doc_starts: Array,
    counts: Array,
) -> dict[int, Prose]:
    """Document → its measures by `measure`, for the documents that have any.

    Args:
        texts: of all D documents, with their code points (P,), starts (D + 1,) and `characters` (D, 2).
        languages: of the documents that are measured, ISO codes; "" where not known.
    """
    formats = np.diff(doc_starts) - counts[:, VISIBLE]
    measured: dict[int, Prose] = {}
    # Most texts are measured unchanged, the others as the code points of what they become.
    unchanged, changed = dict[int, str](), dict[int, str]()
    declared = dict(zip(documents, languages, strict=True))
    for document in documents:
        text = texts[document]
        if text.isascii():
            unchanged[document] = text
            continue
        visible = without_format(text) if formats[document] else text
        if counts[document, UNSPACED]:
            measured[document] = measure_unspaced(visible)
            continue
        normal = _with_small_sigmas(unicodedata.normalize("NFC", visible))
        (unchanged if normal == text else changed)[document] = normal
    if unchanged:
        numbers = list(unchanged)
        measured |= _measure_words(unchanged, points, doc_starts[numbers], doc_starts[1:][numbers], declared)
    if changed:
        new_points, starts = code_points(list(changed.values()))
        measured |= _measure_words(changed, new_points, starts[:-1], starts[1:], declared)
    return measured


def _measure_words(
    texts: Mapping[int, str], points: Array, starts: Array, ends: Array, declared: Mapping[int, str]
) -> dict[int, Prose]:
    tables = _tables()
    languages = np.array([_NUMBERS.get(declared[document], -1) for document in texts], np.int64)
    in_ascii = np.array([text.isascii() for text in texts.values()])
    rows = _tally(
        points, starts, ends, languages, in_ascii, tables.words, tables.letters, tables.lower, tables.keys,
        tables.values, tables.firsts, tables.languages, tables.english,
    )  # fmt: skip
    documents = list(texts)
    other = np.flatnonzero((rows[:, _LANGUAGE] != _UNKNOWN) & (rows[:, _LANGUAGE] != _ENGLISH)).tolist()
    measured = {documents[row]: _prose_of(texts[documents[row]], rows[row].tolist()) for row in other}
    return {document: prose for document, prose in measured.items() if prose}


def _prose_of(text: str, row: list[int]) -> Prose | None:
    """The measures of a text as `_tally` counted them; None if its language is not known."""
    stop_words_met: int | None = row[_STOP_WORDS]
    if row[_LANGUAGE] == _FEW_STOP_WORDS:
        # The words of Korean or Tamil take too many endings for a list, but their scripts show them.
        language, stop_words_met = script_of(text), None
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
def _likeliest(
    met: Array, times: Array, words: int, declared: int, firsts: Array, languages: Array, english: Array
) -> tuple[int, int]:
    """The language with most stop words among the words of a sample, or the declared one if it has almost as many, and
    how many different ones; of equals English goes first, then the first by its code.

    Args:
        met (M,): the stop words of the sample; times (S,): how often each stop word occurs in it.
    """
    if words == 0:
        return _UNKNOWN, 0
    in_english, in_english_alone, elsewhere = 0, 0, 0
    for word in met:
        if english[word]:
            in_english += times[word]
            if firsts[word + 1] == firsts[word] + 1:
                in_english_alone += times[word]
        else:
            elsewhere += times[word]
    # No language can have more than English: most texts need no count by language.
    if (declared < 0 or declared == _ENGLISH) and elsewhere <= in_english_alone:
        return (_FEW_STOP_WORDS if in_english < MIN_STOP_WORD_SHARE * words else _ENGLISH), 0
    counts, different = np.zeros(_KNOWN, np.int64), np.zeros(_KNOWN, np.int64)
    for word in met:
        for k in range(firsts[word], firsts[word + 1]):
            counts[languages[k]] += times[word]
            different[languages[k]] += 1
    highest = counts.max()
    if highest < MIN_STOP_WORD_SHARE * words:
        return _FEW_STOP_WORDS, 0
    if declared >= 0 and counts[declared] >= _DECLARED_SHARE * highest:
        likeliest = declared
    else:
        likeliest = _ENGLISH if counts[_ENGLISH] == highest else int(counts.argmax())
    return likeliest, different[likeliest]


@kernel
def _tally(
    points: Array,
    starts: Array,
    ends: Array,
    declared: Array,
    in_ascii: Array,
    in_word: Array,
    is_letter: Array,
    lower: Array,
    keys: Array,
    values: Array,
    firsts: Array,
    languages: Array,
    english: Array,
) -> Array:
    """Return (D, 5) the language of each text and counts of its words; columns above. Of English texts and those
    in no known language only that counts.

    Args:
        starts, ends (D,): where each text begins and ends among the points; declared (D,): its language's number or -1;
            in_ascii (D,): whether it is, and so in no script that shows its language.
    """
    rows = np.zeros((starts.size, 5), np.int64)
    times = np.zeros(firsts.size - 1, np.int64)
    met = np.empty(firsts.size - 1, np.int64)
    for doc in range(starts.size):
        words, length, with_letters, different = 0, 0, 0, 0
        language = _NOT_SAMPLED
        i, end = starts[doc], ends[doc]
        while i < end and language != _ENGLISH and not (language == _FEW_STOP_WORDS and in_ascii[doc]):
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
            if words <= _SAMPLED_WORDS:
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
                    if times[word] == 0:
                        met[different] = word
                        different += 1
                    times[word] += 1
            if words == _SAMPLED_WORDS:
                language, rows[doc, _STOP_WORDS] = _likeliest(
                    met[:different], times, words, declared[doc], firsts, languages, english
                )
        if language == _NOT_SAMPLED:
            language, rows[doc, _STOP_WORDS] = _likeliest(
                met[:different], times, words, declared[doc], firsts, languages, english
            )
        for word in met[:different]:
            times[word] = 0
        if language == _FEW_STOP_WORDS and in_ascii[doc]:
            language = _UNKNOWN
        rows[doc, _LANGUAGE] = language
        rows[doc, _WORDS], rows[doc, _LENGTH], rows[doc, _WITH_LETTERS] = words, length, with_letters
    return rows
