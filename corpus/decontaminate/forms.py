"""The forms of many texts at once, compiled: see `corpus.decontaminate.items.forms_of`, which defines them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.decontaminate.items import PUNCTUATION, forms_of, with_spaces
from corpus.documents.words import BASIC, Bytes
from infra.native import kernel

TEXT, BARE, JSON, HTML, HTML_DECIMAL = range(5)
"""The forms of a text: unchanged, without punctuation, and as JSON and HTML write it."""
_MARKUP = (38, 60, 62, 34, 39)  # & < > " '
_ENTITIES = (b"&amp;", b"&lt;", b"&gt;", b"&quot;", b"&#x27;", b"&#39;")
_ENTITY_BYTES = np.frombuffer(b"".join(_ENTITIES), np.uint8)
_ENTITY_ENDS = np.cumsum([0, *map(len, _ENTITIES)])
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


class Forms(NamedTuple):
    """T texts in their forms.

    data: the UTF-8 of F forms, of which ends: (F + 1,) the offsets between them.
    rows: (T, 5) the form that has the words of each text in that form. A form with the same words as the text is the
        text.
    changed: the texts that `with_spaces` changes, ascending.
    """

    data: Bytes
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    changed: NDArray[np.int64]


def write_forms(texts: Sequence[str]) -> Forms:
    encoded = [text.encode() for text in texts]
    # A line break ends what belongs together for `with_spaces`.
    joined = b"\n".join(encoded)
    spaced = with_spaces(joined)
    data = np.frombuffer(spaced, np.uint8)
    sizes = np.array(list(map(len, encoded)), np.int64)
    begins = np.cumsum(sizes + 1) - sizes - 1
    # An escaped character has at most six bytes, in JSON a quotation mark or backslash two. There are two HTML forms.
    escapes, markup = np.count_nonzero((data < 32) | (data > 126)), sum(map(spaced.count, bytes(_MARKUP)))
    longest = 6 * data.size + 5 * int(escapes) + 10 * markup
    out, ends = np.empty(longest, np.uint8), np.zeros(5 * sizes.size + 1, np.int64)
    rows = np.empty((sizes.size, 5), np.int64)
    count = _write_forms(data, begins, sizes, _punctuation_table(), _byte_kinds(), out, ends, rows)
    written = [out[: ends[count]]]
    # Characters above U+10000 are rare, and only Python knows which of them are punctuation.
    others = np.flatnonzero(rows[:, BARE] < 0).tolist()
    if others:
        forms = [form.encode() for text in others for form in forms_of(texts[text])]
        rows[others] = count + np.arange(len(forms)).reshape(-1, 5)
        ends = np.append(ends[: count + 1], ends[count] + np.cumsum([len(form) for form in forms]))
        count = ends.size - 1
        written += [np.frombuffer(form, np.uint8) for form in forms]
    offsets = np.flatnonzero(np.frombuffer(joined, np.uint8) != data)
    changed = np.unique(np.searchsorted(begins, offsets, side="right") - 1)
    return Forms(np.concatenate(written) if others else written[0], ends[: count + 1], rows, changed)


@cache
def _punctuation_table() -> NDArray[np.bool_]:
    """Mask of the characters below U+10000 that a text without punctuation lacks, (65536,)."""
    table = np.zeros(BASIC, np.bool_)
    table[[ord(mark) for mark in PUNCTUATION.findall("".join(map(chr, range(BASIC))))]] = True
    return table


_MARK, _SPACE, _ESCAPED, _MARKED_UP, _APOSTROPHE, _NOT_ASCII, _ABOVE_BASIC = (1 << bit for bit in range(7))


@cache
def _byte_kinds() -> NDArray[np.uint8]:
    """The bits above of each byte, (256,)."""
    kinds = np.zeros(256, np.uint8)
    kinds[:128][_punctuation_table()[:128]] |= _MARK
    kinds[[ord(" "), ord("\n")]] |= _SPACE
    kinds[:32] |= _ESCAPED
    kinds[127:] |= _ESCAPED
    kinds[list(b'&<>"')] |= _MARKED_UP
    kinds[ord("'")] |= _APOSTROPHE
    kinds[128:] |= _NOT_ASCII
    kinds[0xF0:] |= _ABOVE_BASIC
    return kinds


@kernel
def _character(data: Bytes, at: int) -> tuple[np.int64, int]:
    """The code point below U+10000 at data[at], and its bytes."""
    first = np.int64(data[at])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | (np.int64(data[at + 1]) & 0x3F), 2
    return (first & 0x0F) << 12 | (np.int64(data[at + 1]) & 0x3F) << 6 | (np.int64(data[at + 2]) & 0x3F), 3


@kernel
def _write_forms(
    data: Bytes,
    begins: NDArray[np.int64],
    sizes: NDArray[np.int64],
    punctuation: NDArray[np.bool_],
    kinds_of: NDArray[np.uint8],
    out: Bytes,
    ends: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> int:
    """Write each text and its forms with other words than the text; return how many these are.

    Args:
        rows: see Forms; -1 in all columns but the first for a text with characters above U+10000.
    """
    count = 0
    for text in range(sizes.size):
        begin, end = begins[text], begins[text] + sizes[text]
        filled = ends[count]
        out[filled : filled + end - begin] = data[begin:end]
        rows[text] = count
        count += 1
        ends[count] = filled + end - begin
        kinds, has_joined_words, is_behind_mark, is_behind_space = np.uint8(0), False, False, True
        for byte in data[begin:end]:
            kind = kinds_of[byte]
            kinds |= kind
            if kind & _MARK:
                is_behind_mark = True
            else:
                is_space = kind & _SPACE != 0
                has_joined_words |= is_behind_mark and not is_space and not is_behind_space
                is_behind_mark, is_behind_space = False, is_space
        if kinds & _ABOVE_BASIC:
            rows[text, 1:] = -1
            continue
        if has_joined_words or kinds & _NOT_ASCII:
            last = _write_bare(data, begin, end, punctuation, out, ends[count])
            if last >= 0:
                rows[text, BARE] = count
                count += 1
                ends[count] = last
        if kinds & _ESCAPED:
            rows[text, JSON] = count
            last = _write_json(data, begin, end, out, ends[count])
            count += 1
            ends[count] = last
        if kinds & (_MARKED_UP | _APOSTROPHE):
            rows[text, HTML:] = count
            last = _write_html(data, begin, end, False, out, ends[count])
            count += 1
            ends[count] = last
        if kinds & _APOSTROPHE:
            rows[text, HTML_DECIMAL] = count
            last = _write_html(data, begin, end, True, out, ends[count])
            count += 1
            ends[count] = last
    return count


@kernel
def _write_bare(data: Bytes, begin: int, end: int, punctuation: NDArray[np.bool_], out: Bytes, filled: int) -> int:
    """Write a text without punctuation, and return its end; -1 where the words stay: no mark joins two characters."""
    has_other_words, is_behind_mark, is_behind_space = False, False, True
    at = begin
    while at < end:
        point, size = _character(data, at)
        if punctuation[point]:
            # Some marks beyond ASCII are of words, such as vowel signs.
            has_other_words |= size > 1
            is_behind_mark = True
        else:
            is_space = point == 32 or point == 10
            has_other_words |= is_behind_mark and not is_space and not is_behind_space
            is_behind_mark, is_behind_space = False, is_space
            for byte in range(at, at + size):
                out[filled] = data[byte]
                filled += 1
        at += size
    return filled if has_other_words else -1


@kernel
def _write_json(data: Bytes, begin: int, end: int, out: Bytes, filled: int) -> int:
    """Write a text as the inside of a string of JSON in ASCII, and return its end."""
    at = begin
    while at < end:
        point, size = _character(data, at)
        at += size
        if 32 <= point <= 126:
            if point == 34 or point == 92:
                out[filled] = 92
                filled += 1
            out[filled] = point
            filled += 1
            continue
        out[filled] = 92
        letter = 117  # u
        if point == 8:
            letter = 98
        elif point == 9:
            letter = 116
        elif point == 10:
            letter = 110
        elif point == 12:
            letter = 102
        elif point == 13:
            letter = 114
        out[filled + 1] = letter
        filled += 2
        if letter == 117:
            for shift in (12, 8, 4, 0):
                out[filled] = _HEX[(point >> shift) & 15]
                filled += 1
    return filled


@kernel
def _write_html(data: Bytes, begin: int, end: int, is_decimal: bool, out: Bytes, filled: int) -> int:
    """Write a text as HTML has it, with `&#39;` or `&#x27;` for an apostrophe, and return its end."""
    for at in range(begin, end):
        byte = data[at]
        entity = -1
        for mark in range(len(_MARKUP)):
            if byte == _MARKUP[mark]:
                entity = mark
        if entity < 0:
            out[filled] = byte
            filled += 1
            continue
        if is_decimal and byte == 39:
            entity += 1
        for offset in range(_ENTITY_ENDS[entity], _ENTITY_ENDS[entity + 1]):
            out[filled] = _ENTITY_BYTES[offset]
            filled += 1
    return filled
