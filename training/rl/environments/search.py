"""Search over documents: the policy looks for the passage that a sentence is from, and names the word that it lacks."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from training.rl.environments.protocol import Task, ToolEnvironment, tool

_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_TEXTS = (".txt", ".md", ".rst")
_HELDOUT = 10
"""One of N passages is for held-out tasks."""
_K1, _B = 1.2, 0.75
"""BM25's defaults in Lucene (Robertson & Zaragoza 2009)."""


class Search(ToolEnvironment):
    """The reward is 1 where the last word of the answer is the missing one, else 0.

    A task is a sentence of a passage without its rarest word; or a prompt with a response, whose words the answer has
    to contain. The second rule rejects a right answer where no search found the passage.

    Args:
        documents: file or folder of texts (.txt, .md, .rst); the stage gives those of its input `documents`.
        results: passages that a search returns.
        length: characters of a passage.
        limit: most passages.
    """

    def __init__(self, documents: str, results: int = 1, length: int = 300, limit: int = 20_000) -> None:
        super().__init__()
        self._index = indexed(documents, length, limit)
        self._results = results
        self._passage = -1
        self._expected = ""
        self._is_missing_word = True
        self._has_found = False

    def reset(self, task: Task, seed: int) -> str:
        if "prompt" in task:
            self._is_missing_word, self._expected = False, str(task["response"])
            return str(task["prompt"])
        draw = random.Random(seed)
        is_heldout = task.get("split") == "heldout"
        candidates = [
            number for number in self._index.askable if (number % _HELDOUT == 0) == is_heldout
        ] or self._index.askable
        if not candidates:
            raise ValueError("the documents have no sentence of 6 words or more to ask about")
        self._passage = draw.choice(candidates)
        sentence, self._expected = self._index.question(self._passage, draw)
        return f"Which word is missing? {sentence}"

    @tool
    def search(self, query: str) -> str:
        """Return the passages that match the words of a query best."""
        best = self._index.best(query, self._results)
        self._has_found |= self._passage in best
        return "\n\n".join(self._index.passages[number] for number in best) or "no passage has these words"

    def reward(self) -> float:
        given = words(self.answer or "")
        if not self._is_missing_word:
            return float(set(words(self._expected)) <= set(given))
        return float(bool(given) and given[-1] == self._expected.lower())

    def accepts(self) -> bool | None:
        return self._has_found if self._is_missing_word else None


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


class Question(NamedTuple):
    """A sentence without a word, and the word."""

    sentence: str
    word: str


class Index:
    """Passages with an inverted index, ranked by BM25."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self._counts: dict[str, list[tuple[int, int]]] = {}
        self._lengths = []
        for number, passage in enumerate(passages):
            occurrences = Counter(words(passage))
            self._lengths.append(sum(occurrences.values()))
            for word, count in occurrences.items():
                self._counts.setdefault(word, []).append((number, count))
        self._mean = sum(self._lengths) / max(1, len(passages))
        self.askable = [number for number in range(len(passages)) if self._sentences(number)]

    def best(self, query: str, count: int) -> list[int]:
        """Return the numbers of the best passages, the best first."""
        scores: Counter[int] = Counter()
        for word in set(words(query)):
            matches = self._counts.get(word, ())
            rarity = math.log(1 + (len(self.passages) - len(matches) + 0.5) / (len(matches) + 0.5))
            for number, times in matches:
                longer = 1 - _B + _B * self._lengths[number] / self._mean
                scores[number] += rarity * times * (_K1 + 1) / (times + _K1 * longer)  # type: ignore[assignment]
        return sorted(scores, key=lambda number: (-scores[number], number))[:count]

    def question(self, number: int, draw: random.Random) -> Question:
        """Return a sentence of a passage without the rarest of its words."""
        sentence = draw.choice(self._sentences(number))
        missing = min(words(sentence), key=lambda word: (len(self._counts[word]), -len(word), word))
        return Question(re.sub(rf"(?i)\b{re.escape(missing)}\b", "____", sentence), missing)

    def _sentences(self, number: int) -> list[str]:
        return [part.strip() for part in _SENTENCE.split(self.passages[number]) if len(words(part)) >= 6]


@cache
def indexed(documents: str, length: int, limit: int) -> Index:
    """Return the index of a file's or a folder's texts, once per process."""
    passages: list[str] = []
    for text in _texts(Path(documents)):
        for start in range(0, len(text), length):
            passage = text[start : start + length].strip()
            if passage:
                passages.append(passage)
            if len(passages) == limit:
                return Index(passages)
    if not passages:
        raise ValueError(f"there is no text in {documents}")
    return Index(passages)


def _texts(path: Path) -> Iterator[str]:
    files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS) if path.is_dir() else [path]
    for file in files:
        yield file.read_text(encoding="utf8", errors="replace")
