"""Words of UTF-8 text together with the marks that carry meaning, compiled: what dedupe compares texts by.

Words are those of `corpus.documents.words`. What a mark changes is the hash of a word, so that there are as many words
with marks as without, and texts without such marks have the same hashes. These carry meaning:

- everywhere: vowel, tone and voicing signs of scripts other than Latin, Greek and Cyrillic; raised and lowered digits.
- in passages of code: operators, brackets and other marks that a parser reads. Commas, semicolons and quotes are left
  out, since formatters move them.
- in prose: signs and operators of numbers and single letters (-12, 3 x + 5, p < 0.05, 5 %), operators of several marks
  such as && and ->, signs of currencies, other mathematical signs, and the marks of names such as C++, C# and A*.
- in passages of tonal languages in Latin letters (Vietnamese, Yoruba, Igbo, Pinyin): accents.

A passage ends with a blank line. A mark belongs to the word that follows it, the last ones of a text to its last word.
"""

from __future__ import annotations

import string
import unicodedata
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.documents.words import (
    ALONE,
    BASIC,
    IGNORED,
    SEPARATOR,
    Bytes,
    Hashes,
    character_table,
    folded_code_points,
    mix64,
)
from infra.native import kernel

MARK = 1 << 25
"""A sign that may change a word; the low bits are its code point, the same for all forms of the sign."""
SIGN = 1 << 26
"""A combining sign that counts in every text."""
TONE = 1 << 27
"""A combining accent of Latin letters, which counts in tonal passages."""
RAISED = 1 << 28
"""A letter whose entry in `accents` counts in every text."""
_POINT = (1 << 24) - 1

_DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_CODE_MARKS = "!#$%&()*+-./:<=>?@[\\\\]^_{|}~"
_CODE_SHOWN_BY = "#$&()*+<=>@[\\\\]^_{|}~"
"""ASCII characters whose number distinguishes code from prose."""
_PROSE_MARKS = "·°‰"
CODE_SHARE = 4
"""A passage is code if it has at least one such character per this number of words. Code and HTML have one for 1 to 3
words, English prose one for 20 or more."""
TONAL_SHARE = 20
"""A passage is tonal if at least one in this number of its words has a letter that only tonal languages write:
Vietnamese has one in 2 or 3, other languages none. A short passage without any is tonal if it has as many accents as
words."""


class MarkTables(NamedTuple):
    """Classes of the characters below U+10000.

    words: (65536,) `corpus.documents.words.character_table`.
    codes: (65536,) the same with the bits above.
    accents: (65536,) the one or two combining characters of a letter, the second one in the upper half.
    folded: (256,) the folded letters and digits of ASCII, 0 for all other bytes.
    ascii: (256,) the bits _SHOWS_CODE to _OPERATOR of a byte.
    """

    words: NDArray[np.int32]
    codes: NDArray[np.int32]
    accents: NDArray[np.uint32]
    folded: NDArray[np.uint8]
    ascii: NDArray[np.uint8]


_SHOWS_CODE, _IN_CODE, _IN_PROSE, _DIGIT, _LETTER, _LINE_BREAK, _NOT_ASCII, _OPERATOR = 1, 2, 4, 8, 16, 32, 64, 128


@cache
def mark_tables() -> MarkTables:
    codes, accents = character_table().copy(), np.zeros(BASIC, np.uint32)
    for code in folded_code_points():
        character = chr(code)
        kind = unicodedata.category(character)
        parts = unicodedata.normalize("NFD", character)
        if kind == "Mn" and not 0xFE00 <= code <= 0xFE0F:  # variation selectors choose a picture
            codes[code] = code | (TONE if 0x300 <= code < 0x370 or 0x1AB0 <= code < 0x1DFF else SIGN)
        elif codes[code] > 0 and len(parts) > 1 and all(unicodedata.category(part) == "Mn" for part in parts[1:]):
            accents[code] = sum(ord(part) << 16 * index for index, part in enumerate(parts[1:3]))
            if all(ord(part) >= 0x370 for part in parts[1:]):
                codes[code] |= RAISED
        elif kind == "No" and (form := unicodedata.decomposition(character).partition(" ")[0]) in ("<super>", "<sub>"):
            codes[code] |= RAISED
            accents[code] = ord("^" if form == "<super>" else "_")
        elif kind in ("Sm", "Sc") or character in _CODE_MARKS or character in _PROSE_MARKS or character in _DASHES:
            plain = "-" if character in _DASHES else unicodedata.normalize("NFKC", character)
            codes[code] = (ord(plain) if len(plain) == 1 else code) | MARK
    ascii_classes = np.zeros(256, np.uint8)
    ascii_classes[128:] = _NOT_ASCII
    for bit, members in (
        (_SHOWS_CODE, _CODE_SHOWN_BY),
        (_IN_CODE, _CODE_MARKS),
        (_IN_PROSE, "!#%&*+-/:<=>^|~"),
        (_OPERATOR, "!%&*+-/:<=>^|~"),
        (_DIGIT, string.digits),
        (_LETTER, string.ascii_letters),
        (_LINE_BREAK, "\n"),
    ):
        ascii_classes[[ord(member) for member in members]] |= bit
    folded = np.zeros(256, np.uint8)
    folded[:128] = np.where(ascii_classes[:128] & (_DIGIT | _LETTER), codes[:128], 0)
    return MarkTables(character_table(), codes, accents, folded, ascii_classes)


@kernel
def _is_word(byte: int, ascii_classes: NDArray[np.uint8]) -> bool:
    return ascii_classes[byte] & (_DIGIT | _LETTER | _NOT_ASCII) != 0


@kernel
def _is_digit(byte: int) -> bool:
    return 48 <= byte <= 57


@kernel
def _counts_in_prose(
    data: Bytes, begin: int, here: int, after: int, end: int, point: int, mark: int, ascii_classes: NDArray[np.uint8]
) -> bool:
    """Return True if a mark at data[here:after] carries meaning between the words of a sentence.

    Args:
        point: its code point.
        mark: the code point that represents all forms of the sign.
    """
    if mark < 0x80 and _is_in_operator(data, begin, here, end, ascii_classes):
        return True
    left, right = here - 1, after
    while left >= begin and data[left] == 32:
        left -= 1
    while right < end and data[right] == 32:
        right += 1
    before = data[left] if left >= begin else 10
    behind = data[right] if right < end else 10
    is_close_before, is_close_behind = left == here - 1, right == after
    word_before, word_behind = _is_word(before, ascii_classes), _is_word(behind, ascii_classes)
    # Operands are numbers and single letters.
    number_before, number_behind = _is_digit(before), _is_digit(behind)
    letter_before = word_before and not number_before and (left == begin or not _is_word(data[left - 1], ascii_classes))
    letter_behind = (
        word_behind and not number_behind and (right + 1 >= end or not _is_word(data[right + 1], ascii_classes))
    )
    between = (number_before or letter_before) and (number_behind or letter_behind)
    stands_alone = is_close_behind and number_behind and not (is_close_before and word_before)
    if mark == 45:  # -
        if point == 0x2212 or (stands_alone and not (is_close_before and before == 41)):
            return True
        if is_close_before and letter_before and before < 0x80:
            # x-5, and C-- or A- before a space; not I--I.
            second = data[after + 1] if after + 1 < end else 32
            is_run = is_close_behind and behind == 45
            return (is_close_behind and number_behind) or not _is_word(
                second if is_run else (behind if is_close_behind else 32), ascii_classes
            )
        return between and not is_close_before and not is_close_behind
    if mark == 47 or mark == 38 or mark == 124:  # / & |
        return between and not is_close_before and not is_close_behind
    if mark == 42:  # *
        return between or (is_close_before and letter_before and not (is_close_behind and word_behind))
    if mark == 35:  # #
        return is_close_before and word_before and not (is_close_behind and word_behind)
    if mark == 37 or mark == 0xB0 or mark == 0x2030:  # % ° ‰
        return number_before
    if mark == 126:  # ~
        return stands_alone
    if mark == 33:  # != is one sign
        return is_close_behind and behind == 61
    if mark == 0xB7:  # ·
        return between
    if mark == 43 or mark == 60 or mark == 61 or mark == 62 or mark == 94:  # + < = > ^
        holds_left = word_before or before == 41 or before == 93 or before >= 0x80
        return (holds_left and (is_close_before or behind != 10)) or (stands_alone and mark != 61)
    return mark >= 0x80


@kernel
def _is_in_operator(data: Bytes, begin: int, here: int, end: int, ascii_classes: NDArray[np.uint8]) -> bool:
    """Return True if a mark is one of two or three that make up an operator: &&, || and -> between words; others, such
    as ** and >>=, with spaces around them. Dashes are none."""
    first, last = here, here + 1
    while first > begin and ascii_classes[data[first - 1]] & _OPERATOR and here - first < 3:
        first -= 1
    while last < end and ascii_classes[data[last]] & _OPERATOR and last - here < 3:
        last += 1
    size = last - first
    if size < 2 or size > 3 or first - 1 < begin or last >= end:
        return False
    before, behind = data[first - 1], data[last]
    if before == 32 and behind == 32:
        if first - 2 < begin or last + 1 >= end:
            return False
        dashes = 0
        for at in range(first, last):
            dashes += data[at] == 45
        return dashes < size and _is_word(data[first - 2], ascii_classes) and _is_word(data[last + 1], ascii_classes)
    # && || :: -> :=
    left, right = data[first], data[first + 1]
    is_known = (
        (left == 38 and right == 38)
        or (left == 124 and right == 124)
        or (left == 58 and (right == 58 or right == 61))
        or (left == 45 and right == 62)
    )
    return is_known and size == 2 and _is_word(before, ascii_classes) and _is_word(behind, ascii_classes)


@kernel
def hash_marked_words(
    data: Bytes,
    begin: int,
    end: int,
    tables: MarkTables,
    hashes: Hashes,
    starts: NDArray[np.int64],
    marks: Hashes,
    mark_places: NDArray[np.int64],
    mark_words: NDArray[np.int64],
) -> int:
    """Write the hash of each word of data[begin:end] with its marks, its place, and the hash of its marks, 0 for none,
    to `marks`; return the number of words.

    The end of a passage shows whether it is code; the places of its marks are kept until then. A passage whose letters
    show that it is tonal, unlike the one before it, is read once more.

    Args:
        hashes, starts: room for one word per byte.
        marks: for one word more, which takes the marks that no word follows.
        mark_places, mark_words: one entry per byte, scratch.
    """
    codes, accents, folded, ascii_classes = tables.codes, tables.accents, tables.folded, tables.ascii
    count = marked = 0
    inside = False
    value = np.uint64(0)
    last_end = -1
    is_tonal = is_read_again = False
    passage, passage_words = begin, 0
    marks[0] = 0
    shown = tones = accented = 0
    at = begin
    while True:
        is_passage_end = False
        # Most of most texts: ASCII words and what separates them.
        while at < end:
            letter = folded[data[at]]
            if letter:
                if not inside:
                    inside = True
                    value = np.uint64(0x9E3779B97F4A7C15)
                    starts[count] = at
                while letter:
                    value = (value ^ np.uint64(letter)) * np.uint64(0x100000001B3)
                    at += 1
                    if at >= end:
                        break
                    letter = folded[data[at]]
                if at >= end:
                    break
            kind = ascii_classes[data[at]]
            if kind & _NOT_ASCII:
                break
            if inside:
                hashes[count] = mix64(value)
                count += 1
                inside = False
            while not kind & (_LETTER | _DIGIT | _NOT_ASCII):
                # Stored whether it is a mark or not, since a branch costs more.
                mark_places[marked], mark_words[marked] = at, count
                marked += (kind & _IN_CODE) != 0
                shown += kind & _SHOWS_CODE
                at += 1
                if kind & _LINE_BREAK:
                    blank = at
                    while blank < end and (data[blank] == 32 or data[blank] == 9 or data[blank] == 13):
                        blank += 1
                    is_passage_end = blank < end and data[blank] == 10
                if is_passage_end or at >= end:
                    break
                kind = ascii_classes[data[at]]
            if is_passage_end:
                break
        if at < end and not is_passage_end:
            here = at
            first = np.int32(data[at])
            if first < 0xE0 and at + 1 < end:
                point = (first & 0x1F) << 6 | (np.int32(data[at + 1]) & 0x3F)
                code = codes[point]
                at += 2
            elif first < 0xF0 and at + 2 < end:
                second, third = np.int32(data[at + 1]) & 0x3F, np.int32(data[at + 2]) & 0x3F
                point = (first & 0x0F) << 12 | second << 6 | third
                code = codes[point]
                at += 3
            elif at + 3 < end:
                second, third = np.int32(data[at + 1]) & 0x3F, np.int32(data[at + 2]) & 0x3F
                point = (first & 0x07) << 18 | second << 12 | third << 6 | (np.int32(data[at + 3]) & 0x3F)
                # As in `corpus.documents.words.hash_words`.
                code = point | ALONE if point >= 0x20000 else SEPARATOR if point >= 0x1F000 else point
                at += 4
            else:
                at = end
                continue
            if code == IGNORED:
                continue
            if code > 0 and code & (SIGN | TONE):
                accented += 0x300 <= code & _POINT <= 0x303
                tones += code & _POINT == 0x309 or code & _POINT == 0x323
                if code & SIGN or is_tonal:
                    sign = np.uint64(code & _POINT)
                    if inside:
                        value = (value ^ sign) * np.uint64(0x100000001B3)
                    elif last_end == here:  # behind a character that is a word by itself
                        hashes[count - 1] = mix64(hashes[count - 1] ^ sign)
                        last_end = at
                continue
            if code > 0 and not code & (ALONE | MARK):
                if not inside:
                    inside = True
                    value = np.uint64(0x9E3779B97F4A7C15)
                    starts[count] = here
                value = (value ^ np.uint64(code & _POINT)) * np.uint64(0x100000001B3)
                if code & RAISED:
                    value = (value ^ np.uint64(accents[point])) * np.uint64(0x100000001B3)
                elif first < 0xF0:
                    accent = accents[point]
                    if accent:
                        accented += 0x300 <= accent & 0xFFFF <= 0x303
                        tones += 0x1EA0 <= point <= 0x1EF9 or 0x1A0 <= point <= 0x1B0 or 0x1CD <= point <= 0x1DC  # type: ignore[assignment]
                        if is_tonal:
                            value = (value ^ np.uint64(accent & 0xFFFF)) * np.uint64(0x100000001B3)
                            if accent >> 16:
                                value = (value ^ np.uint64(accent >> 16)) * np.uint64(0x100000001B3)
                continue
            if inside:
                hashes[count] = mix64(value)
                count += 1
                inside = False
            if code & MARK:
                mark_places[marked], mark_words[marked] = here, count
                marked += 1
                shown += code & _POINT < 0x80 and ascii_classes[code & _POINT] & _SHOWS_CODE != 0
            elif code & ALONE:
                value = np.uint64(code & (ALONE | _POINT))
                if code & RAISED:
                    value = (value ^ np.uint64(accents[point])) * np.uint64(0x100000001B3)
                hashes[count], starts[count], last_end = mix64(value), here, at
                count += 1
            continue
        if inside:
            hashes[count] = mix64(value)
            count += 1
            inside = False
        words = count - passage_words
        shows_tones = tones * TONAL_SHARE >= words if tones else words >= 4 and accented >= words
        if accented + tones > 0 and shows_tones != is_tonal and not is_read_again:
            at, count, is_tonal, is_read_again = passage, passage_words, shows_tones, True
        else:
            marks[passage_words + 1 : count + 1] = 0
            if marked:
                is_code = shown >= 3 and shown * CODE_SHARE >= words
                _add_marks(data, begin, end, tables, is_code, mark_places[:marked], mark_words, marks)
            if marked or marks[passage_words]:
                for word in range(passage_words, count):
                    if marks[word]:
                        hashes[word] = mix64(hashes[word] ^ marks[word])
            if at >= end:
                break
            passage, passage_words, is_read_again = at, count, False
        last_end = -1
        marked = shown = tones = accented = 0
    if marks[count] and count:
        hashes[count - 1] = mix64(hashes[count - 1] ^ marks[count])
        marks[count - 1] ^= marks[count]
    return count


@kernel
def _add_marks(
    data: Bytes,
    begin: int,
    end: int,
    tables: MarkTables,
    is_code: bool,
    positions: NDArray[np.int64],
    words: NDArray[np.int64],
    marks: Hashes,
) -> None:
    """Hash the marks of a passage that carry meaning into `marks` of the words that follow them."""
    for number in range(positions.size):
        here = positions[number]
        first = np.int32(data[here])
        if first < 0x80:
            point, after = first, here + 1
        elif first < 0xE0:
            point, after = (first & 0x1F) << 6 | (np.int32(data[here + 1]) & 0x3F), here + 2
        else:
            second, third = np.int32(data[here + 1]) & 0x3F, np.int32(data[here + 2]) & 0x3F
            point, after = (first & 0x0F) << 12 | second << 6 | third, here + 3
        mark = tables.codes[point] & _POINT
        kind = tables.ascii[mark] if mark < 0x80 else _IN_CODE | _IN_PROSE
        if is_code:
            # A dot before a name is a mark, that of a sentence is not.
            counts = kind & _IN_CODE and (mark != 46 or (after < end and _is_word(data[after], tables.ascii)))
        else:
            counts = kind & _IN_PROSE and _counts_in_prose(data, begin, here, after, end, point, mark, tables.ascii)
        if counts:
            word = words[number]
            marks[word] = mix64((marks[word] ^ np.uint64(mark)) * np.uint64(0x100000001B3) + np.uint64(1))


@kernel
def add_marks_at_the_ends(
    data: Bytes,
    starts: NDArray[np.int64],
    end: int,
    words: Hashes,
    marks: Hashes,
    count: int,
    n: int,
    filled: int,
    ascii_classes: NDArray[np.uint8],
    out: Hashes,
) -> int:
    """Add hashes to the n-grams of a text for the words with marks, and the single letters, at either end, so that each
    changes n of them wherever it is: C++ and F# as the first words of a text too. Return the number of hashes.

    Args:
        data, starts, end: the bytes of the text, the place of each word in them, and their end.
        out: room for count + n * n.
    """
    if count < n:
        return filled
    for edge in range(min(count, 2 * (n - 1))):  # the words in the middle are in n n-grams
        word = edge if edge < n - 1 else max(edge, count - 2 * (n - 1) + edge)
        first, behind = data[starts[word]], starts[word] + 1
        is_letter = ascii_classes[first] & _LETTER and (behind >= end or not _is_word(data[behind], ascii_classes))
        if not (marks[word] or is_letter):
            continue
        inside = min(word, count - n) - max(0, word - n + 1) + 1
        for number in range(n - inside):
            out[filled] = mix64(words[word] + np.uint64(number))
            filled += 1
    return filled
