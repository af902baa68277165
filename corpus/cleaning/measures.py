"""Native measures of documents' words and lines for the rules of Gopher and FineWeb."""

from __future__ import annotations

import numpy as np

from corpus.cleaning.kernels import ALPHABETIC, SOLID, STOP_WORD_SHIFT, Array
from corpus.cleaning.languages.characters import FIRST_FORMAT, FORMAT, LETTER, LINE_BREAK, SPACE, TERMINAL
from corpus.cleaning.repeats import repeated_pieces
from infra.native import kernel

_NEW_LINE, _RETURN, _DOT, _HASH, _ELLIPSIS, _BULLET, _HYPHEN = 10, 13, 46, 35, 0x2026, 0x2022, 45

# Columns of what the functions below return.
(
    WORDS,
    SOLID_WORDS,
    SOLID_LENGTH,
    ALPHABETIC_WORDS,
    STOP_WORDS,
    HASHES,
    ELLIPSES,
    LINES,
    BULLET_LINES,
    ELLIPSIS_LINES,
) = range(10)
PARAGRAPHS, REPEATED_PARAGRAPHS, PARAGRAPH_CHARACTERS, REPEATED_LINES, LINE_CHARACTERS, PIECES = range(6)
VISIBLE, UNSPACED = range(2)
FULL_LINES, ENDED_LINES, SHORT_LINES, REPEATED_CHARACTERS, NEW_LINES = range(5)


@kernel
def gopher_quality(
    points: Array, doc_starts: Array, doc_words: Array, lengths: Array, bits: Array, classes: Array
) -> Array:
    """Return counts (D, 10) of words, symbols and lines; columns above."""
    counts = np.zeros((doc_starts.size - 1, 10), np.int64)
    for doc in range(doc_starts.size - 1):
        stop_words = np.uint64(0)
        for word in range(doc_words[doc], doc_words[doc + 1]):
            kind = bits[word]
            if kind & SOLID:
                counts[doc, SOLID_WORDS] += 1
                counts[doc, SOLID_LENGTH] += lengths[word]
            if kind & ALPHABETIC:
                counts[doc, ALPHABETIC_WORDS] += 1
            if kind >> STOP_WORD_SHIFT:
                stop_words |= np.uint64(1) << np.uint64((kind >> STOP_WORD_SHIFT) - 1)
        counts[doc, WORDS] = doc_words[doc + 1] - doc_words[doc]
        while stop_words:
            counts[doc, STOP_WORDS] += 1
            stop_words &= stop_words - np.uint64(1)
        _count_symbols(points, doc_starts[doc], doc_starts[doc + 1], counts[doc])
        _count_lines(points, doc_starts[doc], doc_starts[doc + 1], classes, counts[doc])
    return counts


@kernel
def _count_symbols(points: Array, start: int, end: int, counts: Array) -> None:
    dots = 0
    for i in range(start, end):
        point = points[i]
        if point == _DOT:
            dots += 1
            if dots == 3:
                counts[ELLIPSES] += 1
                dots = 0
            continue
        dots = 0
        if point == _HASH:
            counts[HASHES] += 1
        elif point == _ELLIPSIS:
            counts[ELLIPSES] += 1


@kernel
def _count_lines(points: Array, start: int, end: int, classes: Array, counts: Array) -> None:
    """Lines as str.splitlines cuts them."""
    i = start
    while i < end:
        first, last = -1, -1
        while i < end and not classes[points[i]] & LINE_BREAK:
            if not classes[points[i]] & (SPACE | FORMAT):
                first = i if first < 0 else first
                last = i
            i += 1
        if i < end:
            i += 2 if points[i] == _RETURN and i + 1 < end and points[i + 1] == _NEW_LINE else 1
        counts[LINES] += 1
        if first < 0:
            continue
        if points[first] == _BULLET or points[first] == _HYPHEN:
            counts[BULLET_LINES] += 1
        dots = 0
        while last - dots >= first and points[last - dots] == _DOT:
            dots += 1
        if dots >= 3 or points[last] == _ELLIPSIS:
            counts[ELLIPSIS_LINES] += 1


@kernel
def characters(points: Array, doc_starts: Array, classes: Array, unspaced: Array) -> Array:
    """Return (D, 2) of each document how many characters it has, without format characters, which have no width; and
    whether at least a third of its letters are of scripts that put no space between words, as `is_unspaced` has it.

    unspaced (1,114,112,): mask of the characters of those scripts.
    """
    counts = np.zeros((doc_starts.size - 1, 2), np.int64)
    for doc in range(doc_starts.size - 1):
        start, end = doc_starts[doc], doc_starts[doc + 1]
        formats, of_unspaced, letters = 0, 0, 0
        for i in range(start, end):
            point = points[i]
            if point >= FIRST_FORMAT:
                formats += classes[point] & FORMAT != 0
                of_unspaced += unspaced[point]
        if of_unspaced:
            for i in range(start, end):
                letters += classes[points[i]] & LETTER != 0
        counts[doc, VISIBLE] = end - start - formats
        counts[doc, UNSPACED] = of_unspaced > 0 and 3 * of_unspaced >= letters
    return counts


@kernel
def gopher_repetition(points: Array, doc_starts: Array, selected: Array, classes: Array) -> Array:
    """Return counts (D, 6) of paragraphs and lines and of the repeated among them; columns above. Of documents that are
    not selected (D,) they are 0."""
    counts = np.zeros((doc_starts.size - 1, 6), np.int64)
    for doc in range(doc_starts.size - 1):
        if not selected[doc]:
            continue
        start, end = doc_starts[doc], doc_starts[doc + 1]
        first, last = start, end
        while first < last and classes[points[first]] & SPACE:
            first += 1
        while last > first and classes[points[last - 1]] & SPACE:
            last -= 1
        paragraphs = repeated_pieces(points, first, last, 2, False, classes)
        lines = repeated_pieces(points, start, end, 1, False, classes)
        for column in range(3):
            counts[doc, column] = paragraphs[column]
        counts[doc, REPEATED_LINES], counts[doc, LINE_CHARACTERS], counts[doc, PIECES] = lines[1], lines[2], lines[0]
    return counts


@kernel
def fineweb(points: Array, doc_starts: Array, selected: Array, classes: Array, short: int) -> Array:
    """Return counts (D, 5) of lines that are not blank, by how they end and how long they are; columns above. Of
    documents that are not selected (D,) they are 0."""
    counts = np.zeros((doc_starts.size - 1, 5), np.int64)
    for doc in range(doc_starts.size - 1):
        if not selected[doc]:
            continue
        end = doc_starts[doc + 1]
        line, blank, formats = doc_starts[doc], True, 0
        for i in range(doc_starts[doc], end + 1):
            if i < end and points[i] != _NEW_LINE:
                blank = blank and classes[points[i]] & (SPACE | FORMAT) != 0
                formats += classes[points[i]] & FORMAT != 0
                continue
            if i < end:
                counts[doc, NEW_LINES] += 1
            if not blank:
                counts[doc, FULL_LINES] += 1
                last = i - 1
                while classes[points[last]] & FORMAT:
                    last -= 1
                if classes[points[last]] & TERMINAL:
                    counts[doc, ENDED_LINES] += 1
                if i - line - formats <= short:
                    counts[doc, SHORT_LINES] += 1
            line, blank, formats = i + 1, True, 0
        counts[doc, REPEATED_CHARACTERS] = repeated_pieces(points, doc_starts[doc], end, 1, True, classes)[2]
    return counts
