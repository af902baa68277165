"""The native measures of texts by language are those of a plain reading of the same rules."""

from __future__ import annotations

import importlib
import random
import re
import unicodedata
from collections import Counter

import numpy as np

from corpus.cleaning import measures
from corpus.cleaning.languages.characters import class_table, without_format
from corpus.cleaning.languages.known import (
    SHARED_SCRIPTS,
    WORD_CHARACTERS,
    Prose,
    is_unspaced,
    measure_unspaced,
    stop_words,
    unspaced_table,
)
from corpus.cleaning.languages.measured import measure_documents
from corpus.cleaning.languages.segment import code_points

SAMPLE = 3333
LANGUAGES = ("ar", "cs", "de", "el", "es", "fr", "he", "hi", "hu", "ja", "ko", "pl", "ru", "ta", "tr", "uk", "vi", "zh")
ODD = [*"'’\"Σςİı\u0301\u0307\u200d\u00ad\ufeff\u0e01\u4e00カ가ªµ0_-.\n\u00a0\u2028", "Α\u0301Σ", "\u1100\u1161"]


def expected(text: str, language: str) -> Prose | None:
    """One word after the other, with Python's own rules of letters and cases."""
    text = without_format(text)
    if is_unspaced(text):
        return measure_unspaced(text)
    text = unicodedata.normalize("NFC", text)
    words = [word for token in re.findall(f"[{WORD_CHARACTERS}]+", text) if (word := token.strip("'’"))]
    sample = [word.lower() for word in words[:SAMPLE]]
    counts: Counter[str] = Counter(code for word in sample for code in stop_words().get(word, ()))
    highest = max(counts.values(), default=0)
    if not sample:
        return None
    if highest < 0.1 * len(sample):
        scripts = Counter(unicodedata.name(c, "").split(" ")[0] for c in text[:20_000] if c.isalpha())
        likeliest = max(scripts, key=lambda script: (scripts[script], script), default="")
        different = None
    else:
        if language and counts[language] >= 0.8 * highest:
            likeliest = language
        else:
            likeliest = "en" if counts["en"] == highest else min(code for code in counts if counts[code] == highest)
        different = sum(likeliest in stop_words()[word] for word in set(sample) & stop_words().keys())
    if likeliest in SHARED_SCRIPTS | {"en"}:
        return None
    letters = sum(any(map(str.isalpha, word)) for word in words)
    return Prose(likeliest, len(words), sum(map(len, words)) / len(words), letters / len(words), different)


def texts(generator: random.Random) -> list[tuple[str, str]]:
    """(text, declared language): stop words of a language with others between, sentences, long texts; many damaged."""
    by_language: dict[str, list[str]] = {}
    for word, codes in stop_words().items():
        for code in codes:
            by_language.setdefault(code, []).append(word)
    everything = list(stop_words())
    made = []
    for number in range(500):
        code = generator.choice(list(by_language))
        words = [
            generator.choice(by_language[code] if generator.random() < 0.6 else everything)
            for _ in range(generator.randrange(SAMPLE - 3, SAMPLE + 4) if number % 50 == 0 else number % 60)
        ]
        if number % 3 == 1:  # as many words of English as of another language, or one more
            words = [generator.choice(by_language[generator.choice([code, "en"])]) for _ in words]
        elif number % 4 == 0:
            code = generator.choice(LANGUAGES)
            words = list(importlib.import_module(f"spacy.lang.{code}.examples").sentences)
        elif number % 7 == 0:
            words = [f"x{word}z" for word in words]
        text = " ".join(words)
        text = text.upper() if number % 3 == 0 else text
        if number % 5:
            characters = list(text)
            for _ in range(1 + len(characters) // 20):
                characters.insert(generator.randrange(len(characters) + 1), generator.choice(ODD))
            text = unicodedata.normalize("NFD", "".join(characters)) if number % 6 == 0 else "".join(characters)
        made.append((text, generator.choice(["", "", code, "en", "de", "no such"])))
    return made


def test_measures_are_those_of_one_word_after_the_other():
    made = texts(random.Random(7))
    batch, declared = [text for text, _ in made], [language for _, language in made]
    points, starts = code_points(batch)
    counts = measures.characters(points, starts, class_table(), unspaced_table())
    assert counts[:, measures.VISIBLE].tolist() == [len(without_format(text)) for text in batch]
    assert counts[:, measures.UNSPACED].tolist() == [is_unspaced(text) for text in batch]
    # Some of the batch alone, as after rules that came before.
    documents = [number for number in range(len(batch)) if number % 9]
    measured = measure_documents(documents, batch, [declared[n] for n in documents], points, starts, counts)
    expected_prose = {n: prose for n in documents if (prose := expected(batch[n], declared[n]))}
    assert measured == expected_prose
    assert len({prose.language for prose in expected_prose.values()}) > 40
    assert len(documents) - len(expected_prose) > 30
    assert np.median([prose.words for prose in expected_prose.values()]) > 10
