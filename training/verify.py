"""Answers that a rule can check: which prompts have one, and whether an answer is right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.readers.config import RULE
from infra.errors import stage_error


class Rule(NamedTuple):
    """What tells whether an answer to a prompt is right.

    name: `exact` (it equals the response, but for white space around it) or `words:4-6` (it has so many words).
    response: that of the pairs file.
    """

    name: str
    response: str

    def allows(self, answer: str) -> bool:
        """Whether the answer is right."""
        if self.name == "exact":
            return answer.strip() == self.response
        low, high = map(int, self.name.removeprefix("words:").split("-"))
        return low <= len(answer.split()) <= high


def rules_of(rows: Iterable[Mapping[str, str]], where: str) -> list[Rule | None]:
    """The rule of each prompt of a pairs file; None where none can tell.

    where: the file, for messages. Raises StageError `unknown_rule` for a rule that is none, or one without a response.
    """
    found: list[Rule | None] = []
    for number, row in enumerate(rows, 1):
        rule, response = row.get("verify"), row.get("response", "").strip()
        if rule is not None and (not re.fullmatch(RULE, str(rule)) or not response):
            raise stage_error(
                "unknown_rule",
                f"{where}:{number}",
                f"expected verify: exact or words:LOW-HIGH beside a response, found {rule!r}",
                "leave verify out, or name the rule",
            )
        found.append(Rule(rule, response) if rule else None)
    return found


def right_answers(answers: Sequence[str], rules: Sequence[Rule | None]) -> NDArray[np.float64]:
    """1 for each answer that is right and 0 for one that is wrong; nan where no rule can tell."""
    return np.array(
        [np.nan if rule is None else float(rule.allows(answer)) for answer, rule in zip(answers, rules, strict=True)]
    )
