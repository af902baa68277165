"""Real text with planted near duplicates, and which of its documents are alike by exact Jaccard similarity."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
PIECE_CHARACTERS = 3_000
NGRAM = 5


def real_texts(data: Path = SHARED, without: str = "") -> list[str]:
    """The text of every file in ../shared/data, 60 MB: a record of JSON lines, or a piece of a plain text, each.

    without: the name of a folder that is left out.
    """
    files = [file for file in sorted(data.rglob("*")) if file.is_file() and without not in file.parts]
    texts = [text for file in files for text in _texts(file)]
    return [text for text in texts if len(text) >= 200]


def _texts(file: Path) -> Iterator[str]:
    name = file.name
    if name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf8") if name.endswith(".gz") else file.open(encoding="utf8") as lines:
            for line in lines:
                yield from [" ".join(_strings(json.loads(line)))] if line.strip() else []
    elif name.endswith(".json"):
        rows = json.loads(file.read_text(encoding="utf8"))
        yield from (" ".join(_strings(row)) for row in rows)
    elif name.endswith((".txt", ".csv", ".tsv")):
        text = file.read_text(encoding="utf8", errors="replace")
        for begin in range(0, len(text), PIECE_CHARACTERS):
            yield text[begin : begin + PIECE_CHARACTERS]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def ngrams_of(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


def edited(text: str, generator: random.Random) -> str:
    """A copy with some of its words replaced, taken out or added, up to 6 %, in other case or with other spaces."""
    words = text.split(" ")
    share = generator.random() * 0.06
    for _ in range(round(share * len(words))):
        place = generator.randrange(len(words))
        words[place : place + 1] = generator.choice(([], ["another"], [words[place], f"word{place}"]))
    joined = generator.choice((" ", "  ", " ")).join(words)
    return generator.choice((str, str, str.upper, str.title))(joined)


def planted(texts: Sequence[str], copies: int, seed: int = 17) -> tuple[list[str], list[tuple[int, int]]]:
    """The texts with edited copies of some at random places, and the places of each (original, copy)."""
    generator = random.Random(seed)
    long = [i for i, text in enumerate(texts) if len(text.split()) >= 50]
    chosen = generator.sample(long, min(copies, len(long)))
    rows = [(generator.random(), text, i, False) for i, text in enumerate(texts)]
    rows += [(generator.random(), edited(texts[i], generator), i, True) for i in chosen]
    rows.sort(key=lambda row: row[0])
    places = {(i, copy): place for place, (_, _, i, copy) in enumerate(rows)}
    return [text for _, text, _, _ in rows], [(places[i, False], places[i, True]) for i in chosen]


@dataclass(frozen=True)
class Truth:
    """All pairs (P, 2) of texts whose sets of word 5-grams are as similar as `threshold`, computed without hashing."""

    pairs: np.ndarray
    similarities: np.ndarray

    def partnered(self, count: int) -> np.ndarray:
        """Which of `count` texts are in a pair."""
        found = np.zeros(count, bool)
        found[self.pairs.ravel()] = True
        return found


def all_pairs(texts: Sequence[str], threshold: float) -> Truth:
    """Every pair of texts with a Jaccard similarity of at least `threshold`: one product of sparse matrices."""
    from scipy import sparse

    number: dict[tuple[str, ...], int] = {}
    sets = [[number.setdefault(gram, len(number)) for gram in ngrams_of(text)] for text in texts]
    sizes = np.array([len(grams) for grams in sets])
    columns = np.fromiter(itertools.chain.from_iterable(sets), np.int64, sizes.sum())
    begins = np.concatenate([[0], np.cumsum(sizes)])
    matrix = sparse.csr_matrix((np.ones(columns.size, np.float32), columns, begins), (len(texts), len(number)))
    transposed = matrix.T.tocsr()
    pairs, similarities = [np.zeros((0, 2), np.int64)], [np.zeros(0)]
    for begin in range(0, len(texts), 1000):
        common = (matrix[begin : begin + 1000] @ transposed).tocoo()
        first, second = common.row + begin, common.col
        jaccard = common.data / (sizes[first] + sizes[second] - common.data)
        keep = (first < second) & (jaccard >= threshold)
        pairs.append(np.stack([first[keep], second[keep]], axis=1))
        similarities.append(jaccard[keep])
    return Truth(np.concatenate(pairs), np.concatenate(similarities))
