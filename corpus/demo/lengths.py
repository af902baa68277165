"""Descriptions in a given number of words, so that a rule can tell whether an answer does what was asked.

Such instructions, which a program can check, are those of IFEval (Zhou et al. 2023) and of Tülu 3's reinforcement
learning (Lambert et al. 2024). A small model learns within minutes to keep to some of them.
"""

from __future__ import annotations

from corpus.demo.summaries import Summary
from corpus.pairs import Pair

RANGES = ((4, 6), (7, 9), (10, 14))
"""Fewest and most words: few wide ranges, since counting to an exact number is beyond a small model."""


def length_pair(summary: Summary) -> Pair | None:
    """The pair of a summary, in the group of its docstring's document; None where its words fall in none of RANGES."""
    words = len(summary.response.split())
    asked = next(((low, high) for low, high in RANGES if low <= words <= high), None)
    if asked is None:
        return None
    low, high = asked
    fields = {"prompt": f"Describe `{summary.signature}` in {low} to {high} words.", "response": summary.response}
    source = summary.source.replace("docstrings/", "lengths/", 1)
    return Pair(fields, source, summary.group, verify=f"words:{low}-{high}")
