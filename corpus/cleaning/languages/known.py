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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from corpus.cleaning.languages.characters import without_format
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
MEAN_WORD_LENGTH = (2.0, 14.0)
"""Limits in place of Gopher's 3 to 10: words of Korean and Vietnamese have 3 letters on average, of Finnish, Tamil and
Malayalam 8 to 11."""
MIN_LETTER_SHARE = 0.6
"""Smallest share of letters among the characters of a script without spaces between words."""
_UNSPACED = re.compile(f"[{''.join(_BLOCKS.values())}]")
_IN_BLOCK = {name: re.compile(f"[{block}]") for name, block in _BLOCKS.items()}
_RUN = re.compile(f"[{''.join(_BLOCKS.values())}]+")
# Marks are part of a word.
_WORD = re.compile(r"[\w\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0dff'’]+")


@dataclass(frozen=True)
class Prose:
    """Measures of a text in another language. language: an ISO code, or the script of one without spaces between words.

    words: how many, estimated from the characters in a script without spaces. word_length: the mean, in characters;
    None there. letters: the share of words with a letter, or of characters that are letters in a script without spaces.
    stop_words: how many different ones; None in scripts without spaces and in those that are one language's own.
    """

    language: str
    words: float
    word_length: float | None
    letters: float
    stop_words: int | None


def is_unspaced(text: str) -> bool:
    """Return True if at least a third of the letters of a text are of scripts that put no space between words."""
    if text.isascii():
        return False
    unspaced = len(_UNSPACED.findall(text))
    return unspaced > 0 and 3 * unspaced >= sum(map(str.isalpha, text))


def letters_in(text: str) -> int:
    """Letters of a text, with vowel signs and other marks that belong to them."""
    return sum(map(str.isalpha, text)) + (0 if text.isascii() else sum(unicodedata.category(c)[0] == "M" for c in text))


def has_sentences(text: str) -> bool:
    """Return True if runs of characters of scripts without spaces are as short as between marks and spaces of
    sentences."""
    runs = _RUN.findall(text)
    return not runs or sum(map(len, runs)) / len(runs) <= MAX_SENTENCE_CHARACTERS


def measure(text: str, language: str = "") -> Prose | None:
    """Measures of a text that is not in English; None for one that is, or whose language is not known.

    language: its ISO code where that is known; else it is found. Format characters are no part of words.
    """
    text = without_format(text)
    if is_unspaced(text):
        return _measure_unspaced(text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    # In ASCII a text in lower case has the same words; elsewhere a letter may change with its neighbours.
    tokens = _WORD.findall(text.lower()) if text.isascii() else _WORD.findall(text)
    sample = _sample_of(tokens)
    if not sample:
        return None
    counts = Counter[str]()
    table = _stop_words()
    known = sample.keys() & table.keys()
    for word in known:
        for code in table[word]:
            counts[code] += sample[word]
    highest = max(counts.values(), default=0)
    if highest < MIN_STOP_WORD_SHARE * sample.total():
        # The words of Korean or Tamil take too many endings for a list, but their scripts show them.
        script = _script_of(text)
        return None if script in _SHARED_SCRIPTS else _measure_words(script, tokens, None)
    # A declared language counts where it is as likely as the best one; of equals English goes first.
    candidates = [code for code in counts if counts[code] == highest]
    is_declared = bool(language) and counts[language] >= 0.8 * highest
    best = language if is_declared else "en" if "en" in candidates else min(candidates)
    if best == "en":
        return None
    return _measure_words(best, tokens, sum(best in table[word] for word in known))


def _sample_of(tokens: list[str]) -> Counter[str]:
    """Return how often each word occurs among the first words of a text, in lower case; words may be in quotes."""
    most = MEASURED_CHARACTERS // 6
    if len(tokens) > most:
        return Counter(word.lower() for word in islice(_bare(tokens), most))
    # Most texts are shorter than the sample: their words are counted before they are looked at one by one.
    sample = Counter[str]()
    for token, count in Counter(tokens).items():
        if word := token.strip("'’"):
            sample[word.lower()] += count
    return sample


def _bare(tokens: Iterable[str]) -> Iterator[str]:
    return (word for quoted in tokens if (word := quoted.strip("'’")))


def _measure_words(language: str, tokens: list[str], stop_words: int | None) -> Prose:
    words = list(_bare(tokens))
    letters = sum(any(map(str.isalpha, word)) for word in words) / len(words)
    return Prose(language, len(words), sum(map(len, words)) / len(words), letters, stop_words)


_SHARED_SCRIPTS = {"", "LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "GREEK", "HEBREW"}
"""Scripts in which prose is recognised by its stop words; "" is none."""


def _script_of(text: str) -> str:
    """The script of most letters in the beginning of a text, as Unicode names it: TAMIL."""
    letters = [c for c in text[:MEASURED_CHARACTERS] if c.isalpha()]
    scripts = Counter(unicodedata.name(c, "").partition(" ")[0] for c in letters)
    return max(scripts, key=lambda script: (scripts[script], script), default="")


def characters_as_words(text: str) -> tuple[str, float]:
    """(the characters of a text in a script without spaces, without white space; how many make a word)."""
    text = without_format(text)
    return "".join(text.split()), CHARACTERS_PER_WORD[_measure_unspaced(text).language]


def _measure_unspaced(text: str) -> Prose:
    counts = {name: len(pattern.findall(text)) for name, pattern in _IN_BLOCK.items()}
    script = max(counts, key=lambda name: counts[name])
    if script == "han" and 10 * counts["kana"] >= counts["han"]:
        script = "kana"
    unspaced = sum(counts.values())
    spaced = len(_UNSPACED.sub(" ", text).split())
    solid = sum(map(len, text.split()))
    return Prose(script, unspaced / CHARACTERS_PER_WORD[script] + spaced, None, letters_in(text) / max(1, solid), None)


@cache
def _stop_words() -> dict[str, tuple[str, ...]]:
    """Word → the languages in which it is a stop word."""
    by_word: dict[str, list[str]] = {}
    for code, name in STOP_LISTS.items():
        # jusText's own reader gives sets, which have lost the order by frequency.
        content = pkgutil.get_data("justext", f"stoplists/{name}.txt") or b""
        lines = (without_format(line).strip(".,").lower() for line in content.decode("utf8").splitlines())
        for word in list(dict.fromkeys(line for line in lines if line))[:STOP_WORDS]:
            by_word.setdefault(word, []).append(code)
    return {word: tuple(codes) for word, codes in by_word.items()}
