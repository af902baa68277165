"""A sample of documents for people to look through: how it is drawn, and what their marks come to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corpus.documents.parts import DocumentWriter, make_document
from corpus.documents.sources import source_name
from evaluation.people.judgements import Judgements
from evaluation.people.marks import write_outcome
from evaluation.people.sample import SHOWN_CHARACTERS, Review, sample
from infra.errors import StageError


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """90 documents of books and 4 of notes."""
    with DocumentWriter(tmp_path / "corpus" / "documents") as writer:
        for number in range(94):
            source = "notes" if number % 24 == 3 else "books"
            text = f"Document {number} says little. " * (300 if number == 0 else 3)
            writer.write(make_document(text, f"{source}/{number}.txt"))
    return tmp_path / "corpus"


def _of(documents: Any) -> Counter[str]:
    return Counter(source_name(one.source) for one in documents.values())


def test_documents_are_drawn_alike_and_small_sources_on_request(artifact: Path) -> None:
    plain, sizes = sample(artifact, 20, 1, by_source=False)
    assert sizes == {"books": 90, "notes": 4} and len(plain) == 20
    assert plain == sample(artifact, 20, 1, by_source=False)[0] != sample(artifact, 20, 2, by_source=False)[0]
    fair, _ = sample(artifact, 20, 1, by_source=True)
    assert _of(fair) == {"notes": 4, "books": 16}, "what a small source lacks goes to the others"
    assert _of(sample(artifact, 6, 1, by_source=True)[0]) == {"notes": 3, "books": 3}
    assert len(sample(artifact, 500, 1, by_source=True)[0]) == 94
    seen = Counter(id for seed in range(60) for id in sample(artifact, 10, seed, by_source=False)[0])
    assert len(seen) == 94 and max(seen.values()) < 20, "each is as likely as another"
    long = next(one for one in sample(artifact, 94, 1, by_source=False)[0].values() if one.characters > 5000)
    assert long.text.endswith("more characters") and len(long.text) < SHOWN_CHARACTERS + 50


@pytest.mark.parametrize("name", ["key.json", "documents.jsonl"])
def test_a_damaged_review_is_named(artifact: Path, tmp_path: Path, name: str) -> None:
    documents, _ = sample(artifact, 3, 1, by_source=False)
    Review(documents, {}).write(tmp_path / "look", "What is odd?")
    (tmp_path / "look" / name).write_bytes(b'{"review": "a')
    with pytest.raises(StageError) as error:
        Review.read(tmp_path / "look")
    assert error.value.problems[0].code == "damaged_review"


def test_marks_are_counted_by_source_and_what_cannot_be_used_is_put_aside(artifact: Path, tmp_path: Path) -> None:
    documents, sizes = sample(artifact, 6, 1, by_source=True)
    review = Review(documents, {"artifact": "clean/1", "by_source": True, "documents": sizes})
    review.write(tmp_path / "look", "What is odd?")
    review = Review.read(tmp_path / "look")
    ids = list(documents)
    rows: list[Any] = [{"document": ids[0], "annotator": "ann", "choice": "broken"}]
    rows += [{"document": id, "annotator": "ann", "choice": "fine"} for id in ids[1:]]
    rows += [{"document": ids[0], "annotator": "bob", "choice": "fine"}]
    rows += [{"document": ids[1], "annotator": "bob", "choice": "fine"}]
    rows += [{**rows[0], "reason": "cut off"}]  # written after a first save
    bad = [
        ({"document": ids[1], "annotator": "bob", "choice": "odd"}, "said fine of this document before"),
        ({"document": "x", "annotator": "bob", "choice": "odd"}, "there is no document"),
        ({"document": ids[2], "annotator": " ", "choice": "odd"}, "names no annotator"),
        ({"document": ids[2], "annotator": "bob", "choice": "so-so"}, "expected a choice of"),
        ({"document": ids[2], "annotator": "bob", "choice": "odd", "export": "y"}, "of the review y"),
    ]
    path = tmp_path / "marks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *(row for row, _ in bad)]) + "no JSON\n")
    found = Judgements.read([path], review)
    assert len(found.used) == 8 and len(found.aside) == 6
    assert all(message in one.reason for (_, message), one in zip(bad, found.aside, strict=False))
    summary = write_outcome(review, found, tmp_path / "marked")
    assert summary["rates"] == [], "a sample by source tells nothing of the whole"
    by_source = {(row["source"], row["mark"]): (row["n"], row["of"]) for row in summary["by_source"]}
    odd, other = source_name(documents[ids[0]].source), {"books": "notes", "notes": "books"}
    # One said broken, one fine: the worse counts.
    assert by_source == {(odd, "fine"): (2, 3), (odd, "broken"): (1, 3), (other[odd], "fine"): (3, 3)}
    assert summary["annotators"] == {"ann": 6, "bob": 2} and summary["agreement"]["value"] < 1
    (flagged,) = [json.loads(line) for line in (tmp_path / "marked/flagged.jsonl").read_text().splitlines()]
    assert flagged["marks"] == {"broken": 1, "fine": 1} and flagged["reasons"] == ["cut off"]
    (tmp_path / "look" / "documents.jsonl").write_text("")
    with pytest.raises(StageError, match="not the one that"):
        Review.read(tmp_path / "look")
