"""The step that adds the counterfactuals of documents, or puts them in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from corpus.cleaning.config import CounterfactualConfig
from corpus.cleaning.counterfactual import counterfactual
from corpus.cleaning.draw import draw
from corpus.cleaning.rules import Broken, Rule
from corpus.cleaning.step import changed
from corpus.documents import Document


class Balance:
    """Drawn documents with identity terms get a counterfactual; `counts` has how many."""

    name = "counterfactual"
    rules: Sequence[Rule] = ()

    def __init__(self, config: CounterfactualConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken | list[Document]]:
        return [self._balanced(document) for document in documents]

    def _balanced(self, document: Document) -> Document | list[Document]:
        if draw(document.id, "counterfactual", self._config.seed) >= self._config.share:
            return document
        other = changed(document, counterfactual(document.text, self._config.groups))
        if other is document:
            return document
        added = self._config.mode == "add"
        self.counts[f"counterfactual.{'added' if added else 'replaced'}"] += 1
        return [document, other] if added else other
