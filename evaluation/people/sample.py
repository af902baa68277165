"""Documents of a corpus for people to review: a sample, and the page on which they mark oddities.

A review is a folder:

    documents.jsonl    {"id", "source", "characters", "text"}
    review.html        the page on which they are marked, offline
    key.json           the artifact that they are from, and how they were drawn
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from corpus.cleaning.rules import draw
from corpus.documents.parts import Document, read_documents
from corpus.documents.sources import source_name
from evaluation.people.page import render_judging
from evaluation.people.pairs import write_whole
from infra.errors import stage_error
from infra.io.json import parse_json, read_json

DOCUMENTS, KEY, PAGE = "documents.jsonl", "key.json", "review.html"
SHOWN_CHARACTERS = 4000
_SCHEMA = 1

MARKS: Mapping[str, str] = {
    "fine": "fine",
    "broken": "broken text: encoding, markup, cut off",
    "boilerplate": "boilerplate, spam or a list of nothing",
    "repeated": "says the same again and again",
    "private": "personal data",
    "harmful": "toxic or harmful",
    "wrong": "not what this source should hold: language, kind, quality",
    "odd": "odd in another way",
}
"""Marks for a document, in the order of the keys 1 to 8, with the words on the page."""


@dataclass(frozen=True)
class Shown:
    """A document for display: the beginning of a long one. characters: of the whole document."""

    id: str
    source: str
    characters: int
    text: str


_SHOWN = TypeAdapter(Shown)


@dataclass(frozen=True)
class Review:
    """Documents by id. drawn: the artifact, its digest, its number of documents by source, and the seed."""

    documents: Mapping[str, Shown]
    drawn: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Id of the documents; marks name it, so that those of another review are recognized."""
        return hashlib.sha256("\0".join(self.documents).encode()).hexdigest()[:16]

    def write(self, folder: Path, title: str) -> None:
        """Write all files or none. Raises StageError `folder_in_use`."""
        items = [
            {"id": document.id, "prompt": f"{document.source} · {document.characters:,} characters\n\n{document.text}"}
            for document in self.documents.values()
        ]
        lines = [json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in self.documents.values()]
        key = {"schema": _SCHEMA, "review": self.id, "drawn": self.drawn}
        write_whole(
            folder,
            {
                DOCUMENTS: "".join(lines),
                KEY: json.dumps(key, indent=1) + "\n",
                PAGE: render_judging(title, self.id, items, "document", MARKS),
            },
        )

    @classmethod
    def read(cls, folder: Path) -> Review:
        """Read a review. Raises StageError `no_review` for a folder that is not a review, `damaged_review` if its files
        differ."""
        if not (folder / DOCUMENTS).is_file() or not (folder / KEY).is_file():
            expected = f"expected {DOCUMENTS} and {KEY}, as stemma review export writes them"
            raise stage_error("no_review", str(folder), expected, "give the folder of a review")
        try:
            key = read_json(folder / KEY)
            with (folder / DOCUMENTS).open(encoding="utf8") as lines:
                documents = [_SHOWN.validate_python(parse_json(line)) for line in lines]
            review, written_for = cls({document.id: document for document in documents}, key["drawn"]), key["review"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"{DOCUMENTS} or {KEY} is damaged: {type(error).__name__}: {error}"
            raise stage_error("damaged_review", str(folder), message, "export again") from error
        if review.id != written_for:
            raise stage_error(
                "damaged_review", str(folder), f"{DOCUMENTS} is not the one that {KEY} was written for", "export again"
            )
        return review


def sample(artifact: Path, count: int, seed: int, *, by_source: bool) -> tuple[dict[str, Shown], dict[str, int]]:
    """Return drawn documents in drawn order, and the artifact's number of documents of each source.

    by_source: draw equally many of each source, so that small ones are seen too; otherwise each document is equally
    likely. The same seed gives the same documents, in whatever order they are on disk.
    """
    sizes: dict[str, int] = {}
    drawn: dict[str, list[tuple[float, str, Document]]] = {}
    for document in read_documents(artifact):
        source = source_name(document.source)
        sizes[source] = sizes.get(source, 0) + 1
        kept = drawn.setdefault(source if by_source else "", [])
        entry = (-draw(document.id, "review", seed), document.id, document)
        heapq.heappush(kept, entry) if len(kept) < count else heapq.heappushpop(kept, entry)
    first = sorted((-priority, id, document) for kept in drawn.values() for priority, id, document in kept)
    if by_source:
        first = sorted(_split_evenly(first, count, len(drawn)))
    chosen = [document for _, _, document in first[:count]]
    return {
        document.id: Shown(document.id, document.source, len(document.text), _beginning(document.text))
        for document in chosen
    }, sizes


def _split_evenly(
    drawn: Iterable[tuple[float, str, Document]], count: int, sources: int
) -> list[tuple[float, str, Document]]:
    """Return the first of each source, equally many of each; places that a small one cannot fill go to the others."""
    by_source: dict[str, list[tuple[float, str, Document]]] = {}
    for entry in drawn:
        by_source.setdefault(source_name(entry[2].source), []).append(entry)
    selected: list[tuple[float, str, Document]] = []
    for entries in sorted(by_source.values(), key=len):
        share = (count - len(selected)) // sources
        selected += entries[:share]
        sources -= 1
    return selected


def _beginning(text: str) -> str:
    omitted = len(text) - SHOWN_CHARACTERS
    return text if omitted <= 0 else f"{text[:SHOWN_CHARACTERS]}\n\n… {omitted:,} more characters"
