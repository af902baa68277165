"""Scorers of toxicity by config, and how good each is on comments that people labelled."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.toxicity import ClassifierScorer, ProfanityScorer, Scorer
from evaluation.config import LabelledSet, ToxicityScorer
from infra.errors import stage_error

Labelled = tuple[list[str], list[bool]]

SETS: Mapping[str, tuple[str, str, Callable[[str], bool]]] = {
    "davidson": ("tweet", "class", lambda label: label in {"0", "1"}),
    "hatecheck": ("test_case", "label_gold", lambda label: label == "hateful"),
    "surge": ("text", "is_toxic", lambda label: label == "Toxic"),
}
"""Columns of text and label of each published file, and which labels are toxic: of Davidson et al. hate and offence."""


class LexiconScorer:
    """1 for a text with a word or phrase of a list, whole and whatever its case; 0 for others."""

    limits = "It sees the listed words alone, whoever says them and however they are meant."

    def __init__(self, path: Path) -> None:
        """path: a word or phrase a line, or a CSV file with them in the column `text` or the first one."""
        words = read_words(path)
        longest_first = sorted(set(words), key=len, reverse=True)
        self._any = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
        self.name = f"lexicon {path.name} ({len(set(words))} words)"

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return np.array([float(self._any.search(text) is not None) for text in texts])


def make_scorer(config: ToxicityScorer) -> Scorer:
    """The scorer that a config names. Raises StageError `bad_scorer`, `bad_lexicon`."""
    if config.kind == "svm":
        return ProfanityScorer()
    path = Path(str(config.path))
    try:
        return LexiconScorer(path) if config.kind == "lexicon" else ClassifierScorer(str(path), config.label)
    except (OSError, ValueError) as error:
        message = f"expected a {config.kind}: {str(error).splitlines()[0]}"
        raise stage_error("bad_scorer", str(path), message, "check the path and the label") from error


def scorer_quality(
    scorer: Scorer, sets: Iterable[LabelledSet], threshold: float, progress: Callable[[], None]
) -> list[dict[str, Any]]:
    """How a scorer's judgements agree with people's on each labelled set: AUC over all thresholds, F1 at `threshold`.

    Both by scikit-learn. progress: called before each set.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    found = []
    for one in sets:
        progress()
        texts, labels = read_labelled(one)
        scores = scorer(texts)
        found.append(
            {
                "set": one.kind,
                "n": len(texts),
                "toxic": sum(labels),
                "auc": round(float(roc_auc_score(labels, scores)), 6),
                "f1": round(float(f1_score(labels, scores >= threshold, zero_division=0)), 6),
                "accuracy": round(float(np.mean((scores >= threshold) == np.array(labels))), 6),
            }
        )
    return found


def read_labelled(config: LabelledSet) -> Labelled:
    """The texts of a published file, and whether people called them toxic.

    Raises StageError `bad_labelled_set` for missing columns and where there is one label alone.
    """
    text, label, is_toxic = SETS[config.kind]
    path = Path(config.path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := {text, label} - set(reader.fieldnames or []):
                message = f"expected the columns {text} and {label}; missing: {', '.join(sorted(missing))}"
                raise stage_error("bad_labelled_set", f"{path}:1", message)
            rows = [(row[text], is_toxic(row[label])) for row in reader if row[text]][: config.limit]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise stage_error("bad_labelled_set", str(path), f"cannot be read: {error}") from error
    if len({toxic for _, toxic in rows}) < 2:
        raise stage_error("bad_labelled_set", str(path), "expected toxic texts and others")
    return [text for text, _ in rows], [toxic for _, toxic in rows]


def read_words(path: Path) -> list[str]:
    """The words or phrases of a file: one a line, or the column `text` of a CSV file, or its first column.

    Raises StageError `bad_lexicon` for a file that cannot be read or holds none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                reader = csv.DictReader(file)
                column = "text" if "text" in (reader.fieldnames or []) else (reader.fieldnames or [""])[0]
                lines = [row[column] or "" for row in reader]
            else:
                lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise stage_error("bad_lexicon", str(path), f"cannot be read: {error}") from error
    if words := [line.strip() for line in lines if line.strip()]:
        return words
    raise stage_error("bad_lexicon", str(path), "expected at least one word, found none")
