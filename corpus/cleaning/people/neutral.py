"""Neutral rewriting: words that name a group where none is meant give way to neutral ones (chairman, stewardess).

Sun et al., 2021, They, Them, Theirs: Rewriting with Gender-Neutral English, name the practice and such word lists; the
pronouns that they rewrite by a model stay here, since a word list cannot make verbs agree with "they".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from corpus.cleaning.config import NeutralConfig
from corpus.cleaning.people.counterfactual import replace_words, split_possessive
from corpus.cleaning.rules import Broken, CleaningRule, changed, draw
from corpus.documents.parts import Document
from infra.errors import stage_error

NEUTRAL_WORDS = Path(__file__).parents[1] / "data" / "neutral_words.tsv"


class Neutral:
    """Drawn documents are rewritten; `counts` has how many changed."""

    name = "neutral"
    rules: Sequence[CleaningRule] = ()

    def __init__(self, config: NeutralConfig) -> None:
        """Raise StageError `bad_words` naming the line that is no pair."""
        self.counts: Counter[str] = Counter()
        self._config = config
        self._words = neutral_words(Path(config.words) if config.words else NEUTRAL_WORDS)

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        return [self._rewritten(document) for document in documents]

    def _rewritten(self, document: Document) -> Document:
        if draw(document.id, "neutral", self._config.seed) >= self._config.share:
            return document
        rewritten = changed(document, neutral(document.text, self._words))
        self.counts["neutral.rewritten"] += rewritten is not document
        return rewritten


def neutral(text: str, words: dict[str, str]) -> str:
    """Return the text with each of these words, its possessive included, replaced by its neutral word."""

    def replacement(lower: list[str], index: int) -> str | None:
        word, ending = split_possessive(lower[index], words)
        neutral_word = words.get(word)
        return None if neutral_word is None else neutral_word + ending

    return replace_words(text, replacement)


@cache
def neutral_words(path: Path) -> dict[str, str]:
    """Word → its neutral form in lower case, from lines `word<TAB>neutral`; lines that begin with # are left out.

    Raises StageError `bad_words`, with file and line.
    """
    replacements: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except UnicodeDecodeError as error:
        raise stage_error("bad_words", str(path), f"expected text in UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        word, _, replacement = line.partition("\t")
        if not word.strip() or not replacement.strip() or " " in word.strip():
            raise stage_error("bad_words", f"{path}:{number}", "expected one word, a tab, and its neutral form")
        replacements[word.strip().lower()] = replacement.strip().lower()
    return replacements
