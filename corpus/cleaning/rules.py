"""Rules: each bounds one measure of a document and names the paper that it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOPHER = "Gopher, Rae et al., 2021"
C4 = "C4, Raffel et al., 2020"
FINEWEB = "FineWeb, Penedo et al., 2024"
OURS = "Stemma"


@dataclass(frozen=True)
class Rule:
    """Drops a document whose measure lies outside [low, high]; `name` is the config key that sets it, below `clean`."""

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


def at_least(name: str, paper: str, low: float | None) -> Rule | None:
    return None if low is None else Rule(name, paper, low=low)


def at_most(name: str, paper: str, high: float | None) -> Rule | None:
    return None if high is None else Rule(name, paper, high=high)


@dataclass(frozen=True)
class Broken:
    """A rule that a document broke, with what was measured."""

    rule: Rule
    value: float


class Verdicts:
    """What became of each document of a batch: `broken[d]` is the first rule that document d broke, or None."""

    def __init__(self, documents: int) -> None:
        self.broken: list[Broken | None] = [None] * documents
        self.standing = np.ones(documents, bool)

    def apply(self, rule: Rule | None, values: NDArray[Any]) -> None:
        """values (D,): measures of all documents; those that were dropped before keep their rule."""
        if rule is None:
            return
        for document in np.flatnonzero(self.standing & ((values < rule.low) | (values > rule.high))).tolist():
            self.broken[document] = Broken(rule, float(values[document]))
            self.standing[document] = False
