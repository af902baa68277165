"""Our rules and datatrove's filters decide alike, document by document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.words import ChunkSplitter, english_exceptions

OFF = {"min_characters": None, "max_characters": None, "gopher_quality": None, "gopher_repetition": None}
# One section of ours and the filter that it agrees with, with the same settings.
FILTERS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gopher_quality": ({"gopher_quality": {"language": "en"}}, "GopherQualityFilter", {}),
    "gopher_repetition": ({"gopher_repetition": {}}, "GopherRepetitionFilter", {}),
    "c4": ({"c4": {}}, "C4QualityFilter", {}),
    "c4_as_in_fineweb": ({"c4": {"line_ends": ()}}, "C4QualityFilter", {"filter_no_terminal_punct": False}),
    "fineweb": ({"fineweb": {}}, "FineWebQualityFilter", {}),
}
PARAGRAPHS = (
    "The cat sat on the mat. It's been there since 5pm; nobody knows why... \"Is it yours?\" she asked (twice!).",
    "Home\nAbout\nContact\n© 2024 Example, Inc. All rights reserved.",
    "- one thing\n- another thing\n• a third of them\n- the last of the things that we have to do",
    "The U.S. and the U.K. don't agree. Mr. Smith paid $5.50 for 3kg of well-known tea (at 9:30a.m.) on 1/2/2003.",
    "Das ist ein Satz, den niemand auf Englisch verstünde. ¿Qué pasa? 日本語の文章です。これは二つ目です。",
    "Read more...\nRead more...\nRead more...\nContinue reading…",
    "See https://example.org/a?b=c or mail joe@example.org :-) it was great!!! #blessed #thanks <3 x_x",
    "It was 1,000.5 km/h, i.e. well-being/health=good. What?!Really?Yes.So it goes. end-of-line e-e. and/or",
    "This site uses cookies to serve you. Turn on JavaScript in the browser.\nIt has one good sentence.[12] [edit]",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit.\nIt {is} code.",
    "The same line of text again.\n\nThe same line of text again.\n\n\nThe same line of text again.\r\nA\x85b\u2028c.",
    "a b c d e f g h i j k l m n o p.  Two  spaces here.   Three there. \t Tab.\n\n   \n indented line of the text\n",
    "The town had two bridges and a ferry. In the spring the river rose, and with it the price of a crossing. Those "
    "who lived on the other side have told us that nobody could be sure of coming home before dark, that the ferryman "
    "was to be paid in advance, and that he was seldom sober. When the third bridge was built, all went to see it.",
)  # fmt: skip


def written_texts() -> list[str]:
    """Every paragraph alone, doubled, and with every other one; long and short."""
    pairs = [f"{one}\n\n{other}" for one in PARAGRAPHS for other in PARAGRAPHS]
    return [*PARAGRAPHS, *pairs, "\n".join(PARAGRAPHS), " ".join(PARAGRAPHS) * 3, "\n".join(PARAGRAPHS * 2)]


@cache
def real_texts(root: Path) -> list[str]:
    def lines(name: str, field: str, every: int) -> list[str]:
        path = root / name
        with gzip.open(path, "rt") if name.endswith("gz") else path.open() as file:
            return [json.loads(line)[field] for number, line in enumerate(file) if number % every == 0]

    texts = lines("web_demo/c4_demo.jsonl", "text", 2)
    texts += [text[:20_000] for text in lines("spamassassin_email/emails.jsonl.gz", "text", 20)]
    texts += [text[:15_000] for text in lines("readability_html/pages_raw.jsonl", "text", 8)]
    texts += lines("hh_rlhf/test.jsonl.gz", "chosen", 30) + lines("gsm8k/test.jsonl", "answer", 20)
    texts += [text[:20_000] for text in lines("python_peps/peps.jsonl.gz", "text", 50)]
    alice = (root / "nltk_gutenberg" / "carroll-alice.txt").read_text()
    return texts + [alice[i : i + 3000] for i in range(0, len(alice), 9000)]


def decided_by_datatrove(texts: list[str], name: str, settings: dict[str, Any]) -> list[str | None]:
    """What is left of each text; None for one that is dropped."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    decide: Callable[[Document], bool | tuple[bool, str]] = getattr(filters, name)(**settings).filter
    found: list[str | None] = []
    for text in texts:
        document = Document(text=text, id="")
        found.append(document.text if decide(document) is True else None)
    return found


def decided_by_us(texts: list[str], section: dict[str, Any]) -> list[str | None]:
    from corpus.cleaning.quality import QualityRules

    verdicts, left = QualityRules(CleanConfig(**{**OFF, **section}))(texts)
    return [None if broken else text for broken, text in zip(verdicts.broken, left, strict=True)]


@pytest.mark.parametrize("family", FILTERS)
def test_decides_as_datatrove_on_written_texts(family):
    section, name, settings = FILTERS[family]
    ours, theirs = decided_by_us(written_texts(), section), decided_by_datatrove(written_texts(), name, settings)
    assert 0 < ours.count(None) < len(ours)
    assert ours == theirs


@pytest.mark.parametrize("family", FILTERS)
def test_decides_as_datatrove_on_real_texts(family, real_data):
    texts = real_texts(Path(real_data("web_demo")).parent)
    section, name, settings = FILTERS[family]
    ours, theirs = decided_by_us(texts, section), decided_by_datatrove(texts, name, settings)
    assert len(texts) > 300 and 0 < ours.count(None) < len(ours)
    different = [text[:200] for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
    assert different == []


def test_exceptions_are_spacys():
    import spacy
    from spacy.attrs import ORTH

    theirs = {chunk: tuple(part[ORTH] for part in parts) for chunk, parts in spacy.blank("en").tokenizer.rules.items()}
    assert english_exceptions() == {chunk: words for chunk, words in theirs.items() if not chunk.isspace()}


def test_words_are_spacys_but_for_young_emoji():
    import spacy

    chunks = {chunk for text in written_texts() for chunk in text.split()}
    chunks |= (
        set(english_exceptions()) | {f"({chunk})," for chunk in english_exceptions()} | {"🙂!", "x--y", "5°C.", "a...b"}
    )
    tokenizer, splitter = spacy.blank("en").tokenizer, ChunkSplitter()
    different = [chunk for chunk in chunks if splitter.split(chunk) != [word.text for word in tokenizer(chunk)]]
    assert different == []
    # Named difference: an emoji younger than spaCy's list (Unicode 11) is a word of its own for us.
    assert splitter.split("🤌oh") == ["🤌", "oh"] and [word.text for word in tokenizer("🤌oh")] == ["🤌oh"]
