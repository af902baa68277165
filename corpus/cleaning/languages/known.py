"""Measures of prose in languages other than English, for the rules of Gopher.

Stop words are the most frequent words of each language's Wikipedia, from the lists of jusText (Pomikálek, 2011), which
comes with trafilatura. Scripts that put no space between words are measured by characters and sentence marks. FineWeb2
(Penedo et al., 2025) has stop words and limits by language likewise.
"""

from __future__ import annotations

import pkgutil
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.languages.characters import in_categories, in_class, without_format
from corpus.documents.words import CHARACTERS_PER_WORD

STOP_LISTS = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali",
    "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "el": "Greek",
    "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian",
    "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati", "he": "Hebrew", "hi": "Hindi",
    "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic", "it": "Italian",
    "ka": "Georgian", "kk": "Kazakh", "kn": "Kannada", "ko": "Korean", "lt": "Lithuanian",
    "lv": "Latvian", "mk": "Macedonian", "ml": "Malayalam", "mr": "Marathi", "ms": "Malay", "ne": "Nepali",
    "nb": "Norwegian_Bokmal", "nl": "Dutch", "no": "Norwegian_Bokmal", "nn": "Norwegian_Nynorsk", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian",
    "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "tl": "Tagalog", "tr": "Turkish",
    "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese", "yo": "Yoruba",
}  # fmt: skip
"""ISO 639-1 code → the name of jusText's list."""
STOP_WORDS = 200
"""The most frequent words of a list that are looked for. The lists go on for up to 13,000 words."""
MIN_STOP_WORD_SHARE = 0.1
"""Smallest share of stop words in prose: good prose has 0.2 to 0.5."""
MEASURED_CHARACTERS = 20_000
"""A language is found in the beginning of a text."""
MAX_SENTENCE_CHARACTERS = 200
"""Largest mean distance between marks or spaces in a script without spaces between words: decoded noise has none."""
_BLOCKS = {
    "kana": "\\u3041-\\u30ff\\uff66-\\uff9f",
    "han": "\\u3005\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\U00020000-\\U0003134f",
    "southeast": "\\u0e01-\\u0e4e\\u0e81-\\u0ecd\\u1000-\\u109f\\u1780-\\u17d3",
}
STOP_STRINGS = {
    "han": tuple("的在是和了於为為有被人中他与與後也而由"),
    "kana": tuple("のにをはたてがとでしれさ"),
    "southeast": (
        *("ใน", "ที่", "และ", "ของ", "เป็น", "มี", "การ", "ได้"),  # Thai
        *("ແລະ", "ໃນ", "ຂອງ", "ເປັນ", "ທີ່", "ໄດ້", "ມີ"),  # Lao
        *("មាន", "បាន", "ដែល", "ជា", "និង", "នៅ", "របស់", "ក្នុង", "ថា", "នេះ", "នៃ", "ទៅ", "ដោយ"),  # Khmer
        *("သည်", "များ", "ကို", "တွင်", "ဖြစ်", "၏", "သော", "နှင့်", "ရှိ", "တို့", "မှာ", "မှ"),  # Burmese
    ),
}
"""Strings in place of stop words where no space separates words: the most frequent words in the configs of FineWeb2
(Penedo et al., 2025) for the languages of a script, without numerals and signs."""
MEAN_WORD_LENGTH = (2.0, 14.0)
"""Limits in place of Gopher's 3 to 10: words of Korean and Vietnamese have 3 letters on average, of Finnish, Tamil and
Malayalam 8 to 11."""
MIN_LETTER_SHARE = 0.6
"""Smallest share of letters among the characters of a script without spaces between words."""
_UNSPACED = re.compile(f"[{''.join(_BLOCKS.values())}]")
_IN_BLOCK = {name: re.compile(f"[{block}]") for name, block in _BLOCKS.items()}
_RUN = re.compile(f"[{''.join(_BLOCKS.values())}]+")
# Marks are part of a word.
WORD_CHARACTERS = r"\w\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff'’"


@dataclass(frozen=True)
class Prose:
    """Measures of a text in another language. language: an ISO code, or the script of one without spaces between words.

    words: how many, estimated from the characters in a script without spaces. word_length: the mean, in characters;
    None there. letters: the share of words with a letter, or of characters that are letters in a script without spaces.
    stop_words: how many different ones; None in scripts that are one language's own.
    """

    language: str
    words: float
    word_length: float | None
    letters: float
    stop_words: int | None


def is_unspaced(text: str) -> bool:
    """Return True if at least a third of the letters of a text are from scripts without spaces between words."""
    if text.isascii() or not (first := _UNSPACED.search(text)):
        return False
    return 3 * len(_UNSPACED.findall(text, first.start())) >= sum(map(str.isalpha, text))


@cache
def unspaced_table() -> NDArray[np.bool_]:
    """Mask over all code points of the characters of scripts that put no space between words."""
    return in_class("".join(_BLOCKS.values()))


def letters_in(text: str) -> int:
    """Return the number of letters of a text, with vowel signs and other marks that belong to them."""
    if text.isascii():
        return int(_ASCII_LETTERS[np.frombuffer(text.encode(), np.uint8)].sum())
    return int(_letters_and_marks()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)].sum())


_ASCII_LETTERS = np.array([chr(code).isalpha() for code in range(128)])


@cache
def _letters_and_marks() -> NDArray[np.bool_]:
    return in_categories("L", "M")


def has_sentences(text: str) -> bool:
    """Return True if runs of characters of scripts without spaces are as short as between marks and spaces of
    sentences."""
    runs = _RUN.findall(text)
    return not runs or sum(map(len, runs)) / len(runs) <= MAX_SENTENCE_CHARACTERS


SHARED_SCRIPTS = {"", "LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "GREEK", "HEBREW"}
"""Scripts in which prose is recognised by its stop words; "" is none."""


def script_of(text: str) -> str:
    """The script of most letters in the beginning of a text, as Unicode names it: TAMIL."""
    scripts = Counter[str]()
    for character, count in Counter(text[:MEASURED_CHARACTERS]).items():
        if character.isalpha():
            scripts[unicodedata.name(character, "").partition(" ")[0]] += count
    return max(scripts, key=lambda script: (scripts[script], script), default="")


def measure_unspaced(text: str) -> Prose:
    """The measures of a text in a script without spaces between words."""
    counts = {name: len(pattern.findall(text)) for name, pattern in _IN_BLOCK.items()}
    script = max(counts, key=lambda name: counts[name])
    if script == "han" and 10 * counts["kana"] >= counts["han"]:
        script = "kana"
    unspaced = sum(counts.values())
    spaced = len(_UNSPACED.sub(" ", text).split())
    solid = sum(map(len, text.split()))
    stop_words_met = sum(word in text for word in STOP_STRINGS[script])
    words = unspaced / CHARACTERS_PER_WORD[script] + spaced
    return Prose(script, words, None, letters_in(text) / max(1, solid), stop_words_met)


@cache
def stop_words() -> dict[str, tuple[str, ...]]:
    """Word → the languages in which it is a stop word."""
    by_word: dict[str, list[str]] = {}
    for code, name in STOP_LISTS.items():
        # jusText's own reader gives sets, which have lost the order by frequency.
        content = pkgutil.get_data("justext", f"stoplists/{name}.txt") or b""
        lines = (without_format(line).strip(".,").lower() for line in content.decode("utf8").splitlines())
        for word in list(dict.fromkeys(line for line in lines if line))[:STOP_WORDS]:
            by_word.setdefault(word, []).append(code)
    return {word: tuple(codes) for word, codes in by_word.items()}
