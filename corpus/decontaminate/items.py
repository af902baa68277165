"""The benchmarks' test items: their texts, the forms in which a dump may have them, and their words."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus.documents.words import Bytes, Hashes, character_table, hash_words, words_in
from infra.io.json import read_own_json_lines

PUNCTUATION = re.compile(r"[^\w\s]|_")
_FOOTNOTE = re.compile(rb"""\[(?:(?<=[\w.,;:!?"')\x80-\xff]\[)|(?<=[\w.,;:!?"')\x80-\xff] \[))\d{1,3}\]""")
"""The number of a footnote behind a word or a mark, as encyclopedias have them; in lists of numbers, [1] is none."""
_SPACES = (re.compile(rb"&(?:nbsp|#160|#xA0|#xa0|ensp|emsp|thinsp);"), _FOOTNOTE)
"""Text that separates words as a space does: spaces as HTML writes them, whose names would be words, and footnotes.
Each has a fixed beginning, by which `re` finds it at the speed of memory."""


class ItemAnswer(NamedTuple):
    """A question and a right answer to it: together they give the item away where the answer begins at most `within`
    words after the question."""

    question: str
    answer: str
    within: int


class Item(NamedTuple):
    """One test item, a line of items.jsonl.

    texts: each gives the item away; one of fewer than `min_words` words counts where it is alone. The first one is
        shown in reports.
    parts: each gives the item away from `min_words` and PART_WORDS words on: the question alone, choices, what a dump
        may have in a row.
    answers: for questions of fewer than `min_words` words, found in records of any form.
    """

    task: str
    item: str
    texts: list[str]
    parts: Sequence[str] = ()
    answers: Sequence[ItemAnswer] = ()

    def as_line(self) -> str:
        return json.dumps(self._asdict(), ensure_ascii=False) + "\n"


def read_items(folder: Path) -> list[Item]:
    return [_item(**row) for row in read_own_json_lines(folder / "items.jsonl")]


def _item(task: str, item: str, texts: list[str], parts: Sequence[str] = (), answers: Iterable[list] = ()) -> Item:
    return Item(task, item, texts, list(parts), [ItemAnswer(*answer) for answer in answers])


def has_spaces(text: memoryview) -> bool:
    """Return True if `with_spaces` changes the text."""
    return any(pattern.search(text) for pattern in _SPACES)


def with_spaces(text: bytes) -> bytes:
    """Return the text with spaces for what separates words, as many, so that every place stays."""
    for pattern in _SPACES:
        text = pattern.sub(lambda match: b" " * len(match[0]), text)
    return text


def forms_of(text: str) -> tuple[str, ...]:
    """Return a text unchanged, without its punctuation, so that "read-only" is found as "read only" and as "readonly",
    and as JSON and HTML write it: their escapes are other words."""
    text = with_spaces(text.encode()).decode()
    escaped = html.escape(text)
    return text, PUNCTUATION.sub("", text), json.dumps(text)[1:-1], escaped, escaped.replace("&#x27;", "&#39;")


class Words(NamedTuple):
    """The words of a text, characters in scripts without spaces. data: its UTF-8; hashes, starts: (W,), of each word;
    number: how many words these are, those of scripts without spaces estimated."""

    data: Bytes
    hashes: Hashes
    starts: NDArray[np.int64]
    number: float


def words_of(text: str) -> Words:
    data = np.frombuffer(text.encode(), np.uint8)
    hashes = np.empty(data.size, np.uint64)
    starts, ends = np.empty(data.size, np.int64), np.empty(data.size, np.int64)
    count = hash_words(data, 0, data.size, character_table(), hashes, starts, ends)
    return Words(data, hashes[:count], starts[:count], words_in(data, starts, count))
