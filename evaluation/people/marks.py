"""People's marks in a sample of documents, counted by source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from corpus.documents.sources import source_name
from evaluation.people.agreement import krippendorff_alpha
from evaluation.people.judgements import Judgement, Judgements
from evaluation.people.outcome import replace_files
from evaluation.people.sample import MARKS, Review
from evaluation.statistics.intervals import wilson

MARKED, FLAGGED, ASIDE, SUMMARY = "marks.jsonl", "flagged.jsonl", "quarantine.jsonl", "summary.json"
FINE = "fine"


def write_outcome(review: Review, found: Judgements, folder: Path) -> dict[str, Any]:
    """Write every mark, the documents with at least one flag, the entries set aside, and the returned summary.

    A document counts as its most frequent mark; for a tie as the worse one, any flag over fine.
    """
    by_document: dict[str, list[Judgement]] = {}
    for mark in found.used:
        by_document.setdefault(mark.item, []).append(mark)
    verdicts = {document: _verdict(marks) for document, marks in by_document.items()}
    sources = sorted({source_name(review.documents[document].source) for document in verdicts})
    alpha = krippendorff_alpha([[mark.choice for mark in marks] for marks in by_document.values()])
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
            "marks": dict(Counter(mark.choice for mark in marks)),
            "reasons": [mark.reason for mark in marks if mark.reason],
            "annotators": sorted(mark.annotator for mark in marks),
        }
        for document, marks in by_document.items()
        if any(mark.choice != FINE for mark in marks)
    ]
    lines: dict[str, list[dict[str, Any]]] = {
        MARKED: [
            {
                "document": mark.item,
                "annotator": mark.annotator,
                "mark": mark.choice,
                "reason": mark.reason,
                "seconds": mark.seconds,
            }
            for mark in found.used
        ],
        FLAGGED: flagged,
        ASIDE: [asdict(entry) for entry in found.aside],
    }
    replace_files(folder, lines, {SUMMARY: json.dumps(summary, indent=1) + "\n"})
    return summary


def _source_of(review: Review, document: str) -> str:
    return source_name(review.documents[document].source)


def _verdict(marks: Iterable[Judgement]) -> str:
    counts = Counter(mark.choice for mark in marks)
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
