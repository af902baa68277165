"""The step that finds out which language a document is written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from corpus.cleaning.config import LanguageConfig
from corpus.cleaning.rules import Broken, Rule
from corpus.documents.parts import Document
from corpus.documents.sources import source_name

PAPER = "langid.py, Lui and Baldwin, 2012"
# The model needs a few hundred characters: of a longer text it sees its beginning, middle and end.
SLICE = 400


class Language:
    """Fills the language of documents and drops those of others; `counts` has how many there are of each."""

    name = "language"

    def __init__(self, config: LanguageConfig) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.counts: Counter[str] = Counter()
        self._config = config
        self._identify = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._keep = Rule("language.keep", PAPER, low=1)
        self._confident = Rule("language.min_confidence", PAPER, low=config.min_confidence)
        self.rules: Sequence[Rule] = [self._keep, self._confident] if config.keep or config.keep_by_source else []

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        return [self._with_language(document) for document in documents]

    def _with_language(self, document: Document) -> Document | Broken:
        language, confidence = self.identify(document.text)
        sure = confidence >= self._config.min_confidence
        self.counts[f"language.{language if sure else 'unsure'}"] += 1
        keep = self._config.keep_by_source.get(source_name(document.source), self._config.keep)
        if keep and not sure:
            return Broken(self._confident, confidence)
        if keep and language not in keep:
            return Broken(self._keep, 0)
        return document._replace(language=language) if sure else document

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639-1 code, probability between 0 and 1)."""
        if len(text) > 3 * SLICE:
            middle = len(text) // 2
            text = " ".join((text[:SLICE], text[middle : middle + SLICE], text[-SLICE:]))
        language, confidence = self._identify.classify(text)
        return str(language), float(confidence)
