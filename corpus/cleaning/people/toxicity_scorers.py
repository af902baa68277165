"""Scorers of toxicity: profanity, a classifier, or a list of words. Each gives a text a number between 0 and 1."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from infra.errors import stage_error


class TextScorer(Protocol):
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


class LexiconScorer:
    """Scorer that gives 1 to a text with a word or phrase of a list, whole and in any case, and 0 to others."""

    limits = "It sees only the listed words, regardless of the speaker and the meaning."

    def __init__(self, path: Path) -> None:
        """path: one word or phrase per line, or a CSV file with them in the column `text` or the first one."""
        words = read_words(path)
        longest_first = sorted(set(words), key=len, reverse=True)
        self._any = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
        self.name = f"lexicon {path.name} ({len(set(words))} words)"

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return np.array([float(self._any.search(text) is not None) for text in texts])


def read_words(path: Path) -> list[str]:
    """Return the words or phrases of a file: one per line, or the column `text` of a CSV file, or its first column.

    Raises StageError `bad_lexicon` for a file that cannot be read or holds none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                reader = csv.DictReader(file)
                column = "text" if "text" in (reader.fieldnames or []) else (reader.fieldnames or [""])[0]
                lines = [row.get(column) or "" for row in reader]
            else:
                lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise stage_error("bad_lexicon", str(path), f"cannot be read: {error}") from error
    if words := [line.strip() for line in lines if line.strip()]:
        return words
    raise stage_error("bad_lexicon", str(path), "expected at least one word, found none")
