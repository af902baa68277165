"""What people said of pairs: read from our page's files or Label Studio's exports, checked, and put aside with a
reason where it cannot be used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from evaluation.people.label_studio import judgements_of_task
from evaluation.people.pairs import Export
from infra.errors import stage_error
from infra.io.bounded import read_text
from infra.io.json import BadJson, parse_json

Choice = Literal["a", "b", "tie", "neither"]
CHOICES = ("a", "b", "tie", "neither")
"""The better answer; tie: as good as each other; neither: both are unusable."""
"""What reading JSON raises: for another form, for a number of too many digits, and for lists within lists."""


@dataclass(frozen=True)
class Judgement:
    """What one person said of one pair.

    left: the answer that stood on the left, a or b. correction: the answer as it should have been, "" where none was
    written. seconds: that it took, None where that is not known.
    """

    pair: str
    annotator: str
    choice: Choice
    left: str = "a"
    reason: str = ""
    correction: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Aside:
    """A judgement that cannot be used, where it stands, and why."""

    where: str
    reason: str
    found: Any


@dataclass
class Judgements:
    """All that was read: `used`, one a person and pair; `aside`; and how many pairs were skipped by somebody."""

    used: list[Judgement] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)
    skipped: int = 0

    @classmethod
    def read(cls, paths: Iterable[Path], export: Export) -> Judgements:
        """Those of all files, each JSON lines of our page or a JSON export of Label Studio.

        Raises StageError `missing_file`; what is wrong inside a file is put aside.
        """
        found = cls()
        known: dict[tuple[str, str], Judgement] = {}
        for path in paths:
            for where, row in rows_of_file(path):
                found._take(where, row, export, known)
        found.used = list(known.values())
        return found

    def _take(self, where: str, row: Any, export: Export, known: dict[tuple[str, str], Judgement]) -> None:
        if isinstance(row, Mapping) and row.get("skipped"):
            self.skipped += 1
            return
        read = _read(row, export)
        if isinstance(read, str):
            self.aside.append(Aside(where, read, row))
            return
        before = known.setdefault((read.annotator, read.pair), read)
        if before.choice != read.choice:
            said = f"{read.annotator} said {before.choice} of this pair before, and now {read.choice}"
            self.aside.append(Aside(where, said, row))
        elif before.correction and read.correction not in ("", before.correction):
            said = f"{read.annotator} has corrected this pair before, in other words"
            self.aside.append(Aside(where, said, row))
        else:  # the page was saved again: what was written meanwhile is added
            known[read.annotator, read.pair] = replace(
                before, reason=before.reason or read.reason, correction=before.correction or read.correction
            )


def rows_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows as our page writes them, with the place of each; of a line that is no JSON its text.

    Raises StageError `missing_file`.
    """
    if not path.is_file():
        raise stage_error("missing_file", str(path), "expected a file of judgements, there is none", "name another")
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
    # Not splitlines: what people paste may hold other line separators, which JSON leaves as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}:{number}", parse_json(line, nan=True, surrogates=True)
            except BadJson:
                yield f"{path.name}:{number}", line


def _read(row: Any, export: Export) -> Judgement | str:
    """The judgement in a row, or why it is none."""
    if not isinstance(row, Mapping):
        return "expected a JSON object"
    pair, annotator, choice = row.get("pair"), row.get("annotator"), row.get("choice")
    if row.get("export", export.id) != export.id:
        return f"it is of the export {row['export']}, not of {export.id}"
    if not isinstance(pair, str) or pair not in export.pairs:
        return f"there is no pair {pair!r} in the export"
    if not isinstance(annotator, str) or not annotator.strip():
        return "nobody is named who judged"
    if choice not in CHOICES:
        return f"expected a choice of {', '.join(CHOICES)}, not {choice!r}"
    left = row.get("left", "a")
    if left not in ("a", "b"):
        return f"expected a or b on the left, not {left!r}"
    return Judgement(
        pair,
        annotator.strip(),
        cast(Choice, choice),
        left,
        str(row.get("reason") or "").strip(),
        str(row.get("correction") or "").strip(),
        seconds_in(row),
    )


def seconds_in(row: Mapping[str, Any]) -> float | None:
    """How long somebody took; None where that is no number that JSON can hold."""
    try:
        seconds = float(row["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None
