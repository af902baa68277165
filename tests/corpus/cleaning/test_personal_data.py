"""Personal data is found by its form and checked by its numbers; what only looks like it stays."""

from __future__ import annotations

import json
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

from benchmarks.corpus.measure_personal_data import labelled
from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.cleaning.people.personal_data import KINDS, find_personal_data
from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest

ALL = frozenset(KINDS)
OFF = {"min_characters": None, "gopher_quality": None, "gopher_repetition": None}

# {…} stands around what is to be found.
FOUND = {
    "email": [
        "Write to {jane.doe+lists@mail.example-corp.co.uk}.",
        "From: Jane <{jane_doe@web.de}>, Bob <{bob@example.org}>",
        "mailto:{x@y.io}?subject=hello",
        "a {jane@example.com}-style name, {joe@163.com}. {ann@bar.xn--p1ai}",
        "to {postmaster@[93.184.216.34]} by hand",
    ],
    "ip": [
        "Received: from [{93.184.216.34}] by",
        "The server {8.8.8.8}:53 answers.",
        "It answers at {2606:4700:4700::1111}, too",
        "host={2001:470:1f0b:0:0:0:0:2}",
        "{93.184.216.34} Failed login\n{8.8.8.8} Google\nIP{93.184.216.34}",
    ],
    "phone": [
        "Call me: {(212) 736-5000} or {+49 30 227 32152}.",
        "Toll free {1-800-335-4824} now",
        "phone {2127365000} for details",
        "{+442079460018} is the office",
    ],
    "card": [
        "Card {4111 1111 1111 1111}, exp",
        "amex {378282246310005}.",
        "no {5555-5555-5555-4444} was charged",
        "order no 12, paid by visa {4111111111111111}",
        "cc={4111111111111111}&exp=1226, card_number: {4111111111111111}",
    ],
    "iban": ["Pay to {DE89 3704 0044 0532 0130 00} until Friday", "IBAN {GB29NWBK60161331926819}."],
    "secret": [
        "aws_key = {AKIAIOSFODNN7EXAMPLE}",
        "git clone https://joe:{s3cr3t-Pass}@host.org/x.git",
        'password = "{tR4x9_kLq2Vz}"',
        "API_KEY: {9f86d081884c7d659a2feaa0c55ad015}",
        "token={ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8}",
        *(f"a line with {{gh{kind}_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8} in it" for kind in "pousr"),
        "{-----BEGIN RSA PRIVATE KEY-----\nMIIBOgIBAAJBAKj34GkxFhD90vcN\n-----END RSA PRIVATE KEY-----}",
    ],
}  # fmt: skip
NOT_FOUND = [
    "He sat @ home; follow @someone, or a@b without a dot.",
    "npm install react@18.2.0 @types/node@20.1.5; uses: actions/checkout@v4.1.0 and openssl@3.0",
    "Version 10.2.3.4.5 and section 1.2.3 of the manual, at 127.0.0.1 or 192.168.1.20 or 300.1.1.1",
    '[assembly: AssemblyVersion("4.8.3.1")] needs go1.21.0.1\n\n### 5.2.1.3 Results\n5.2.1.4 Further work',
    "The call is at 12:30:45 on 2002-08-22, std::vector<int>::size_type and a::b::c",
    "ISBN 978-3-16-148410-0, order 4111 1111 1111 1112 of 1234567890123456, pi = 3.14159265358979",
    "It was 1995-1999, 2,147,483,647 times, #2127365000 in base 10, commit 2127365000",
    "DE00 3704 0044 0532 0130 00 has wrong check digits, as has XX12ABCDEFGHIJKLMN.",
    "The secret is in the sauce: password = getpass.getpass(), token: Optional[str], key = self.api_key_2",
    "Call number 212 736 5000 is on the second floor; part number 800-335-4824; order no. 4111 1111 1111 1111.",
    "See https://example.org:8080/path@2x.png for the secret token.",
]


@pytest.mark.parametrize(("kind", "marked"), [(kind, text) for kind, texts in FOUND.items() for text in texts])
def test_finds_exactly_what_is_marked(kind, marked):
    text = marked.replace("{", "").replace("}", "")
    expected = [part.split("}")[0] for part in marked.split("{")[1:]]
    found = find_personal_data(text, ALL)
    assert [(text[item.start : item.end], item.kind) for item in found] == [(part, kind) for part in expected]


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_only_looks_like_it_stays(text):
    assert find_personal_data(text, ALL) == []


def test_versions_sections_and_object_identifiers_are_no_addresses():
    """Precision and recall on the labelled lines, see benchmarks/corpus/measure_personal_data.py."""
    counts = labelled("ip_labels.txt", "ip")
    assert counts["missed"] == 0
    assert counts["wrong"] <= 0.1 * counts["true"]


def test_identifiers_with_the_check_digit_of_a_card_are_no_cards():
    counts = labelled("card_labels.txt", "card")
    assert counts["missed"] == 0
    assert counts["wrong"] <= 0.1 * counts["true"]


def test_phone_numbers_without_a_country_code_go_by_the_regions():
    text = "Telefon: 030 22732152, tel. (212) 736-5000"
    german, american = (find_personal_data(text, frozenset({"phone"}), (region,)) for region in ("DE", "US"))
    assert [text[item.start : item.end] for item in german] == ["030 22732152"]
    assert [text[item.start : item.end] for item in american] == ["(212) 736-5000"]


def test_masks_drops_or_keeps_by_kind_and_counts(build, write):
    texts = ["Ask jane@web.de or bob@web.de at 8.8.8.8.", "My card is 4111 1111 1111 1111.", "Nothing in here."]
    path = write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    handled = {
        "email": {"replacement": "[e-mail]"},
        "ip": {"action": "keep", "replacement": ""},
        "card": {"action": "drop", "replacement": ""},
    }
    out = build(clean, CleanConfig(**OFF, personal_data=handled), documents=documents)
    before = {document.text: document for document in read_documents(documents)}
    kept = list(read_documents(out))
    assert [document.text for document in kept] == ["Ask [e-mail] or [e-mail] at 8.8.8.8.", texts[2]]
    assert kept[0].group == before[texts[0]].group and kept[0].id != before[texts[0]].id
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["counts"] == {"personal_data.card": 1, "personal_data.email": 2}
    [dropped] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert (dropped["rule"], dropped["value"]) == ("personal_data.card", 1)


def test_kinds_that_overlap_are_found_once_and_all_come_in_the_order_of_the_text():
    piece = "http://ann:pa55word@h.org, call +1 650 253 0000, 8.8.8.8, eve@h.org; "
    found = find_personal_data(piece * 50, ALL)
    assert [one.kind for one in found] == ["secret", "phone", "ip", "email"] * 50
    assert all(one.end <= other.start for one, other in pairwise(found))
