"""The interface of a cleaning step, the rules by which it may drop documents, and draws that are equal on every
worker."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus.documents.parts import Document, make_document

GOPHER = "Gopher, Rae et al., 2021"
C4 = "C4, Raffel et al., 2020"
FINEWEB = "FineWeb, Penedo et al., 2024"
STEMMA = "Stemma"


@dataclass(frozen=True)
class CleaningRule:
    """Drops a document whose measure is outside [low, high]; `name` is the config key that sets it, below `clean`."""

    name: str
    paper: str
    low: float = float("-inf")
    high: float = float("inf")

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"{self.name} (at least {self.low:,g})"
        if self.low == float("-inf"):
            return f"{self.name} (at most {self.high:,g})"
        return f"{self.name} ({self.low:,g} to {self.high:,g})"


def at_least(name: str, paper: str, low: float | None) -> CleaningRule | None:
    return None if low is None else CleaningRule(name, paper, low=low)


def at_most(name: str, paper: str, high: float | None) -> CleaningRule | None:
    return None if high is None else CleaningRule(name, paper, high=high)


@dataclass(frozen=True)
class Broken:
    """A rule that a document broke, with the measured value."""

    rule: CleaningRule
    value: float


class Verdicts:
    """Verdicts on the documents of a batch: `broken[d]` is the first rule that document d broke, or None."""

    def __init__(self, documents: int) -> None:
        self.broken: list[Broken | None] = [None] * documents
        self.standing = np.ones(documents, bool)

    def apply(self, rule: CleaningRule | None, values: NDArray[Any]) -> None:
        """values (D,): measures of all documents; those that were dropped before keep their rule."""
        if rule is None:
            return
        for document in np.flatnonzero(self.standing & ((values < rule.low) | (values > rule.high))).tolist():
            self.broken[document] = Broken(rule, float(values[document]))
            self.standing[document] = False


class CleaningStep(Protocol):
    """Looks at a batch of documents and drops, changes or keeps each.

    name: the section of the config that turns it on.
    rules: by which it may drop documents. counts: other actions besides dropping, by name, e.g. {"pii.email": 12}; adds
    up over batches.
    """

    name: str
    rules: Sequence[CleaningRule]
    counts: Counter[str]

    def __call__(self, documents: Sequence[Document]) -> Sequence[Document | Broken | list[Document]]:
        """For each document the one or ones that take its place, or the rule that it broke."""
        ...


def changed(document: Document, text: str) -> Document:
    """The document with another text, and so another id; it stays in its group and thus on its side of the split."""
    if text == document.text:
        return document
    return document._replace(text=text, id=make_document(text, document.source).id)


def draw(identity: str, purpose: str, seed: int) -> float:
    """A number in [0, 1), independent of the order and number of workers."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{identity}".encode(), digest_size=8).digest()
    # Of 64 bits a float holds 53.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
