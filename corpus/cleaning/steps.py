"""The steps of cleaning that a config turns on, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from corpus.cleaning.config import CleanConfig, LanguageConfig
from corpus.cleaning.rules import Broken, CleaningRule, CleaningStep, changed
from corpus.documents.parts import Document
from corpus.documents.sources import source_name


class Quality:
    """The rules of Gopher, C4 and FineWeb."""

    name = "quality"

    def __init__(self, config: CleanConfig) -> None:
        from corpus.cleaning.quality import QualityRules

        self._judge = QualityRules(config)
        self.rules: Sequence[CleaningRule] = self._judge.rules
        self.counts = self._judge.lines

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        verdicts, texts = self._judge(
            [document.text for document in documents], [document.language for document in documents]
        )
        return [
            broken or changed(document, text)
            for document, broken, text in zip(documents, verdicts.broken, texts, strict=True)
        ]


_LANGUAGE_PAPER = "langid.py, Lui and Baldwin, 2012"
# The model needs a few hundred characters: of a longer text it sees its beginning, middle and end.
_SLICE = 400


class Language:
    """Fills the language of documents and drops those of others; `counts` has how many there are of each."""

    name = "language"

    def __init__(self, config: LanguageConfig) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.counts: Counter[str] = Counter()
        self._config = config
        self._identify = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._keep = CleaningRule("language.keep", _LANGUAGE_PAPER, low=1)
        self._confident = CleaningRule("language.min_confidence", _LANGUAGE_PAPER, low=config.min_confidence)
        self.rules: Sequence[CleaningRule] = (
            [self._keep, self._confident] if config.keep or config.keep_by_source else []
        )

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
        if len(text) > 3 * _SLICE:
            middle = len(text) // 2
            text = " ".join((text[:_SLICE], text[middle : middle + _SLICE], text[-_SLICE:]))
        language, confidence = self._identify.classify(text)
        return str(language), float(confidence)


def steps_of(config: CleanConfig, classifier: Path | None) -> list[CleaningStep]:
    """The steps that the config turns on, ready to work. Takes a second or two; the first time on a machine some ten
    seconds more, in which native code is compiled.

    Args:
        classifier: the folder of the trained quality classifier, where the config has one.
    """
    steps: list[CleaningStep] = [Quality(config)]
    if config.language:
        steps.append(Language(config.language))
    if config.classifier and classifier:
        from corpus.cleaning.classifier import QualityClassifier

        steps.append(QualityClassifier(config.classifier, classifier))
    if config.toxicity:
        from corpus.cleaning.people.toxicity import Toxicity

        steps.append(Toxicity(config.toxicity))
    if config.personal_data:
        from corpus.cleaning.people.personal_data import Masking

        steps.append(Masking(config.personal_data))
    if config.neutral:
        from corpus.cleaning.people.neutral import Neutral

        steps.append(Neutral(config.neutral))
    if config.counterfactual:
        from corpus.cleaning.people.counterfactual import Balance

        steps.append(Balance(config.counterfactual))
    return steps
