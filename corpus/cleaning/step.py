"""What a cleaning step is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from corpus.cleaning.rules import Broken, Rule
from corpus.documents import Document, make_document


class Step(Protocol):
    """Looks at a batch of documents and drops, changes or keeps each.

    name: the section of the config that turns it on.
    rules: what it may drop documents by.
    counts: what it did beside dropping, by name, e.g. {"pii.email": 12}; adds up over batches.
    """

    name: str
    rules: Sequence[Rule]
    counts: Counter[str]

    def __call__(self, documents: Sequence[Document]) -> Sequence[Document | Broken | list[Document]]:
        """For each document the one or ones that take its place, or the rule that it broke."""
        ...


def changed(document: Document, text: str) -> Document:
    """The document with another text, and so another id; it stays in its group and thus on its side of the split."""
    if text == document.text:
        return document
    return document._replace(text=text, id=make_document(text, document.source).id)
