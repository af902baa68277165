"""References of the rules of `verify`: the number, the JSON or the tests in a record's reference."""

from __future__ import annotations

import ast
import re
from decimal import Decimal

from infra.io.json import BadJson, parse_json

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-+\u2212]?[$€£¥]?[-+\u2212]?)?"
    r"(?P<size>(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)"
)
"""A number with its sign, thousands' commas, fraction and exponent. A dash right behind a letter, a digit or a bracket
is no sign."""
_MARK = "####"


def number_in(text: str) -> Decimal | None:
    """Return the number that a text ends with: the first after its last `####`, as GSM8K has it (Cobbe et al. 2021),
    else the last of all; None where there is none. `1,234.50`, `-3`, `$5`, `.5` and `1e3` are read; a fraction `1/2` is
    two numbers, a percentage the number before its sign."""
    _, mark, answer_part = text.rpartition(_MARK)
    numbers = list(_NUMBER.finditer(answer_part))
    if not numbers:
        return None
    match = numbers[0 if mark else -1]
    size = Decimal(match["size"].replace(",", ""))
    return -size if set(match["sign"] or "") & {"-", "\u2212"} else size


def unusable_reference(rule: str, reference: str) -> str:
    """Return the reason why a rule cannot use this reference; "" where it can."""
    if not reference.strip():
        return "there is no text to compare answers with"
    if rule == "number" and number_in(reference) is None:
        return "there is no number in it"
    if rule == "json":
        try:
            parse_json(reference)
        except BadJson as error:
            return f"it is not JSON: {error}"
    if rule == "tests":
        try:
            tree = ast.parse(reference)
        except (SyntaxError, ValueError) as error:
            return f"it is not Python: {error}"
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            return "there is no assert in it"
    return ""
