"""Bytes to text: declared, detected or repaired encodings."""

from __future__ import annotations

import codecs
import io
import re
import unicodedata

from corpus.readers.frequent_characters import random_characters
from corpus.readers.streams import PROBE_BYTES, encoding_mark, is_wide, wide_without_mark

AUTO = "auto"
# Fewer bytes are too little evidence of the encoding; what is no UTF-8 on the web is mostly Windows-1252.
MIN_DETECT_BYTES = 64
DETECT_BYTES = 65_536
FALLBACK = "cp1252"
MIN_UTF8_CHARACTERS = 8
"""Characters of UTF-8 that text of another encoding than Windows-1252 does not look like by chance."""
_NO_ASCII = re.compile(rb"[\x80-\xff]")
_NOT_ASCII_TEXT = re.compile("[^\x00-\x7f]+")

# The second of two characters that one UTF-8 character of two bytes becomes when it is read as Windows-1252 or -1251.
_PUNCTUATION = "\x80-\xbf\u2013-\u2022\u2026\u2030\u2039\u203a\u20ac\u2122"
_CP1252 = f"{_PUNCTUATION}\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc"
_CP1251 = f"{_PUNCTUATION}\u0402-\u040f\u0452-\u045f\u0490\u0491\u2116"
# ftfy's own look takes long; most texts do not need it.
_MAC_ROMAN_OR_CP437 = "(?<=\u201a)\xc4.|(?<=[\u221a\u251c]).|(?<=\u0393)\xc7"
# One class of first characters, and what follows each of them: four alternatives take `re` three times as long.
_SUSPECT = re.compile(
    "[\x80-\x9f\xc2-\xf4\u0420\u0421\u201a\u221a\u0393\u251c](?:(?<=[\x80-\x9f])|"
    f"(?<=[\xc2-\xf4])[{_CP1252}]|(?<=[\u0420\u0421])[{_CP1251}]|{_MAC_ROMAN_OR_CP437})"
)


def decode(data: bytes, encoding: str, declared: str = "", likely: str = "") -> tuple[str, bool]:
    """The text of some bytes, and whether its encoding had to be guessed.

    encoding: as configured; `auto` takes the byte order mark, UTF-16 without one by its NULs, the encoding that the
        data declare of themselves unless they are UTF-8, UTF-8, the likely one, or what charset-normalizer finds, in
        this order.
    likely: what the file that these bytes are a part of seems to be in.
    Raises UnicodeDecodeError where a configured encoding does not fit.
    """
    if encoding != AUTO:
        name = python_name(encoding)
        if not is_wide(name):
            return data.decode(name), False
        unmarked = "" if encoding_mark(data[:4]) else wide_without_mark(data[:PROBE_BYTES])
        # Of utf-16-le and the like Python takes the mark for text.
        return data.decode(unmarked if unmarked.startswith(name) else name).removeprefix("\ufeff"), False
    marked = encoding_mark(data[:4]) or wide_without_mark(data[:PROBE_BYTES])
    if declared and not marked and (text := _utf8_against(declared, data)):
        return text, True
    for candidate in (marked, declared, "utf-8", likely):
        if candidate:
            try:
                return data.decode(python_name(candidate)), candidate == likely
            except (UnicodeError, LookupError):  # what a page declares may be no encoding of text at all
                continue
    return data.decode(detect(data) or FALLBACK, "replace"), True


def _utf8_against(declared: str, data: bytes) -> str:
    """The text of UTF-8 that is declared to be in another encoding, as by servers that call every page Latin-1; ""
    where it is not UTF-8, or too few characters show it."""
    if data.isascii():
        return ""
    try:
        text, name = data.decode(), python_name(declared)
    except (UnicodeError, LookupError):
        return ""
    if name == "utf-8-sig":
        return ""
    least = 1 if name == FALLBACK else MIN_UTF8_CHARACTERS
    return text if sum(map(len, _NOT_ASCII_TEXT.findall(text))) >= least else ""


def likely_encoding(stream: io.BufferedReader, encoding: str) -> str:
    """Return the likely encoding of a file, from its start, where it is to be detected and is not UTF-8; else ""."""
    probe = stream.peek(DETECT_BYTES)[:DETECT_BYTES]
    if encoding != AUTO or encoding_mark(probe):
        return ""
    try:
        probe.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut in two.
        return detect(probe) if error.start < len(probe) - 4 else ""
    return ""


def mend(text: str) -> tuple[str, bool]:
    """The text without NULs, lone surrogates and mojibake (UTF-8 decoded as Windows-1252 or the like), and whether
    there were any."""
    if text.isascii():
        return (text.replace("\0", ""), True) if "\0" in text else (text, False)
    mended = whole_characters(text.replace("\0", ""))
    if _SUSPECT.search(mended):
        import ftfy
        from ftfy.badness import is_bad

        if is_bad(mended):
            # Mojibake may stand for NULs too, as Java writes them.
            mended = ftfy.fix_encoding(mended).replace("\0", "")
    return mended, mended != text


CONTROL_SHARE = 0.03
"""Largest share of control characters in a text. Random bytes have 0.1 in any encoding of single bytes, and as many
unassigned characters in UTF-16; logs with colours and pages of manuals have escapes and backspaces, which count not."""
REPLACED_SHARE = 0.2
"""Largest share of U+FFFD, which stands for bytes that fit no encoding."""
DENSE_CONTROLS, WINDOW = 16, 256
"""Fewest control characters within a window of that number of characters that are binary data in the midst of a text:
random bytes have 30 in it."""
SIGN_SHARE, MANY_SIGNS = 0.15, 12
"""Largest share of signs of Latin-1 in a text that has many different ones: leaders of dots are one, random bytes from
0x80 on all of them, in a third of their characters."""
MIXED_SHARE = 0.1
"""Largest share of small letters beyond ASCII with a capital behind them. Random letters have 0.25."""
CHECKED_CHARACTERS = 100_000
_ASCII_CONTROLS = bytes([*range(0x08), *range(0x0E, 0x1B), *range(0x1C, 0x20), 0x7F])
_C0_C1 = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_LATIN_1_SIGNS = re.compile("[\xa1-\xa9\xab-\xac\xae-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7]")
_SMALL, _CAPITAL = "\xdf-\xf6\xf8-\xff\u0430-\u045f\u03b1-\u03c9", "\xc0-\xd6\xd8-\xde\u0400-\u042f\u0391-\u03a9"
_CAPITAL_IN_WORD = re.compile(f"[{_SMALL}](?=[{_CAPITAL}])")
_SYLLABLES_AND_IDEOGRAPHS = re.compile("[\u4e00-\u9fff\uac00-\ud7a3]")
_LETTERS_WITH_CASE = re.compile(f"[{_SMALL}{_CAPITAL}]")
_CONTROLS = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff\ufdd0-\ufdef\ufffe\uffff]")


def no_text(text: str) -> str:
    """The reason why a text is none but decoded binary data, or has some in it; "" for a text."""
    sample = text[:CHECKED_CHARACTERS]
    if not sample.isascii() and (reason := _implausible(sample)):
        return reason
    if sample.isprintable():
        return ""
    if sample.isascii():
        controls = len(sample) - len(sample.encode().translate(None, _ASCII_CONTROLS))
    else:
        # Controls and unassigned characters are not printable; of those a text has few.
        unprintable = [character for character in set(sample) if not character.isprintable()]
        binary = [c for c in unprintable if _CONTROLS.match(c) or unicodedata.category(c) == "Cn"]
        controls = sum(map(sample.count, binary))
    if controls > CONTROL_SHARE * len(sample) and controls > 2:
        return f"not text: binary data ({controls:,} control characters in {len(sample):,})"
    if controls >= DENSE_CONTROLS and (start := _dense_controls(sample)) >= 0:
        return f"not text: binary data ({DENSE_CONTROLS} control characters within {WINDOW} at character {start + 1:,})"
    replaced = sample.count("\ufffd")
    if replaced > REPLACED_SHARE * len(sample) and replaced > 2:
        return f"not text: {replaced:,} of {len(sample):,} characters fit no encoding"
    return ""


def _dense_controls(sample: str) -> int:
    """Return where control characters stand as densely as in binary data, however long the text around; -1 if
    nowhere."""
    starts = [match.start() for match in _C0_C1.finditer(sample)]
    windows = zip(starts, starts[DENSE_CONTROLS - 1 :], strict=False)
    return next((first for first, last in windows if last - first < WINDOW), -1)


def _implausible(sample: str) -> str:
    """The reason why characters are those of binary data without control characters: many different signs of Latin-1 or
    capitals anywhere in words from an encoding of single bytes, rare Chinese or Korean characters from one of several;
    "" for what may be a text."""
    if len(sample.encode("utf-8", "surrogatepass")) < (1 + SIGN_SHARE) * len(sample):
        return ""  # nearly all of it is ASCII
    signs = _LATIN_1_SIGNS.findall(sample)
    if len(signs) > SIGN_SHARE * len(sample) and len(set(signs)) >= MANY_SIGNS:
        return f"not text: binary data ({len(signs):,} signs of Latin-1 in {len(sample):,} characters)"
    mixed = len(_CAPITAL_IN_WORD.findall(sample))
    if mixed >= MANY_SIGNS and mixed > MIXED_SHARE * (letters := len(_LETTERS_WITH_CASE.findall(sample))):
        return f"not text: binary data (capitals behind small letters {mixed:,} times in {letters:,} letters)"
    return random_characters(sample) if _SYLLABLES_AND_IDEOGRAPHS.search(sample) else ""


def whole_characters(text: str) -> str:
    """The text with halves of surrogate pairs joined where both are there, else replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def python_name(encoding: str) -> str:
    """The codec to use: UTF-8 files of Windows programs open with a byte order mark, which is no part of the text, and
    what calls itself Latin-1 or ASCII on the web is Windows-1252 (WHATWG)."""
    name = codecs.lookup(encoding).name
    return "utf-8-sig" if name == "utf-8" else name


def web_name(encoding: str) -> str:
    """The codec that browsers use for what a page declares; "" for an unknown one."""
    try:
        name = codecs.lookup(encoding.strip("\"' ")).name
        "a".encode(name)
    except (LookupError, ValueError):
        return ""
    return {"iso8859-1": FALLBACK, "ascii": FALLBACK, "gb2312": "gb18030", "gbk": "gb18030"}.get(name, name)


def detect(data: bytes) -> str:
    """The encoding that charset-normalizer takes these bytes to be in; "" where they are too few or fit none."""
    first = _NO_ASCII.search(data)
    # ASCII is no evidence: only the part from the first other byte on is examined.
    start = max(0, (first.start() if first else 0) - MIN_DETECT_BYTES)
    sample = data[start : start + DETECT_BYTES]
    if len(sample) < MIN_DETECT_BYTES:
        return ""
    from charset_normalizer import from_bytes

    matches = from_bytes(sample)
    best = matches.best()
    if best is None:
        return ""
    # Western and Central European code pages often fit alike; the Western one is far more frequent.
    tied = [match for match in matches if (match.chaos, match.coherence) == (best.chaos, best.coherence)]
    is_western = any(FALLBACK in (match.encoding, *match.could_be_from_charset) for match in tied)
    return FALLBACK if is_western else best.encoding
