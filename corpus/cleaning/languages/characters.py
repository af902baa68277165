"""Classes of code points, by Unicode's general categories, as tables for kernels and as sets for patterns."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

CODE_POINTS = 0x110000

# Scripts without case, whole blocks: their marks and punctuation belong to words, as in spaCy's character classes.
UNCASED_BLOCKS = (
    (0x0591, 0x05F4),  # Hebrew
    (0xFB1D, 0xFB4F),
    (0x0620, 0x064A),  # Arabic and Persian
    (0x066E, 0x06D5),
    (0x06E5, 0x06FF),
    (0x0750, 0x077F),
    (0x08A0, 0x08BD),
    (0xFB50, 0xFBB1),
    (0xFBD3, 0xFD3D),
    (0xFD50, 0xFDC7),
    (0xFDF0, 0xFDFB),
    (0xFE70, 0xFEFC),
    (0x1EE00, 0x1EEBB),
    (0x0900, 0x09FF),  # Devanagari, Bengali
    (0x0B80, 0x0CFF),  # Tamil, Telugu, Kannada
    (0x0D80, 0x0DFF),  # Sinhala
    (0x1100, 0x137F),  # Hangul jamo, Ethiopic
    (0x2E80, 0x2FDF),  # CJK, kana, hangul
    (0x2FF0, 0x30FF),
    (0x31C0, 0x31EF),
    (0x3200, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
    (0x1F200, 0x1F2FF),
    (0x20000, 0x2EBEF),
    (0x2F800, 0x2FA1F),
)


def _every_character() -> str:
    """All code points in their order, surrogates among them."""
    return np.arange(CODE_POINTS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")


@cache
def _categories() -> tuple[NDArray[np.uint8], list[str]]:
    """The number of every code point's general category, shape (1,114,112,), and the categories' names, e.g. "Ll"."""
    numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
    category_numbers = map(numbers.__getitem__, map(unicodedata.category, _every_character()))
    return np.fromiter(category_numbers, np.uint8, CODE_POINTS), list(numbers)


def in_categories(*names: str) -> NDArray[np.bool_]:
    """Mask over all code points of those whose category begins with one of the names: "L" takes all letters."""
    numbers, category_names = _categories()
    return np.array([name.startswith(names) for name in category_names])[numbers]


def uncased() -> NDArray[np.bool_]:
    mask = np.zeros(CODE_POINTS, bool)
    for first, last in UNCASED_BLOCKS:
        mask[first : last + 1] = True
    return mask


def members(characters: Iterable[str]) -> NDArray[np.bool_]:
    mask = np.zeros(CODE_POINTS, bool)
    mask[[ord(character) for character in characters]] = True
    return mask


def spaces() -> NDArray[np.bool_]:
    """Return a mask of the characters for which str.isspace is true."""
    mask = np.zeros(CODE_POINTS, bool)
    mask[[match.start() for match in re.finditer(r"\s", _every_character())]] = True
    return mask


def in_class(characters: str) -> NDArray[np.bool_]:
    """Return a mask of the characters that the inside of a regular expression's [...] matches."""
    mask = np.zeros(CODE_POINTS, bool)
    for match in re.finditer(f"[{characters}]+", _every_character()):
        mask[match.start() : match.end()] = True
    return mask


@cache
def lower_table() -> NDArray[np.uint32]:
    """The lower-case code point of every code point; the one that becomes two, İ, stays."""
    lower = _every_character().replace("İ", "_").lower().encode("utf-32-le", "surrogatepass")
    table = np.frombuffer(bytearray(lower), np.uint32)
    table[ord("İ")] = ord("İ")
    return table


def as_class(mask: NDArray[np.bool_]) -> str:
    """The inside of a regular expression's [...] for a mask over code points."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return "".join(
        f"\\U{first:08x}-\\U{last - 1:08x}"
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )


# What ends a sentence in any script: Unicode's Sentence_Terminal, as FineWeb counts lines by it.
TERMINALS = (
    "!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕៖៙៚᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼\u2e53\u2e54。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡"
    "\U00010a56\U00010a57\U00010f55\U00010f56\U00010f57\U00010f58\U00010f59\U00010f86\U00010f87\U00010f88\U00010f89"
    "\U00011047\U00011048\U000110be\U000110bf\U000110c0\U000110c1\U00011141\U00011142\U00011143\U000111c5\U000111c6"
    "\U000111cd\U000111de\U000111df\U00011238\U00011239\U0001123b\U0001123c\U000112a9\U0001144b\U0001144c\U000115c2"
    "\U000115c3\U000115c9\U000115ca\U000115cb\U000115cc\U000115cd\U000115ce\U000115cf\U000115d0\U000115d1\U000115d2"
    "\U000115d3\U000115d4\U000115d5\U000115d6\U000115d7\U00011641\U00011642\U0001173c\U0001173d\U0001173e\U00011944"
    "\U00011946\U00011a42\U00011a43\U00011a9b\U00011a9c\U00011c41\U00011c42\U00011ef7\U00011ef8\U00011f43\U00011f44"
    "\U00016a6e\U00016a6f\U00016af5\U00016b37\U00016b38\U00016b44\U00016e98\U0001bc9f\U0001da88"
)
# A word of nothing but these, terminals and control characters is no word to Gopher's counts, as datatrove has it.
SYMBOLS = "\"#$%&'()*+,-/:;<=>@[\\]^_`{|}~«»´–—’“”„…∶━►、〈〉《》「」【】％（），１：；～"
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# Bits of the class of a code point. FORMAT: characters without a width, such as joiners (ZWNJ, ZWJ), soft hyphens, byte
# order marks and marks of direction. They belong to the word they are in, and are counted nowhere.
SPACE, LINE_BREAK, LETTER, SYMBOL, TERMINAL, PUNCTUATION, DIGIT, FORMAT = (1 << bit for bit in range(8))
FORMAT_CATEGORY = "Cf"
FIRST_FORMAT = 0xAD
"""The first of the format characters, the soft hyphen."""


@cache
def class_table() -> NDArray[np.uint8]:
    """The bits above for every code point, shape (1,114,112,)."""
    controls = in_categories("Cc") & ~members("\n\t")
    masks = {
        SPACE: spaces(),
        LINE_BREAK: members(LINE_BREAKS),
        LETTER: in_categories("L"),
        SYMBOL: members(SYMBOLS) | members(TERMINALS) | controls,
        TERMINAL: members(TERMINALS),
        PUNCTUATION: in_categories("P"),
        DIGIT: in_categories("Nd"),
        FORMAT: in_categories(FORMAT_CATEGORY),
    }
    table = np.zeros(CODE_POINTS, np.uint8)
    for bit, mask in masks.items():
        table[mask] |= bit
    return table


@cache
def _format_pattern() -> re.Pattern[str]:
    return re.compile(f"[{as_class(in_categories(FORMAT_CATEGORY))}]+")


def without_format(text: str) -> str:
    """Return a text without its format characters, see FORMAT."""
    return text if text.isascii() else _format_pattern().sub("", text)
