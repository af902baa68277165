"""The benchmarks' test items as hashed word n-grams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.decontaminate.config import DecontaminateConfig
from corpus.words import Hashes, character_table, hash_ngrams, hash_words
from infra.json import read_own_json_lines

_PUNCTUATION = re.compile(r"[^\w\s]|_")


class Item(NamedTuple):
    """One test item of benchmark_text; `texts` would each give it away."""

    task: str
    item: str
    texts: list[str]


class Index(NamedTuple):
    """What is looked for.

    lengths: (L,) how many words the n-grams have, and the items that are shorter and matched whole. grams: (G,) the
    hashes of all of these, ascending. alone: (A,) the hashes of whole items that count only where they stand alone,
    ascending; longest_alone: the most words that one has.
    """

    lengths: NDArray[np.int64]
    grams: Hashes
    alone: Hashes
    longest_alone: int


class Owners(NamedTuple):
    """Whose the hashes of an Index are: items[begins[i]:begins[i + 1]] for hash i, those of `alone` after `grams`."""

    begins: NDArray[np.int64]
    items: NDArray[np.int64]

    def of(self, found: int) -> NDArray[np.int64]:
        return self.items[self.begins[found] : self.begins[found + 1]]


def read_items(folder: Path) -> list[Item]:
    return [Item(**row) for row in read_own_json_lines(folder / "items.jsonl")]


def make_index(items: list[Item], config: DecontaminateConfig) -> tuple[Index, Owners]:
    """The n-grams of all items, of each text as it is and without its punctuation, so that "read-only" is found as
    "read only" and as "readonly"."""
    whole, alone = Pairs(), Pairs()
    lengths, longest_alone = set(), 0
    for number, item in enumerate(items):
        for text in item.texts:
            for one in {text, _PUNCTUATION.sub("", text)}:
                words = hashes_of(one)
                size = min(words.size, config.ngram)
                if words.size >= config.min_words:
                    whole.add(words, size, number)
                    lengths.add(size)
                elif words.size:
                    alone.add(words, size, number)
                    longest_alone = max(longest_alone, size)
    grams, owners = whole.grouped()
    others, other_owners = alone.grouped()
    begins = np.concatenate([owners.begins[:-1], other_owners.begins + owners.items.size])
    return (
        Index(np.array(sorted(lengths), np.int64), grams, others, longest_alone),
        Owners(begins, np.concatenate([owners.items, other_owners.items])),
    )


class Pairs:
    """Pairs of the hash of an n-gram and the number of the item that has it."""

    def __init__(self) -> None:
        self._grams = [np.zeros(0, np.uint64)]
        self._items = [np.zeros(0, np.int64)]

    def add(self, words: Hashes, size: int, item: int) -> None:
        """The n-grams of `size` words of a text with these words."""
        grams = np.empty(words.size, np.uint64)
        self._grams.append(grams[: hash_ngrams(words, words.size, size, grams)])
        self._items.append(np.full(self._grams[-1].size, item))

    def grouped(self) -> tuple[Hashes, Owners]:
        """The hashes, ascending, and the items of each."""
        grams, items = np.concatenate(self._grams), np.concatenate(self._items)
        order = np.lexsort((items, grams))
        grams, items = grams[order], items[order]
        fresh = np.ones(grams.size, np.bool_)
        fresh[1:] = (grams[1:] != grams[:-1]) | (items[1:] != items[:-1])
        hashes, begins = np.unique(grams[fresh], return_index=True)
        owned = items[fresh]
        return hashes, Owners(np.append(begins, owned.size).astype(np.int64), owned)


def hashes_of(text: str) -> Hashes:
    """The hashes of a text's words."""
    data = np.frombuffer(text.encode(), np.uint8)
    words = np.empty(data.size, np.uint64)
    starts, ends = np.empty(data.size, np.int64), np.empty(data.size, np.int64)
    return words[: hash_words(data, 0, data.size, character_table(), words, starts, ends)]
