"""Answers that a rule can check: which prompts have one, and whether an answer is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from corpus.readers.config import Verify
from infra.errors import stage_error


def references_of(rows: Iterable[Mapping[str, str]], where: str) -> list[str | None]:
    """The right answer to each prompt of a pairs file; None where no rule can tell.

    where: the file, for messages. Raises StageError `unknown_rule` for a rule that is none, or one without a response.
    """
    found: list[str | None] = []
    for number, row in enumerate(rows, 1):
        rule = row.get("verify")
        if rule is not None and (rule not in get_args(Verify) or not row.get("response", "").strip()):
            raise stage_error(
                "unknown_rule",
                f"{where}:{number}",
                f"expected verify: {' or '.join(get_args(Verify))} beside a response, found {rule!r}",
                "leave verify out, or name the rule",
            )
        found.append(row["response"].strip() if rule else None)
    return found


def is_right(answer: str, reference: str) -> bool:
    """Whether an answer equals the reference, but for white space around it."""
    return answer.strip() == reference


def right_answers(answers: Sequence[str], references: Sequence[str | None]) -> NDArray[np.float64]:
    """1 for each answer that is right and 0 for one that is wrong; nan where no rule can tell."""
    return np.array(
        [
            np.nan if reference is None else float(is_right(answer, reference))
            for answer, reference in zip(answers, references, strict=True)
        ]
    )
