"""Native line rules of C4: lines that are not sentences are removed from a document, and some words drop all of it."""

from __future__ import annotations

import numpy as np

from corpus.cleaning.kernels import ALL_PUNCTUATION, SENTENCE_END, Array
from corpus.cleaning.languages.characters import DIGIT, FORMAT, LINE_BREAK, SPACE
from infra.native import kernel

_NEW_LINE, _RETURN, _DOT, _OPEN, _CLOSE, _CURLY = 10, 13, 46, 91, 93, 123

# Outcomes of a line, and of a document that a word drops.
KEPT, LONG_WORD, NO_END, FEW_WORDS, BANNED_WORD, POLICY = range(6)
LOREM_IPSUM, CURLY_BRACKET = 1, 2


@kernel
def _citation_end(points: Array, i: int, end: int, classes: Array, marks: Array, mark_starts: Array) -> int:
    """Return the end of a citation mark that opens at i; i if there is none: [12], [], [edit], [citation needed]."""
    j = i + 1
    while j < end and classes[points[j]] & DIGIT:
        j += 1
    if j < end and points[j] == _CLOSE:
        return j + 1
    for mark in range(mark_starts.size - 1):
        size = mark_starts[mark + 1] - mark_starts[mark]
        same = i + size <= end
        for k in range(size):
            if same and points[i + k] != marks[mark_starts[mark] + k]:
                same = False
        if same:
            return i + size
    return i


@kernel
def _contains(text: Array, start: int, end: int, words: Array, word_starts: Array, firsts: Array, lower: Array) -> int:
    """Bits of the words, given in lower case, that a line contains in any case."""
    mask = 0
    for i in range(start, end):
        point = lower[text[i]]
        if point >= firsts.size or not firsts[point]:
            continue
        for word in range(word_starts.size - 1):
            size = word_starts[word + 1] - word_starts[word]
            same = i + size <= end and words[word_starts[word]] == point
            for k in range(1, size):
                if not same:
                    break
                same = lower[text[i + k]] == words[word_starts[word] + k]
            if same:
                mask |= 1 << word
    return mask


@kernel
def edit(
    points: Array,
    doc_starts: Array,
    selected: Array,
    classes: Array,
    lower: Array,
    ends: Array,
    citations: bool,
    marks: Array,
    mark_starts: Array,
    max_word_length: int,
    min_words: int,
    lorem: int,
    banned: int,
    ignored: int,
    curly: bool,
    words: Array,
    word_starts: Array,
    firsts: Array,
) -> tuple[Array, Array, Array, Array]:
    """Keep the lines of documents that keep the rules, joined by newlines.

    wanted (D,): which documents.

    Returns the text (Q,), where each document starts in it (D + 1,), the fate of the documents (D,): 0 or the word that
    took it out, and how many lines had each fate (D, 6).

    Args:
        ends: table of code points that may end a line, empty for any; "..." is no end.
        max_word_length, min_words: -1 for none.
        lorem, banned, ignored: bits of those that take out the document, the line, nothing; the others take out the
            line as a policy.
        words: the watched words behind each other in lower case.
    """
    out = np.empty(points.size + doc_starts.size, np.uint32)
    starts = np.zeros(doc_starts.size, np.int64)
    fates = np.zeros(doc_starts.size - 1, np.int8)
    lines = np.zeros((doc_starts.size - 1, 6), np.int64)
    size = 0
    for doc in range(doc_starts.size - 1):
        starts[doc] = size
        i, end = doc_starts[doc], doc_starts[doc + 1]
        while selected[doc] and i < end:
            first = i
            while i < end and not classes[points[i]] & LINE_BREAK:
                i += 1
            last = i
            if i < end:
                i += 2 if points[i] == _RETURN and i + 1 < end and points[i + 1] == _NEW_LINE else 1
            while first < last and classes[points[first]] & SPACE:
                first += 1
            while last > first and classes[points[last - 1]] & SPACE:
                last -= 1
            count, longest, run = 0, 0, 0
            for j in range(first, last):
                if classes[points[j]] & SPACE:
                    run = 0
                elif not classes[points[j]] & FORMAT:
                    count += run == 0
                    run += 1
                    longest = max(longest, run)
            if max_word_length >= 0 and longest > max_word_length:
                lines[doc, LONG_WORD] += 1
                continue
            # The separator is taken back if the line is not kept.
            line = size + (lines[doc, KEPT] > 0)
            if line > size:
                out[size] = _NEW_LINE
            target, j = line, first
            while j < last:
                if citations and points[j] == _OPEN:
                    citation_end = _citation_end(points, j, last, classes, marks, mark_starts)
                    if citation_end > j:
                        j = citation_end
                        continue
                out[target] = points[j]
                target += 1
                j += 1
            shown = target
            while shown > line and classes[out[shown - 1]] & FORMAT:
                shown -= 1
            dots = shown - line >= 3 and out[shown - 1] == _DOT and out[shown - 2] == _DOT and out[shown - 3] == _DOT
            if ends.size and (shown == line or not ends[out[shown - 1]] or dots):
                lines[doc, NO_END] += 1
                continue
            if count < min_words:
                lines[doc, FEW_WORDS] += 1
                continue
            mask = _contains(out, line, target, words, word_starts, firsts, lower)
            if mask & lorem:
                fates[doc] = LOREM_IPSUM
                break
            if mask & banned:
                lines[doc, BANNED_WORD] += 1
                continue
            if curly:
                for k in range(line, target):
                    if out[k] == _CURLY:
                        fates[doc] = CURLY_BRACKET
                        break
            if fates[doc]:
                break
            if mask & ~(lorem | banned | ignored):
                lines[doc, POLICY] += 1
                continue
            lines[doc, KEPT] += 1
            size = target
    starts[doc_starts.size - 1] = size
    return out[:size], starts, fates, lines


@kernel
def count_sentences(
    points: Array, doc_starts: Array, bounds: Array, doc_chunks: Array, chunk_words: Array, bits: Array
) -> Array:
    """Return the number of sentences of each document (D,), at least one per line, as spaCy's sentencizer finds them: a
    sentence begins with the first word behind an end of sentence that is no punctuation itself. Space but for one
    blank behind a word counts as a word.
    """
    counts = np.zeros(doc_starts.size - 1, np.int64)
    for doc in range(doc_starts.size - 1):
        chunk, last_chunk = doc_chunks[doc], doc_chunks[doc + 1]
        line = doc_starts[doc]
        while line < doc_starts[doc + 1] or (line == doc_starts[doc + 1] and line > doc_starts[doc]):
            end = line
            while end < doc_starts[doc + 1] and points[end] != _NEW_LINE:
                end += 1
            sentences, ended, position = 1, False, line
            while True:
                start = bounds[chunk, 0] if chunk < last_chunk and bounds[chunk, 0] < end else end
                space = start - position
                blank = space > 1 or (space == 1 and (position == line or points[position] != 32))
                if blank and ended:
                    sentences += 1
                    ended = False
                if start == end:
                    break
                for word in range(chunk_words[chunk], chunk_words[chunk + 1]):
                    is_end = bits[word] & SENTENCE_END
                    if ended and not is_end and not bits[word] & ALL_PUNCTUATION:
                        sentences += 1
                        ended = False
                    elif is_end:
                        ended = True
                position = bounds[chunk, 1]
                chunk += 1
            counts[doc] += sentences
            line = end + 1
    return counts
