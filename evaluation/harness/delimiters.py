"""The text between a question and its answer: a space where words have spaces between them, else nothing.

lm-eval has one `target_delimiter` for all items of a task, a space by default. Chinese, Japanese, Thai and similar
scripts have no spaces between words, code has its own spacing, and an answer that begins with a space would get two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from evaluation.config import BenchmarkTask

SPACE = " "
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u2e80-\u3000\u3003-\u312f\u31a0-\u31ff"
    "\u3400-\u9fff\ua9e0-\ua9ff\uaa60-\uaadf\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Letters of Thai, Lao, Tibetan, Burmese, Khmer, Tai, Han, kana and Bopomofo. Hangul is not among them."""
_WORD = re.compile(r"[^\W\d_]+")
_CODE_LINE = re.compile(
    r"""\s*(?:
        (?:async\s+)?def\s+\w+\s*\( | class\s+\w+\s*[:({] | import\s+[\w.]+(?:\s+as\s+\w+)?;?$
        | from\s+[\w.]+\s+import\s | return\b | (?:if|for|while|elif|else|try|except|with|switch)\b.*[:{(]\s*$
        | [@\#]\w+(?:[\s<("]|$) | >>>\s
        | (?:public|private|static|const|let|var|fn|func|function)\s+\w+.*[=({]
        | [\w.\[\]]+\s*[-+*/|&]?=(?:\s|$) | [\w.]+\([^()]*$ | [\w.]+\(.*\);?$ | [)\]}]+[;,]?\s*$ | /[/*] | .*[;{]\s*$
    )""",
    re.VERBOSE,
)


def delimiter_between(question: str, answer: str, suffix: str = "") -> str:
    """Return " " or "" for one answer, by the script of the question or, where it has no letters, of the answer.

    Args:
        question: text before the answer, without `suffix`.
        suffix: text between both, such as `\\nAnswer:`, of whatever script.
    """
    before = question + suffix
    if answer[:1].isspace() or before[-1:].isspace():
        return ""
    text = question if _WORD.search(question) else answer
    words = _WORD.findall(_UNSPACED.sub(" ", text))
    if len(_UNSPACED.findall(text)) > len(words):
        return ""
    return "" if is_code(before) else SPACE


def is_code(text: str) -> bool:
    """Return True if a text ends in code: inside a fence, or on a line of code if at least half of the lines are."""
    if text.count("\n```") % 2 or (text.startswith("```") and not text.count("\n```")):
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    code = [_CODE_LINE.match(line) is not None for line in lines]
    return len(lines) > 1 and code[-1] and 2 * sum(code) >= len(lines)


def cloze_parts(task: BenchmarkTask, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the context of a cloze row, the delimiter, and the continuation that must follow."""
    if row.get(task.context) is None:
        # A line break at the end of a passage belongs to its file, and is not asked for.
        context, space, last = row[task.text].rstrip().rpartition(SPACE)
        return context, space if task.delimiter is None else task.delimiter, last
    context, follows = str(row[task.context]), str(row[task.continuation])
    return context, delimiter_between(context, follows) if task.delimiter is None else task.delimiter, follows


def choice_delimiters(task: BenchmarkTask, row: Mapping[str, Any]) -> list[str]:
    """Return the delimiter before each choice of a row of kind multiple_choice."""
    if task.delimiter is not None:
        return [task.delimiter] * len(row[task.choices])
    return [delimiter_between(row[task.query], choice, task.query_suffix) for choice in row[task.choices]]


def delimited_choices(task: BenchmarkTask, row: Mapping[str, Any]) -> list[str]:
    """Return the choices of a row, each with its delimiter in front."""
    return [before + choice for before, choice in zip(choice_delimiters(task, row), row[task.choices], strict=True)]


def common_delimiter(task: BenchmarkTask, rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the delimiter before all choices of all rows; None if they differ."""
    common: str | None = None
    for row in rows:
        for delimiter in choice_delimiters(task, row):
            if common is not None and delimiter != common:
                return None
            common = delimiter
    return common
