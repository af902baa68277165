"""The cleaning step that drops documents by their toxicity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from corpus.cleaning.config import ToxicityFilterConfig
from corpus.cleaning.people.toxicity_scorers import ClassifierScorer, ProfanityScorer, TextScorer
from corpus.cleaning.rules import Broken, CleaningRule
from corpus.documents.parts import Document


class Toxicity:
    """A document's score is the highest of its windows: a single toxic passage counts in a long text too."""

    name = "toxicity"

    def __init__(self, config: ToxicityFilterConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._window = config.window_characters
        self._scorer: TextScorer = ClassifierScorer(config.model, config.label) if config.model else ProfanityScorer()
        self._rule = CleaningRule("toxicity.max_score", self._scorer.name, high=config.max_score)
        self.rules: Sequence[CleaningRule] = [self._rule]

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        windows = [self._windows(document.text) for document in documents]
        scores = self._scorer([window for document_windows in windows for window in document_windows])
        starts = np.cumsum([0, *(len(document_windows) for document_windows in windows[:-1])])
        highest = np.maximum.reduceat(scores, starts)
        return [
            Broken(self._rule, float(score)) if score > self._rule.high else document
            for document, score in zip(documents, highest, strict=True)
        ]

    def _windows(self, text: str) -> list[str]:
        return [text[start : start + self._window] for start in range(0, max(len(text), 1), self._window)]
