"""Toxicity: scorers, which give a text a number between 0 and 1, and the cleaning step that drops documents by one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.config import ToxicityFilterConfig
from corpus.cleaning.rules import Broken, Rule
from corpus.documents.parts import Document
from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer


class Scorer(Protocol):
    """Gives each text a toxicity between 0 and 1."""

    name: str
    limits: str

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Returns scores (N,).

        Args:
            texts: N strings.
        """
        ...


class ProfanityScorer:
    """alt-profanity-check: a linear SVM on word counts, calibrated to probabilities; it ships in its package."""

    limits = (
        "It sees profanity, not implicit hate: agreement with human labels 0.96 on Davidson et al.'s tweets (probably "
        "its own training data), 0.72 on Surge AI's comments, 0.44 on HateCheck."
    )

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # Its pickle is from an older scikit-learn; a test holds its scores to known values.
            warnings.simplefilter("ignore")
            from profanity_check import predict_prob

        self.name = f"alt-profanity-check {version('alt-profanity-check')}"
        self._predict = predict_prob

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return np.asarray(self._predict(list(texts)), dtype=np.float64) if texts else np.zeros(0)


class ClassifierScorer:
    """Any Hugging Face sequence classifier in a local folder; its score is the probability of one label, and 0 of a
    text that has no token for it."""

    limits = "As its makers state them."

    def __init__(self, folder: str, label: str, batch_size: int = 16) -> None:
        """label: as in the model's config; raises ValueError naming those that there are."""
        from transformers import AutoModelForSequenceClassification

        self._tokenizer: Any = load_pretrained_tokenizer(Path(folder))
        self._model: Any = load_pretrained_model(AutoModelForSequenceClassification, Path(folder)).eval()
        labels = {str(name): int(number) for number, name in self._model.config.id2label.items()}
        if label not in labels:
            raise ValueError(f"expected one of the labels {', '.join(labels)} of {folder}, not {label}")
        self.name = f"{folder} ({label})"
        self._label = labels[label]
        self._batch_size = batch_size

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        import torch

        scores = np.zeros(len(texts))
        with torch.inference_mode():
            for start in range(0, len(texts), self._batch_size):
                batch = list(texts[start : start + self._batch_size])
                # Attention over nothing is NaN; most tokenizers begin a text with a special token.
                filled = [index for index, ids in enumerate(self._tokenizer(batch)["input_ids"]) if ids]
                if not filled:
                    continue
                encoded = self._tokenizer(
                    [batch[index] for index in filled], truncation=True, padding=True, return_tensors="pt"
                )
                logits = self._model(**encoded).logits  # (B, labels)
                # A model of one problem a label has a sigmoid each, one of exclusive labels a softmax.
                several = self._model.config.problem_type == "multi_label_classification" or logits.shape[-1] == 1
                shares = torch.sigmoid(logits) if several else torch.softmax(logits, dim=-1)
                scores[[start + index for index in filled]] = shares[:, self._label].double().numpy()
        return scores


class Toxicity:
    """A document's score is the highest of its windows: one toxic passage in a long text does not drown."""

    name = "toxicity"

    def __init__(self, config: ToxicityFilterConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._window = config.window_characters
        self._scorer: Scorer = ClassifierScorer(config.model, config.label) if config.model else ProfanityScorer()
        self._rule = Rule("toxicity.max_score", self._scorer.name, high=config.max_score)
        self.rules: Sequence[Rule] = [self._rule]

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
