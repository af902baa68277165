"""The items of a JSON list as texts, one at a time, whatever stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from corpus.readers.lines import TooLong

_BLANK = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'["\[\]{},]')
_INSIDE = re.compile(r'["\\]')


class TornList(Exception):
    """The text is no list, ends within it, or goes on behind it."""


def elements_of(texts: Iterable[str], max_characters: int) -> Iterator[str | TooLong]:
    """The text of each item of the list that `texts` make up; a longer one than `max_characters` is passed over.

    Only brackets, commas and strings are looked at: an item may be wrong JSON in any other way. Raises TornList.
    """
    depth, in_string, is_escaped = 0, False, False
    parts: list[str] = []
    size, is_over, is_first = 0, False, True
    for text in texts:
        at, begun = 0, 0
        while at < len(text):
            if is_over and text[at:].strip(" \t\r\n"):
                raise TornList("there is more behind the list")
            if is_over:
                break
            if is_escaped:
                at, is_escaped = at + 1, False
                continue
            found = (_INSIDE if in_string else _OUTSIDE).search(text, at)
            if depth == 0:
                start = _BLANK.match(text, at)
                at = begun = start.end() if start else at
                if at == len(text):
                    break
                if text[at] != "[":
                    raise TornList("expected a list")
                depth, at, begun = 1, at + 1, at + 1
                continue
            if found is None:
                break
            at = found.end()
            mark = found.group()
            if in_string:
                in_string, is_escaped = mark != '"', mark == "\\"
            elif mark == '"':
                in_string = True
            elif mark in "[{":
                depth += 1
            elif mark in "]}" and depth > 1:
                depth -= 1
            elif depth == 1:
                parts.append(text[begun : at - 1])
                size += at - 1 - begun
                element = "".join(parts).strip(" \t\r\n")
                if size > max_characters:
                    yield TooLong(max_characters)
                elif element or not (is_first and mark == "]"):
                    yield element
                parts, size, is_first, begun = [], 0, False, at
                is_over = mark in "]}"
        if not is_over and depth:
            size += len(text) - begun
            # What is over the limit is not held.
            parts = [*parts, text[begun:]] if size <= max_characters else []
    if not is_over:
        raise TornList("it ends within the list")
