"""Recognition of tables without names: whether the first row of a CSV or TSV file is a record like those below it.

Each column votes, by what its first field has in common with the other fields. csv.Sniffer.has_header looks at numbers
and equal lengths alone, which columns of prose have not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

NAMES = frozenset({
    "answer", "answers", "author", "body", "category", "chosen", "class", "code", "completion", "content", "context",
    "date", "description", "document", "id", "idx", "index", "input", "instruction", "key", "label", "lang", "language",
    "messages", "name", "output", "prompt", "query", "question", "rejected", "response", "review", "score", "sentence",
    "source", "split", "summary", "system", "target", "text", "timestamp", "title", "topic", "tweet", "url", "user",
    "year",
})  # fmt: skip
"""Words that name columns, and hardly ever are a field of a record."""
_NUMBER = re.compile(
    r"[+-]?(\d[\d., ]*\d|\d)([eE][+-]?\d+)?\s*%?|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ][\d:.]+Z?)?|nan", re.I
)
_YEAR = re.compile(r"(18|19|20|21)\d\d")
_ADDRESS = re.compile(r"https?://\S+|[\w.+-]+@[\w-]+\.\w+")
_UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_MOST = 0.9
_SENTENCE_WORDS = 5.0


def first_row_is_data(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if the first of these rows is more like a record than like names of columns; False for a table of a
    single row, and for a tie."""
    if len(rows) < 2:
        return False
    first, others = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if not others or {field.strip().lower() for field in first} & NAMES:
        return False
    return (
        sum(_vote(first[column].strip(), [row[column].strip() for row in others]) for column in range(len(first))) > 0
    )


def _vote(first: str, others: Sequence[str]) -> int:
    """Above 0 if a field is one of its column, below 0 if it is a name for them, 0 if it may be either."""
    filled = [field for field in others if field]
    if not filled or not first:
        return 0
    for kind in (_NUMBER, _ADDRESS):
        if sum(kind.fullmatch(field) is not None for field in filled) >= _MOST * len(filled):
            is_year = _YEAR.fullmatch(first) and not all(_YEAR.fullmatch(field) for field in filled)
            return 0 if is_year else 1 if kind.fullmatch(first) else -2
    size, usual = _words(first), median(_words(field) for field in filled)
    if usual >= _SENTENCE_WORDS:
        if size >= _SENTENCE_WORDS and size >= usual / 4 and not first.endswith(("?", ":")):
            return 1
        return -1 if size <= usual / 3 else 0
    # A label that comes again: three classes of a thousand reviews, but not two rows of the same word.
    return 1 if len(filled) > 3 and filled.count(first) > 1 else 0


def _words(text: str) -> float:
    """Words of a text; two characters of a script without spaces count as one."""
    unspaced = len(_UNSPACED.findall(text))
    return unspaced / 2 if unspaced > len(text) / 4 else float(len(text.split()))
