"""Words of one chunk of text between two spaces, as spaCy's English tokenizer splits them.

datatrove counts words with that tokenizer, so the limits of its filters are limits on these words. Which words a chunk
has depends on nothing around it: a chunk is split once, however often it occurs. Contractions, abbreviations and
emoticons split otherwise than by punctuation; they are listed in data/english_exceptions.txt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from corpus.cleaning.languages.characters import as_class, in_categories, uncased, without_format

# The lists of characters and units below are the ones of spaCy 3.8 (spacy/lang/char_classes.py).
_PUNCTUATION = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = ",'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧"
_CURRENCY = r"US\$|C\$|A\$|[$£€¥฿﷼₠-₿]"
_UNITS = """
km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph
hPa Pa mbar mb MB kb KB gb GB tb TB T G M K % км км² км³ м м² м³ дм дм² дм³ см см² см³ мм мм² мм³ нм кг г
мг м/с км/ч кПа Па мбар Кб КБ кб Мб МБ мб Гб ГБ гб Тб ТБ тб كم كم² كم³ م م² م³ سم سم² سم³ مم مم² مم³ غرام
جرام جم كغ ملغ كوب اكواب
"""
_EXCEPTIONS = Path(__file__).parent / "data" / "english_exceptions.txt"
_HOST = "A-Za-z0-9\u00a1-\uffff"


class _Patterns(NamedTuple):
    prefix: re.Pattern[str]
    suffix: re.Pattern[str]
    infix: re.Pattern[str]
    address: re.Pattern[str]
    opening: frozenset[str]
    closing: frozenset[str]
    marks: frozenset[str]


@cache
def _patterns() -> _Patterns:
    lower, upper = (as_class(in_categories(name) | uncased()) for name in ("Ll", "Lu"))
    letter = as_class(in_categories("Ll", "Lu", "Lt") | uncased())
    icons = in_categories("So")
    icon = f"[{as_class(icons)}]"
    punctuation, quotes = re.escape(_PUNCTUATION), re.escape(_QUOTES)
    units = "|".join(map(re.escape, _UNITS.split()))
    prefix = rf"[§%=—–]|\+(?![0-9])|\.\.+|[{punctuation}{quotes}]|{_CURRENCY}|{icon}"
    suffix = "|".join(
        [
            r"\.\.+",
            rf"[{punctuation}{quotes}—–]|{icon}",
            "['’][sS]",
            r"(?<=[0-9])\+",
            r"(?<=°[FfCcKk])\.",
            rf"(?<=[0-9])(?:{_CURRENCY}|{units})",
            rf"(?<=[0-9{lower}%²\-+{punctuation}{quotes}|])\.",
            rf"(?<=[{upper}][{upper}])\.",
        ]
    )
    # The first character of what cuts, then what must stand around it: so the search looks at these characters alone.
    behind_word = f"(?<=[{letter}0-9]"
    infix = (
        rf"[.…+\-*^,–—~:<>=/{as_class(icons)}](?:"
        + "|".join(
            [
                r"(?<=\.)\.+",
                rf"(?<=[…{as_class(icons)}])",
                r"(?<=[0-9][+\-*^])(?=[0-9-])",
                rf"(?<=[{lower}{quotes}]\.)(?=[{upper}{quotes}])",
                rf"(?<=[{letter}],)(?=[{letter}])",
                rf"{behind_word}-)--(?=[{letter}])",
                rf"{behind_word}-)-(?=[{letter}])",
                rf"{behind_word}—)—(?=[{letter}])",
                rf"{behind_word}[-–—~:<>=/])(?=[{letter}])",
            ]
        )
        + ")"
    )
    number = "(?:1?[0-9]{1,2}|2[0-4][0-9]|25[0-5])"
    address = (
        r"(?:[\w+\-.]{2,}://)?(?:\S+(?::\S*)?@)?(?:"
        r"(?!(?:10|127)(?:\.\d{1,3}){3})(?!(?:169\.254|192\.168)(?:\.\d{1,3}){2})(?!172\.(?:1[6-9]|2\d|3[01])(?:\.\d{1,3}){2})"
        rf"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])(?:\.{number}){{2}}\.(?:[1-9]\d?|1\d\d|2[0-4]\d|25[0-4])"
        rf"|(?:(?:[{_HOST}][{_HOST}_-]{{0,62}})?[{_HOST}]\.)+[{lower}]{{2,63}})"
        r"(?::\d{2,5})?(?:[/?#]\S*)?$"
    )
    marks = frozenset(_PUNCTUATION + _QUOTES + "—–" + "".join(map(chr, icons.nonzero()[0].tolist())))
    money = "$£€¥฿﷼" + "".join(map(chr, range(0x20A0, 0x20C0)))
    return _Patterns(
        re.compile(prefix),
        re.compile(f"(?:{suffix})$"),
        re.compile(f"({infix})"),
        re.compile(address),
        opening=marks | frozenset("§%=+.UCA" + money),
        marks=marks,
        closing=frozenset("sS+." + money + "".join(unit[-1] for unit in _UNITS.split())),
    )


class ChunkSplitter:
    """Splits chunks into words."""

    def __init__(self) -> None:
        self.exceptions = english_exceptions()
        self._patterns = _patterns()
        # Emoticons that the rules below take apart are put together again.
        self._sequences = {
            words: exception for exception in self.exceptions if len(words := tuple(self._split(exception, {}))) > 1
        }
        self._lengths: dict[str, set[int]] = {}
        for words in self._sequences:
            self._lengths.setdefault(words[0], set()).add(len(words))

    def split(self, chunk: str) -> list[str]:
        """The words of a chunk without spaces in it; together they are the chunk.

        Format characters, such as joiners and soft hyphens, belong to the word that they are in or behind.
        """
        visible = without_format(chunk)
        words = self._split(visible, self.exceptions)
        words = self._reunite(words) if len(words) > 1 else words
        return words if visible == chunk else _with_format(words, chunk)

    def _split(self, chunk: str, exceptions: Mapping[str, tuple[str, ...]]) -> list[str]:
        opening, closing, marks = self._patterns.opening, self._patterns.closing, self._patterns.marks
        before: list[str] = []
        suffixes: list[str] = []
        # Nothing is split off between letters: what is all letters is an exception, or one word.
        while chunk and not chunk.isalpha() and chunk not in exceptions:
            prefix = suffix = 0
            if chunk[0] in opening and (match := self._patterns.prefix.match(chunk)):
                prefix = match.end()
            remainder = chunk[prefix:]
            if prefix and remainder in exceptions:
                before.append(chunk[:prefix])
                chunk = remainder
                break
            if remainder[-1:] in marks:
                suffix = 1
            elif remainder[-1:] in closing:
                # No suffix but a row of dots is longer than 8 characters, with what precedes it.
                match = self._patterns.suffix.search(remainder if remainder.endswith("..") else remainder[-8:])
                suffix = match.end() - match.start() if match else 0
            if suffix and chunk[:-suffix] in exceptions:
                suffixes.append(chunk[-suffix:])
                chunk = chunk[:-suffix]
                break
            if not prefix and not suffix:
                break
            if prefix:
                before.append(chunk[:prefix])
            if suffix:
                suffixes.append(chunk[-suffix:])
            chunk = chunk[prefix : len(chunk) - suffix]
        return [*before, *self._split_core(chunk, exceptions), *reversed(suffixes)]

    def _split_core(self, core: str, exceptions: Mapping[str, tuple[str, ...]]) -> list[str]:
        if not core or core in exceptions:
            return list(exceptions.get(core, ()))
        if core.isalpha():
            return [core]
        if "." in core and self._patterns.address.match(core):
            return [core]
        words = self._patterns.infix.split(core)
        if not words[0]:  # an infix at the very front cuts nothing off
            words = [words[1] + words[2], *words[3:]]
        return [word for word in words if word]

    def _reunite(self, words: list[str]) -> list[str]:
        if self._lengths.keys().isdisjoint(words):
            return words
        matches = [
            (-length, start, exception)
            for start, word in enumerate(words)
            for length in self._lengths.get(word, ())
            if (exception := self._sequences.get(tuple(words[start : start + length]))) and start + length <= len(words)
        ]
        if not matches:
            return words
        covered: set[int] = set()
        replaced: dict[int, tuple[int, str]] = {}
        # Longest first; one that overlaps a longer one is left unchanged.
        for less, start, exception in sorted(matches):
            end = start - less
            if start not in covered and end - 1 not in covered:
                replaced[start] = (end, exception)
            covered.update(range(start, end))
        united: list[str] = []
        position = 0
        while position < len(words):
            end, exception = replaced.get(position, (position + 1, words[position]))
            united.extend(self.exceptions[exception] if position in replaced else [exception])
            position = end
        return united


def _with_format(words: list[str], chunk: str) -> list[str]:
    """Return the words of a chunk with its format characters. words: without them, at least one."""
    starts: list[int] = []
    end = 0
    for word in words:
        starts.append(chunk.index(word[0], end) if starts else 0)
        for character in word:
            end = chunk.index(character, end) + 1
    return [chunk[start:stop] for start, stop in itertools.pairwise([*starts, len(chunk)])]


def english_exceptions() -> dict[str, tuple[str, ...]]:
    """Chunk → its words. They are those of spaCy's English tokenizer; a test compares them."""
    lines = [
        line.split("\t") for line in _EXCEPTIONS.read_text(encoding="utf8").splitlines() if not line.startswith("#")
    ]
    exceptions: dict[str, tuple[str, ...]] = {}
    for kind, *fields in lines:
        if kind == "contraction":
            exceptions |= _contractions(*map(str.split, fields))
    for kind, *fields in lines:
        for item in fields[0].split():
            if kind == "ordinary":
                exceptions.pop(item, None)
            elif kind == "split":
                exceptions[item.replace("|", "")] = tuple(item.split("|"))
            elif kind == "whole":
                exceptions[item] = (item,)
    for hour in range(1, 13):
        for half in ("am", "a.m.", "pm", "p.m."):
            exceptions[f"{hour}{half}"] = (str(hour), half)
    curly = {chunk.replace("'", "’"): tuple(w.replace("'", "’") for w in words) for chunk, words in exceptions.items()}
    return exceptions | curly


def _contractions(stems: list[str], endings: list[str]) -> dict[str, tuple[str, ...]]:
    contractions: dict[str, tuple[str, ...]] = {}
    for stem in (*stems, *map(str.title, stems)):
        for ending in endings:
            words = (stem, *ending.split("|"))
            bare = tuple(word.replace("'", "") for word in words)
            contractions |= {"".join(words): words, "".join(bare): bare}
    return contractions
