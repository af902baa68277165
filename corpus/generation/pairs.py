"""Questions with their answers, parsed from a model's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from infra.io.json import BadJson, parse_json

_FENCED = re.compile(r"\A\s*```\w*\s*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_MARK = re.compile(
    r"\s*(?:[-*#>•]+\s+|\d+[.)]\s+)*(?:\*\*|__)?(question|answer|q|a)(?:\s*\d+)?(?:\*\*|__)?\s*[:：]\s*(?:\*\*|__)?\s*",
    re.IGNORECASE,
)
_QUESTION_KEYS = ("question", "instruction", "prompt", "q")
_ANSWER_KEYS = ("answer", "response", "output", "a")


def pairs_in(text: str) -> list[tuple[str, str]]:
    """The questions and answers in a text: lines `Question: …` and `Answer: …`, also `Q:` and `A:`, numbered, as a list
    or in bold, each going on until the next mark; or a JSON list of {question, answer}. A question without an answer
    is left out."""
    if fenced := _FENCED.match(text):
        text = fenced[1]
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return _of_json(parse_json(text))
        except BadJson:
            pass
    marked: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if mark := _MARK.match(line):
            marked.append((mark[1][0].lower(), [line[mark.end() :]]))
        elif marked:
            marked[-1][1].append(line)
    parts = [(kind, "\n".join(lines).strip()) for kind, lines in marked]
    return [
        (question, answer)
        for (first, question), (second, answer) in pairwise(parts)
        if (first, second) == ("q", "a") and question and answer
    ]


def _of_json(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):  # {"questions": […]}
        inner = [item for item in value.values() if isinstance(item, list)]
        value = inner[0] if len(inner) == 1 else [value]
    rows = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    pairs = [(_first(row, _QUESTION_KEYS), _first(row, _ANSWER_KEYS)) for row in rows]
    return [(question, answer) for question, answer in pairs if question and answer]


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    texts = (row.get(name) for name in names)
    return next((text.strip() for text in texts if isinstance(text, str) and text.strip()), "")
