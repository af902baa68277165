"""Answers that a rule can check: the rules of prompts, and the check of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.pairs.references import number_in, unusable_reference
from corpus.readers.config import RULE
from infra.errors import stage_error
from infra.io.json import BadJson, parse_json
from infra.run import Run
from training.rl.grading import Graders
from training.sandbox.runner import described

TESTS = "tests"
_RULES = "exact, number, json, tests, words:LOW-HIGH or format:REGEX"
_FIX = "leave verify out, or name the rule and the reference that it compares answers with"


class Rule(NamedTuple):
    """A rule that decides if an answer to a prompt is right.

    name: `exact` (it equals the response, but for white space around it), `number` (it ends with the response's number,
    see `corpus.pairs.references.number_in`), `json` (it is JSON, with all keys of the response where that is an
    object), `words:4-6` (it has 4 to 6 words), `format:REGEX` (the whole of it matches, but for white space around it)
    or `tests` (it is code that passes the assertions in the response, see `training.sandbox.unit_tests`).
    response: of the pairs file; the reference in its place where there is one.
    """

    name: str
    response: str

    def allows(self, answer: str) -> bool:
        """Return True if the answer is right by any rule but `tests`, for which `right_answers` runs it."""
        kind, _, setting = self.name.partition(":")
        match kind:
            case "exact":
                return answer.strip() == self.response
            case "number":
                number = number_in(answer)
                return number is not None and number == number_in(self.response)
            case "json":
                return _is_json_like(answer, self.response)
            case "format":
                return re.fullmatch(setting, answer.strip()) is not None
            case _:
                low, high = map(int, setting.split("-"))
                return low <= len(answer.split()) <= high


def _is_json_like(answer: str, reference: str) -> bool:
    try:
        value = parse_json(answer)
    except BadJson:
        return False
    expected = parse_json(reference)
    return not isinstance(expected, dict) or (isinstance(value, dict) and expected.keys() <= value.keys())


def rules_of(rows: Iterable[Mapping[str, str]], where: str) -> list[Rule | None]:
    """Return the rule of each prompt of a pairs file; None where it has none.

    Args:
        where: the file, for messages.

    Raises StageError `unknown_rule` for an unknown rule, or one without a usable response.
    """
    rules: list[Rule | None] = []
    for number, row in enumerate(rows, 1):
        rule, response = row.get("verify"), (row.get("reference") or row.get("response", "")).strip()
        if rule is not None and not re.fullmatch(RULE, str(rule)):
            raise stage_error("unknown_rule", f"{where}:{number}", f"expected verify: {_RULES}, found {rule!r}", _FIX)
        if rule is not None and (why := unusable_reference(rule, response)):
            raise stage_error(
                "unknown_rule", f"{where}:{number}", f"verify: {rule} cannot use this reference: {why}", _FIX
            )
        rules.append(Rule(rule, response) if rule else None)
    return rules


def right_answers(answers: Sequence[str], rules: Sequence[Rule | None], graders: Graders) -> NDArray[np.float64]:
    """Return 1 for each answer that is right and 0 for one that is wrong; nan where no rule judges.

    Args:
        graders: run the answers with unit tests.

    Raises StageError where these have no sandbox.
    """
    pairs = list(zip(answers, rules, strict=True))
    tested = [(at, answer, rule) for at, (answer, rule) in enumerate(pairs) if rule is not None and rule.name == TESTS]
    right = np.array(
        [np.nan if rule is None or rule.name == TESTS else float(rule.allows(answer)) for answer, rule in pairs]
    )
    if tested:
        numbers, given, those = zip(*tested, strict=True)
        right[list(numbers)] = graders.tests(given, [rule.response for rule in those])
    return right


def announce_sandbox(rules: Iterable[Rule | None], graders: Graders, run: Run) -> None:
    """Log the sandbox of unit tests, where any rule is `tests`. Raises StageError where there is none."""
    if any(rule is not None and rule.name == TESTS for rule in rules):
        run.event("sandbox", described(graders.sandbox), sandbox=graders.sandbox)
