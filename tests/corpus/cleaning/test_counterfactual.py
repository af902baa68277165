"""Identity terms are swapped with the grammar that hangs on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.cleaning.people.counterfactual import counterfactual
from corpus.cleaning.people.neutral import NEUTRAL_WORDS, neutral, neutral_words
from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError

GENDER = [
    ("He gave her his book.", "She gave him her book."),
    ("She told him that the book was hers.", "He told her that the book was his."),
    ("The book is his.", "The book is hers."),
    ("A friend of his saw her yesterday.", "A friend of hers saw him yesterday."),
    ("Her brother saw her in her house.", "His sister saw him in his house."),
    ("I saw her go home.", "I saw him go home."),
    ("They made her laugh, and let her in.", "They made him laugh, and let him in."),
    ("I like her newly painted house.", "I like his newly painted house."),
    ("He followed her slowly.", "She followed him slowly."),
    ("her early work", "his early work"),
    ("We asked her about it, and thanked her.", "We asked him about it, and thanked him."),
    ("He is an uncle, she is a niece.", "She is an aunt, he is a nephew."),
    ("An actor met a heroine.", "An actress met a hero."),
    ("He was a man of his word.", "She was a woman of her word."),
    ("The men's room and the boys' school.", "The women's room and the girls' school."),
    ("MR. SMITH AND HIS WIFE", "MS. SMITH AND HER HUSBAND"),
    ("She's here; he'll come, she'd said.", "He's here; she'll come, he'd said."),
    ("Her Majesty the Queen and the prince", "His Majesty the King and the princess"),
    ("The father-in-law looked at himself.", "The mother-in-law looked at herself."),
    ("Ladies and gentlemen!", "Gentlemen and ladies!"),
    ("The theory of the human manual is germane here.", "The theory of the human manual is germane here."),
    ("Everything gave her pause.", "Everything gave him pause."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GENDER[:-1])
def test_gender_is_swapped_with_agreement(text, expected):
    assert counterfactual(text, ("gender",)) == expected


def test_what_it_cannot_tell_is_known():
    """ "gave her pause" needs a parser: "her" before a noun is taken for a possessive."""
    text, right = GENDER[-1]
    assert counterfactual(text, ("gender",)) == "Everything gave his pause." != right


def test_other_groups_and_names_are_on_request():
    text = "John is a Christian and goes to church; Africans live in Africa."
    assert counterfactual(text, ("gender",)) == text
    assert counterfactual(text, ("religion", "ethnicity")) == (
        "John is a Muslim and goes to mosque; Europeans live in Europe."
    )
    assert counterfactual(text, ("names",)).startswith("Patricia is")
    assert counterfactual("An African, a European", ("ethnicity",)) == "A European, an African"


@pytest.mark.parametrize("path", ["winogender/all_sentences.tsv"])
def test_real_sentences_become_their_own_counterparts(real_data, path):
    """Winogender has each sentence with he and with she: ours makes one of the other."""
    rows = [line.split("\t") for line in Path(real_data(path)).read_text(encoding="utf8").splitlines()[1:]]
    texts = dict(rows)
    males = [(text, texts[identity.replace(".male.", ".female.")]) for identity, text in rows if ".male." in identity]
    right = sum(counterfactual(male, ("gender",)) == female for male, female in males)
    back = sum(counterfactual(female, ("gender",)) == male for male, female in males)
    assert len(males) == 240 and right >= 0.97 * 240 and back >= 0.97 * 240


@pytest.mark.parametrize(
    ("mode", "expected"), [("add", {"He saw her.", "She saw him.", "It rained."}), ("replace", None)]
)
def test_documents_are_added_or_replaced(build, write, mode, expected):
    texts = ["He saw her.", "It rained."]
    path = write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    off = {"min_characters": None, "gopher_quality": None, "gopher_repetition": None, "personal_data": None}
    config = CleanConfig(**off, counterfactual={"mode": mode, "share": 1.0})
    kept = list(read_documents(build(clean, config, documents=documents)))
    assert {document.text for document in kept} == (expected or {"She saw him.", "It rained."})
    groups = {document.group for document in kept if "saw" in document.text}
    assert len(groups) == 1


NEUTRAL = [
    ("The chairman's speech, and a policeman.", "The chair's speech, and a police officer."),
    ("A stewardess met an actress; STEWARDESSES WAVED.", "A flight attendant met an actor; FLIGHT ATTENDANTS WAVED."),
    ("She is a housewife, he an artist.", "She is a homemaker, he an artist."),
    ("A waitress and an heiress.", "A server and an heir."),
    ("A craftsman of mankind.", "An artisan of humankind."),
    ("The chairmanship stays.", "The chairmanship stays."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), NEUTRAL)
def test_words_of_a_gender_give_way_to_neutral_ones(text: str, expected: str) -> None:
    assert neutral(text, neutral_words(NEUTRAL_WORDS)) == expected


def test_clean_rewrites_by_a_list_of_yours_and_names_a_bad_line(build, write):
    text = "The postman brings letters to the house at the end of the street."
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [write("text.txt", text)]}]))
    off = {"min_characters": None, "gopher_quality": None, "gopher_repetition": None}
    config = CleanConfig(**off, neutral={"words": str(write("words.tsv", "# mine\npostman\tletter carrier\n"))})
    assert [one.key for one in config.sources()] == ["clean.neutral.words"]
    (kept,) = read_documents(build(clean, config, documents=documents))
    assert kept.text == text.replace("postman", "letter carrier")
    bad = CleanConfig(**off, neutral={"words": str(write("bad.tsv", "postman\n"))})
    with pytest.raises(StageError, match="expected one word, a tab"):
        build(clean, bad, documents=documents)
