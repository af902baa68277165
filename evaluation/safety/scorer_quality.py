"""Scorers of toxicity by config, and their quality on comments that people labelled."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.cleaning.people.toxicity_scorers import ClassifierScorer, LexiconScorer, ProfanityScorer, TextScorer
from evaluation.config import LabelledSet, ToxicityScorer
from evaluation.results.kept_parts import Keep
from infra.errors import StageError, StemmaError, stage_error

Labelled = tuple[list[str], list[bool]]

SETS: Mapping[str, tuple[str, str, Callable[[str], bool]]] = {
    "davidson": ("tweet", "class", lambda label: label in {"0", "1"}),
    "hatecheck": ("test_case", "label_gold", lambda label: label == "hateful"),
    "surge": ("text", "is_toxic", lambda label: label == "Toxic"),
}
"""Columns of text and label of each published file, and a predicate for toxic labels: for Davidson et al., hate and
offence."""

SCORED_AT_ONCE = 512
"""Number of texts after which scores are stored: a multiple of a classifier's batch, so that batches stay the same."""


class WatchedScorer:
    """Wrapper of a scorer that reports its failures with its name and the number of the text."""

    def __init__(self, scorer: TextScorer) -> None:
        self.name, self.limits, self._scorer = scorer.name, scorer.limits, scorer

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the scores. Raises StageError `scorer_failed`, also if a score is missing or not a finite number."""
        return self.scored(texts, 0, len(texts))

    def scored(self, texts: Sequence[str], before: int, total: int) -> NDArray[np.float64]:
        """Return the scores of one part of `total` texts; `before` texts precede the part."""
        try:
            scores = np.asarray(self._scorer(texts), dtype=np.float64)
        except StemmaError:
            raise
        except Exception as error:
            number = self._first_failing(texts)
            position = (
                f"text {before + number:,}" if number else f"one of the texts {before + 1:,} to {before + len(texts):,}"
            )
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            raise self._error(f"it failed at {position} of {total:,} ({message})") from error
        if scores.shape != (len(texts),):
            raise self._error(f"expected a score for each of {len(texts):,} texts, got an array of {scores.shape}")
        if not np.isfinite(scores).all():
            number = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise self._error(f"its score of text {before + number + 1:,} of {total:,} is {scores[number]}")
        return scores

    def _first_failing(self, texts: Sequence[str]) -> int:
        """Return the number, from 1, of the first text that also fails alone; 0 if none does."""
        for number, text in enumerate(texts, start=1):
            try:
                self._scorer([text])
            except Exception:
                return number
        return 0

    def _error(self, message: str) -> StageError:
        fix = (
            "run again to continue, e.g. if memory ran out; with a corrected or another scorer the stage starts from "
            "the beginning"
        )
        return stage_error("scorer_failed", self.name, message, fix)


def kept_scores(scorer: TextScorer, texts: Sequence[str], name: str, keep: Keep) -> NDArray[np.float64]:
    """Return the scores (N,) of texts, stored in parts under a name."""
    watched = scorer if isinstance(scorer, WatchedScorer) else WatchedScorer(scorer)

    def score_batch(start: int) -> list[float]:
        return watched.scored(texts[start : start + SCORED_AT_ONCE], start, len(texts)).tolist()

    starts = range(0, len(texts), SCORED_AT_ONCE)
    return np.concatenate(
        [np.zeros(0), *(np.array(keep(f"{name}_{start}", partial(score_batch, start))) for start in starts)]
    )


def make_scorer(config: ToxicityScorer) -> WatchedScorer:
    """Return the scorer that a config names. Raises StageError `bad_scorer`, `bad_lexicon`."""
    if config.kind == "svm":
        return WatchedScorer(ProfanityScorer())
    path = Path(str(config.path))
    try:
        lexicon = config.kind == "lexicon"
        return WatchedScorer(LexiconScorer(path) if lexicon else ClassifierScorer(str(path), config.label))
    except (OSError, ValueError) as error:
        message = f"expected a {config.kind}: {str(error).splitlines()[0]}"
        raise stage_error("bad_scorer", str(path), message, "check the path and the label") from error


def scorer_quality(
    scorer: TextScorer, sets: Iterable[LabelledSet], threshold: float, progress: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return a scorer's agreement with people on each labelled set: AUC over all thresholds, F1 at `threshold`.

    Both by scikit-learn.

    Args:
        progress: called before each set.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    rows = []
    for labelled_set in sets:
        progress()
        texts, labels = read_labelled(labelled_set)
        scores = scorer(texts)
        rows.append(
            {
                "set": labelled_set.kind,
                "n": len(texts),
                "toxic": sum(labels),
                "auc": round(float(roc_auc_score(labels, scores)), 6),
                "f1": round(float(f1_score(labels, scores >= threshold, zero_division=0)), 6),
                "accuracy": round(float(np.mean((scores >= threshold) == np.array(labels))), 6),
            }
        )
    return rows


def read_labelled(config: LabelledSet) -> Labelled:
    """Return the texts of a published file, and True for each text that people labelled toxic.

    Raises StageError `bad_labelled_set` for missing columns, or if there is only one label.
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
        raise stage_error("bad_labelled_set", str(path), "expected both toxic and other texts")
    return [text for text, _ in rows], [toxic for _, toxic in rows]
