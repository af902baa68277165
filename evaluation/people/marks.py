"""People's marks in a sample of documents: read, checked, and counted by source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from corpus.documents.sources import source_name
from evaluation.people.agreement import krippendorff_alpha
from evaluation.people.judgements import Aside, rows_of_file, seconds_in
from evaluation.people.outcome import replace_files
from evaluation.people.sample import MARKS, Review
from evaluation.statistics.intervals import wilson

MARKED, FLAGGED, ASIDE, SUMMARY = "marks.jsonl", "flagged.jsonl", "quarantine.jsonl", "summary.json"
FINE = "fine"


@dataclass(frozen=True)
class Mark:
    """One person's mark of one document."""

    document: str
    annotator: str
    mark: str
    reason: str = ""
    seconds: float | None = None


@dataclass
class Marks:
    """All marks that were read: `used`, one per person and document, and the unusable `aside`, with the reason."""

    used: list[Mark] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path], review: Review) -> Marks:
        """Read the marks of all files. Raises StageError `missing_file`; faulty entries inside a file are set aside."""
        marks = cls()
        by_key: dict[tuple[str, str], Mark] = {}
        for path in paths:
            for location, row in rows_of_file(path):
                read = _read(row, review)
                if isinstance(read, str):
                    marks.aside.append(Aside(location, read, row))
                    continue
                before = by_key.setdefault((read.annotator, read.document), read)
                if before.mark != read.mark:
                    message = f"{read.annotator} marked this document {before.mark} before, and now {read.mark}"
                    marks.aside.append(Aside(location, message, row))
                elif read.reason and not before.reason:  # the page was saved again
                    by_key[read.annotator, read.document] = replace(before, reason=read.reason)
        marks.used = list(by_key.values())
        return marks


def _read(row: Any, review: Review) -> Mark | str:
    """Return the mark in a row, or the reason why it is not one."""
    if not isinstance(row, Mapping):
        return "expected a JSON object"
    document, annotator, mark = row.get("document"), row.get("annotator"), row.get("choice")
    if row.get("export", review.id) != review.id:
        return f"it is of the review {row['export']}, not of {review.id}"
    if not isinstance(document, str) or document not in review.documents:
        return f"there is no document {document!r} in the review"
    if not isinstance(annotator, str) or not annotator.strip():
        return "nobody is named who marked it"
    if not isinstance(mark, str) or mark not in MARKS:
        return f"expected a mark of {', '.join(MARKS)}, not {mark!r}"
    return Mark(document, annotator.strip(), mark, str(row.get("reason") or "").strip(), seconds_in(row))


def write_outcome(review: Review, found: Marks, folder: Path) -> dict[str, Any]:
    """Write every mark, the documents with at least one flag, the entries set aside, and the returned summary.

    A document counts as its most frequent mark; for a tie as the worse one, any flag over fine.
    """
    by_document: dict[str, list[Mark]] = {}
    for mark in found.used:
        by_document.setdefault(mark.document, []).append(mark)
    verdicts = {document: _verdict(marks) for document, marks in by_document.items()}
    sources = sorted({source_name(review.documents[document].source) for document in verdicts})
    alpha = krippendorff_alpha([[mark.mark for mark in marks] for marks in by_document.values()])
    summary = {
        "review": review.id,
        "artifact": review.drawn.get("artifact"),
        "documents": len(review.documents),
        "marked_documents": len(verdicts),
        "marks": len(found.used),
        "quarantined": len(found.aside),
        "annotators": dict(Counter(mark.annotator for mark in found.used)),
        "agreement": alpha.as_json() if alpha else None,
        # A sample by source does not determine shares of the whole.
        "rates": [] if review.drawn.get("by_source") else _rates("all", list(verdicts.values())),
        "by_source": [
            row
            for source in sources
            for row in _rates(source, [v for d, v in verdicts.items() if _source_of(review, d) == source])
        ],
        "flagged": sum(verdict != FINE for verdict in verdicts.values()),
    }
    flagged = [
        {
            "id": document,
            "source": review.documents[document].source,
            "verdict": verdicts[document],
            "marks": dict(Counter(mark.mark for mark in marks)),
            "reasons": [mark.reason for mark in marks if mark.reason],
            "annotators": sorted(mark.annotator for mark in marks),
        }
        for document, marks in by_document.items()
        if any(mark.mark != FINE for mark in marks)
    ]
    lines = {
        MARKED: [asdict(mark) for mark in found.used],
        FLAGGED: flagged,
        ASIDE: [asdict(entry) for entry in found.aside],
    }
    replace_files(folder, lines, {SUMMARY: json.dumps(summary, indent=1) + "\n"})
    return summary


def _source_of(review: Review, document: str) -> str:
    return source_name(review.documents[document].source)


def _verdict(marks: Iterable[Mark]) -> str:
    counts = Counter(mark.mark for mark in marks)
    return max(counts, key=lambda mark: (counts[mark], mark != FINE, list(MARKS).index(mark)))


def _rates(source: str, verdicts: list[str]) -> list[dict[str, Any]]:
    """Return the share of documents under each mark, with the Wilson interval; unused marks are left out."""
    counts = Counter(verdicts)
    return [
        {
            "source": source,
            "mark": mark,
            **wilson(counts[mark], len(verdicts)).as_json(),
            "n": counts[mark],
            "of": len(verdicts),
        }
        for mark in MARKS
        if counts[mark]
    ]
