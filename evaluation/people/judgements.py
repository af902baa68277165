"""People's judgements of pairs, and their marks of documents: read from files of this project's page or Label Studio's
exports, checked, and set aside with a reason if unusable."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluation.people.label_studio import judgements_of_task
from evaluation.people.pairs import Export
from evaluation.people.sample import MARKS, Review
from infra.errors import stage_error
from infra.io.bounded import read_text
from infra.io.json import BadJson, parse_json

CHOICES = ("a", "b", "tie", "neither")
"""The better answer; tie: both are equally good; neither: both are unusable."""


@dataclass(frozen=True)
class Judgement:
    """One person's judgement of one item, a pair or a document.

    choice: one of CHOICES for a pair, a mark for a document. left: the answer shown on the left, a or b. correction:
    the answer as it should have been, "" if none was written. seconds: time that it took, None if unknown.
    """

    item: str
    annotator: str
    choice: str
    left: str = "a"
    reason: str = ""
    correction: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Aside:
    """A judgement that cannot be used, its place, and the reason."""

    where: str
    reason: str
    found: Any


@dataclass
class Judgements:
    """All judgements that were read: `used`, one per person and item; `aside`; and the number of skipped items."""

    used: list[Judgement] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)
    skipped: int = 0

    @classmethod
    def read(cls, paths: Iterable[Path], export: Export | Review) -> Judgements:
        """Read the judgements of all files, each JSON lines of this project's page or a JSON export of Label Studio.

        Raises StageError `missing_file`; faulty entries inside a file are set aside.
        """
        sheet = (
            _Questionnaire("review", export.id, "document", export.documents, tuple(MARKS))
            if isinstance(export, Review)
            else _Questionnaire("export", export.id, "pair", export.pairs, CHOICES)
        )
        judgements = cls()
        by_key: dict[tuple[str, str], Judgement] = {}
        for path in paths:
            for location, row in _rows_of_file(path):
                judgements._add(location, row, sheet, by_key)
        judgements.used = list(by_key.values())
        return judgements

    def _add(self, location: str, row: Any, sheet: _Questionnaire, by_key: dict[tuple[str, str], Judgement]) -> None:
        if isinstance(row, Mapping) and row.get("skipped"):
            self.skipped += 1
            return
        read = _read(row, sheet)
        if isinstance(read, str):
            self.aside.append(Aside(location, read, row))
            return
        before = by_key.setdefault((read.annotator, read.item), read)
        if before.choice != read.choice:
            message = f"{read.annotator} said {before.choice} of this {sheet.kind} before, but now {read.choice}"
            self.aside.append(Aside(location, message, row))
        elif before.correction and read.correction not in ("", before.correction):
            message = f"{read.annotator} has corrected this {sheet.kind} before, in other words"
            self.aside.append(Aside(location, message, row))
        else:  # the page was saved again: add text written since then
            by_key[read.annotator, read.item] = replace(
                before, reason=before.reason or read.reason, correction=before.correction or read.correction
            )


@dataclass(frozen=True)
class _Questionnaire:
    """Subject of the judgements. name: `export` or `review`. kind: of its items, which is their key in a row."""

    name: str
    id: str
    kind: str
    items: Collection[str]
    choices: tuple[str, ...]


def _rows_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield rows in the form of this project's page, with the place of each; for a line that is not JSON, its text.

    Raises StageError `missing_file`.
    """
    if not path.is_file():
        raise stage_error(
            "missing_file", str(path), "expected a file of judgements, but it does not exist", "name another"
        )
    text = read_text(path, errors="replace")  # editors on Windows put a byte order mark before it
    if text.lstrip().startswith("["):
        try:
            tasks = parse_json(text, path.name, nan=True, surrogates=True)
        except BadJson as error:
            yield error.problems[0].path, text[:200]
            return
        for number, task in enumerate(tasks, 1):
            for row in judgements_of_task(task):
                yield f"{path.name}, task {number}", row
        return
    # Not splitlines: pasted text may hold other line separators, which JSON leaves unchanged.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}:{number}", parse_json(line, nan=True, surrogates=True)
            except BadJson:
                yield f"{path.name}:{number}", line


def _read(row: Any, sheet: _Questionnaire) -> Judgement | str:
    """Return the judgement in a row, or the reason why it is not one."""
    if not isinstance(row, Mapping):
        return "expected a JSON object"
    item, annotator, choice = row.get(sheet.kind), row.get("annotator"), row.get("choice")
    if row.get("export", sheet.id) != sheet.id:
        return f"it is of the {sheet.name} {row['export']}, not of {sheet.id}"
    if not isinstance(item, str) or item not in sheet.items:
        return f"there is no {sheet.kind} {item!r} in the {sheet.name}"
    if not isinstance(annotator, str) or not annotator.strip():
        return "it names no annotator"
    if choice not in sheet.choices:
        return f"expected a choice of {', '.join(sheet.choices)}, not {choice!r}"
    left = row.get("left", "a")
    if left not in ("a", "b"):
        return f"expected a or b on the left, not {left!r}"
    return Judgement(
        item,
        annotator.strip(),
        choice,
        left,
        str(row.get("reason") or "").strip(),
        str(row.get("correction") or "").strip(),
        _seconds_in(row),
    )


def _seconds_in(row: Mapping[str, Any]) -> float | None:
    """Return the time taken in seconds; None if that is not a number that JSON can hold."""
    try:
        seconds = float(row["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None
