"""The steps of cleaning that a config turns on, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.rules import Broken, CleaningStep, Rule, changed
from corpus.documents.parts import Document


class Quality:
    """The rules of Gopher, C4 and FineWeb."""

    name = "quality"

    def __init__(self, config: CleanConfig) -> None:
        from corpus.cleaning.quality import QualityRules

        self._judge = QualityRules(config)
        self.rules: Sequence[Rule] = self._judge.rules
        self.counts = self._judge.lines

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        verdicts, texts = self._judge(
            [document.text for document in documents], [document.language for document in documents]
        )
        return [
            broken or changed(document, text)
            for document, broken, text in zip(documents, verdicts.broken, texts, strict=True)
        ]


def steps_of(config: CleanConfig, classifier: Path | None) -> list[CleaningStep]:
    """The steps that the config turns on, ready to work. Takes a second or two; the first time on a machine some ten
    seconds more, in which native code is compiled.

    Args:
        classifier: the folder of the trained quality classifier, where the config has one.
    """
    steps: list[CleaningStep] = [Quality(config)]
    if config.language:
        from corpus.cleaning.languages.language import Language

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
