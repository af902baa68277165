"""A quality classifier from good and bad examples: hashed words and pairs of words, logistic regression.

Brown et al., 2020, Language Models are Few-Shot Learners, appendix A; Taylor et al., 2022, Galactica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.config import ClassifierConfig
from corpus.cleaning.rules import Broken, CleaningRule, draw
from corpus.documents.parts import Document
from corpus.documents.sources import source_name
from infra.errors import stage_error

PAPER = "GPT-3, Brown et al., 2020"
CHARACTERS = 5000
"""Of longer documents the beginning is looked at."""


def _features(texts: Sequence[str], size: int) -> Any:
    """Sparse (N, size), rows of length 1; what hashes alike counts as one."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashing = HashingVectorizer(n_features=size, ngram_range=(1, 2), alternate_sign=False, norm="l2")
    return hashing.transform([text[:CHARACTERS] for text in texts])


def train_classifier(config: ClassifierConfig, documents: Iterable[Document], out: Path) -> dict[str, float]:
    """Train a classifier of good and bad sources, and write out/model.safetensors: weight (F,), bias (1,).

    Returns the numbers of examples and the accuracy on those that were held out.
    Raises StageError `no_examples`, naming the sources there are, if either side has fewer than ten.
    """
    from safetensors.numpy import save_file
    from sklearn.linear_model import LogisticRegression

    examples, sources = _examples(config, documents)
    for side, names in (("good", config.good), ("bad", config.bad)):
        if sum(label == (side == "good") for _, label, _ in examples) < 10:
            raise stage_error(
                "no_examples",
                f"clean.classifier.{side}",
                f"expected at least 10 documents of the sources {', '.join(names)}; there are {_list_counts(sources)}",
                "name sources of ingest.read",
            )
    heldout = np.array([is_heldout for _, _, is_heldout in examples])
    labels = np.array([label for _, label, _ in examples])
    features = _features([text for text, _, _ in examples], config.features)
    # Good and bad count alike, however many there are of each.
    model = LogisticRegression(C=config.strength, class_weight="balanced", max_iter=300)
    model.fit(features[~heldout], labels[~heldout])
    weight, bias = model.coef_[0].astype(np.float32), model.intercept_.astype(np.float32)
    out.mkdir(parents=True, exist_ok=True)
    save_file({"weight": weight, "bias": bias}, out / "model.safetensors")
    guessed = _scores(features[heldout], weight, bias) >= 0.5
    right = [float((guessed[labels[heldout] == side] == side).mean()) for side in (True, False)]
    return {
        "classifier_examples": len(examples),
        "classifier_heldout_examples": int(heldout.sum()),
        "classifier_heldout_accuracy": float(np.mean(right)),
    }


def _examples(
    config: ClassifierConfig, documents: Iterable[Document]
) -> tuple[list[tuple[str, bool, bool]], Counter[str]]:
    """Return (text, True if it is good, True if it is held out) of at most `max_examples` a side, and documents by
    source.
    """
    by_side: dict[bool, list[tuple[float, str, bool]]] = {True: [], False: []}
    sources: Counter[str] = Counter()
    for document in documents:
        name = source_name(document.source)
        sources[name] += 1
        if name in config.good or name in config.bad:
            side = by_side[name in config.good]
            is_heldout = draw(document.id, "heldout", config.seed) < config.heldout_share
            side.append((draw(document.id, "example", config.seed), document.text[:CHARACTERS], is_heldout))
            if len(side) == 2 * config.max_examples:
                side.sort()
                del side[config.max_examples :]
    return [
        (text, label, is_heldout)
        for label, side in by_side.items()
        for _, text, is_heldout in sorted(side)[: config.max_examples]
    ], sources


def _list_counts(sources: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(sources.items())) or "none"


def _scores(features: Any, weight: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float64]:
    logits = features @ weight.astype(np.float64) + float(bias[0])
    return 1 / (1 + np.exp(-logits))


class QualityClassifier:
    """Drops documents that look like the bad examples."""

    name = "classifier"

    def __init__(self, config: ClassifierConfig, folder: Path) -> None:
        from safetensors.numpy import load_file

        tensors = load_file(folder / "model.safetensors")
        self.counts: Counter[str] = Counter()
        self._weight, self._bias = tensors["weight"], tensors["bias"]
        self._config = config
        self._applies_to = set(config.apply_to if config.apply_to is not None else config.bad)
        low = config.min_score if config.keep == "threshold" else None
        self._rule = CleaningRule(f"classifier.{'min_score' if low is not None else 'pareto'}", PAPER, low=low or 0.0)
        self.rules: Sequence[CleaningRule] = [self._rule]

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        scores = _scores(_features([d.text for d in documents], self._config.features), self._weight, self._bias)
        return [
            document if self._keeps(document, float(score)) else Broken(self._rule, float(score))
            for document, score in zip(documents, scores, strict=True)
        ]

    def _keeps(self, document: Document, score: float) -> bool:
        if source_name(document.source) not in self._applies_to:
            return True
        if self._config.keep == "threshold":
            return score >= self._config.min_score
        # numpy's pareto(alpha), which GPT-3 compares 1 - score with, as the inverse of its distribution.
        drawn = draw(document.id, "pareto", self._config.seed)
        return (1 - drawn) ** (-1 / self._config.alpha) - 1 > 1 - score
