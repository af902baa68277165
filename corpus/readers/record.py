"""Output of the readers: records with their places in the files, and the texts that are made of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.io.sources import Place


@dataclass(frozen=True, slots=True)
class Record:
    """One object with fields and where it stands: its line, row or place in a list or archive, from 1."""

    file: Place
    line: int
    value: Mapping[str, Any]
    is_repaired: bool = False
    """True if its encoding had to be guessed."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Text:
    """One text, where it stands, and what else was asked for of its record.

    part: its number among the pieces that its record was cut into, from 0.
    """

    file: Place
    line: int
    text: str
    metadata: Mapping[str, Any] | None = None
    is_repaired: bool = False
    """True if its encoding had to be repaired."""
    part: int = 0


class Unreadable(Exception):
    """A record of which no text can be made; with the reason, as `corpus.documents.quarantine.Rejected.reason` does."""


def too_long(limit: int, what: str) -> str:
    """The reason why something of over `limit` bytes is put aside."""
    return f"longer than max_document_mb allows: {what} of over {limit / 1e6:,.0f} MB"


MISSING = object()


def pick(value: Any, field: str) -> Any:
    """Return the value of a dotted field, `MISSING` where there is none. A key that contains the dots has
    precedence."""
    if not isinstance(value, Mapping):
        return MISSING
    if field in value:
        return value[field]
    head, dot, remainder = field.partition(".")
    return pick(value.get(head), remainder) if dot else MISSING


def is_given(value: Any, field: str) -> bool:
    """Return True if a dotted field exists and is not null: files that join several schemas fill what a record lacks
    with null."""
    return pick(value, field) not in (MISSING, None)


def field_names(value: Mapping[str, Any]) -> str:
    """The fields of a record, for messages; those of nested ones dotted."""
    return ", ".join(_names(value)) or "none"


def text_fields(value: Mapping[str, Any]) -> list[str]:
    """The fields of a record that hold a string; those of nested ones dotted."""
    return [name for name in _names(value) if isinstance(pick(value, name), str)]


def _names(value: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    for key, inner in sorted(value.items()):
        names += [f"{key}.{name}" for name in sorted(inner)] if isinstance(inner, Mapping) and inner else [key]
    return names


def field_fix(setting: str, name: str, names: Sequence[str], otherwise: str = "") -> str:
    """Return the fix for a missing field `name`: the setting with the field that is most like it.

    Args:
        names: the fields that hold text.
        otherwise: the one to name where none is like it.
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    suggestion = near[0] if near else otherwise
    return f"set {setting}: {suggestion}" if suggestion else f"set {setting}"


def column_names(count: int) -> list[str]:
    """Names of the columns of a table that names none."""
    return [f"column_{number}" for number in range(1, count + 1)]


def has_numbered_columns(value: Mapping[str, Any]) -> bool:
    """Return True if a record is a row of a table that names no columns."""
    return list(value) == column_names(len(value))


def longest_text(value: Mapping[str, Any]) -> str:
    """The field of a record with the most words, or else the longest text; "" where none holds any. The numbers of an
    embedding and the letters of a hash are no words."""
    return max(text_fields(value), key=lambda name: _words_and_length(pick(value, name)), default="")


def _words_and_length(text: str) -> tuple[int, int]:
    return len(re.findall(r"(?<!\S)[^\W\d_]{2,}", text)), len(text)
