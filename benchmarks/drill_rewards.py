"""The reward function of drill.yaml, which graders call in their processes."""

from __future__ import annotations

from collections.abc import Sequence


def vowels(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the share of vowels in each answer."""
    return [sum(answer.count(letter) for letter in "aeiou") / max(1, len(answer)) for answer in answers]
