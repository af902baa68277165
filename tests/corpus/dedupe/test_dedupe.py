"""Documents that are there more than once, exactly or nearly, are kept once; what is told of them is true."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from benchmarks.corpus.planted import all_pairs, ngrams_of, planted, real_texts, words_of
from corpus.dedupe.bands import choose_bands
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.marks import hash_marked_words, mark_tables
from corpus.documents.parts import DocumentWriter, link_parts, make_document, read_documents
from corpus.documents.words import character_table, hash_words
from tests.corpus.dedupe.interrupted import check_same_bytes

TEXTS = ("The river bends twice before the mill.", "The lamp went out, and nobody spoke.")


def written(folder, texts, sources=(), parts=1):
    sources = sources or ["all/texts"] * len(texts)
    documents = [
        make_document(text, source)._replace(id=f"{i:016x}")
        for i, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    made = []
    for part in range(parts):
        with DocumentWriter(folder / f"part-{part}" / "documents") as writer:
            for document in documents[part * len(documents) // parts : (part + 1) * len(documents) // parts]:
                writer.write(document)
        made.append(folder / f"part-{part}")
    link_parts(made, folder)
    return folder


def numbers(out):
    return [int(document.id, 16) for document in read_documents(out)]


def jaccard(first, second):
    one, other = ngrams_of(first), ngrams_of(second)
    return len(one & other) / len(one | other)


@pytest.fixture(scope="module")
def real(real_data):
    """(texts with planted copies, [(original, copy)], all pairs of at least 0.8 by exact Jaccard similarity)."""
    texts = real_texts(Path(real_data("web_demo")))
    found, pairs = planted(texts, 300)
    return found, pairs, all_pairs(found, 0.8)


def test_texts_that_are_equal_but_for_white_space_are_kept_once(build, tmp_path):
    texts = (*TEXTS, TEXTS[0], TEXTS[1].replace(" ", "\n "))
    out = build(dedupe, DedupeConfig(near=None), documents=written(tmp_path / "in", texts))
    assert numbers(out) == [0, 1]
    rows = pq.read_table(out / "aux" / "duplicates.parquet").to_pylist()
    assert [(int(row["id"], 16), int(row["original"], 16), row["similarity"]) for row in rows] == [(2, 0, 1), (3, 1, 1)]
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["read"] == 4 and counts["kept"] == 2
    assert counts["dropped"] == {"exact_duplicate": 2, "near_duplicate": 0}
    assert json.loads((out / "sources.json").read_text())["all"]["documents"] == 2


def test_planted_near_duplicates_of_real_texts_are_found_and_nothing_else(build, tmp_path, real):
    texts, pairs, truth = real
    out = build(dedupe, DedupeConfig(), documents=written(tmp_path / "in", texts))
    kept = set(numbers(out))
    alike = {tuple(pair) for pair in truth.pairs.tolist()}
    asked = [pair for pair in pairs if tuple(sorted(pair)) in alike]
    assert len(asked) > 100
    assert np.mean([not kept.issuperset(pair) for pair in asked]) >= 0.98
    rows = pq.read_table(out / "aux" / "duplicates.parquet").to_pylist()
    assert len(rows) == len(texts) - len(kept)
    true = []
    for row in rows:
        document, original = int(row["id"], 16), int(row["original"], 16)
        assert original in kept
        similarity = jaccard(texts[document], texts[original])
        assert similarity == pytest.approx(row["similarity"], abs=0.02)
        true.append(similarity >= 0.8)
    assert np.mean(true) >= 0.99


def test_same_bytes_for_any_number_of_workers_and_after_an_interruption(tmp_path, payload, real):
    documents = written(tmp_path / "in", real[0], parts=5)
    check_same_bytes(tmp_path, documents, DedupeConfig(), "shingles", payload)


def test_longest_is_kept_where_asked_for_and_sources_can_be_left_apart(build, tmp_path):
    generator = random.Random(3)
    words = [f"word{generator.randrange(1000)}" for _ in range(200)]
    short, long = " ".join(words), " ".join([*words, "and", "one", "more"])
    documents = written(tmp_path / "in", (short, long, short), ("a/1", "a/2", "b/1"))
    assert numbers(build(dedupe, DedupeConfig(), documents=documents)) == [0]
    assert numbers(build(dedupe, DedupeConfig(keep="longest"), documents=documents)) == [1]
    assert numbers(build(dedupe, DedupeConfig(across_sources=False), documents=documents)) == [0, 2]


def test_what_goes_is_like_what_stays_even_along_a_chain(build, tmp_path):
    """Each text is like the next one, the first and the last have little in common."""
    words = [f"w{number}" for number in range(400)]
    texts = [" ".join(words[begin : begin + 200]) for begin in range(0, 200, 10)]
    out = build(dedupe, DedupeConfig(), documents=written(tmp_path / "in", texts))
    kept = numbers(out)
    for row in pq.read_table(out / "aux" / "duplicates.parquet").to_pylist():
        assert int(row["original"], 16) in kept
        assert jaccard(texts[int(row["id"], 16)], texts[int(row["original"], 16)]) >= 0.8
    assert all(jaccard(texts[i], texts[j]) < 0.8 for i in kept for j in kept if i < j)


def test_bands_follow_from_the_threshold():
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        chosen = choose_bands(threshold, 0.99, 128)
        assert chosen.chance(threshold) >= 0.99
        assert chosen.bands * chosen.rows <= 128
    with pytest.raises(ValidationError, match="max_hashes"):
        DedupeConfig(near={"threshold": 0.1, "max_hashes": 16})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  lamp—went\nOUT.", ["the", "lamp", "went", "out"]),
        ("Élan naïve", ["elan", "naive"]),
        ("中文字 and ＡＢＣ", ["中", "文", "字", "and", "abc"]),
        ("привет, мир_2", ["привет", "мир", "2"]),
        ("soft\u00adhyphen 🎉 x", ["softhyphen", "x"]),
        ("...", []),
    ],
)
def test_words_are_compared_without_case_accents_and_punctuation(text, words):
    def hashes(some):
        data = np.frombuffer(some.encode(), np.uint8)
        found, starts, ends = (np.empty(data.size + 1, kind) for kind in (np.uint64, np.int64, np.int64))
        count = hash_words(data, 0, data.size, character_table(), found, starts, ends)
        return found[:count].tolist()

    assert hashes(text) == [hashes(word)[0] for word in words]


def test_hashed_words_are_those_of_a_regular_expression(real):
    text = " ".join(real[0][:50]).encode("ascii", "replace").decode()
    data = np.frombuffer(text.encode(), np.uint8)
    found, starts, ends = (np.empty(data.size, kind) for kind in (np.uint64, np.int64, np.int64))
    count = hash_words(data, 0, data.size, character_table(), found, starts, ends)
    places = zip(starts[:count], ends[:count], strict=True)
    assert [data[start:end].tobytes().decode().lower() for start, end in places] == words_of(text)


@pytest.mark.parametrize(
    ("unit", "shared", "joint"),
    [
        ("line", "Subscribe to our newsletter today!", "\n"),
        ("paragraph", "Subscribe to our newsletter\ntoday, and never miss a word.", "\n\n"),
    ],
)
def test_what_stands_in_many_documents_is_cut_out_of_all_of_them(build, tmp_path, unit, shared, joint):
    bodies = [f"Page {number} tells of other things than the rest does." for number in range(12)]
    texts = [joint.join([body, shared.replace(" ", "  "), "The end", f"After it {i}"]) for i, body in enumerate(bodies)]
    few = "Only three pages have this line."
    texts[:3] = [f"{text}{joint}{few}" for text in texts[:3]]
    texts += [shared, "A page without any of it."]
    config = DedupeConfig(near=None, boilerplate={"unit": unit, "max_documents": 10})
    out = build(dedupe, config, documents=written(tmp_path / "in", texts, parts=3))
    found = {int(document.id, 16): document.text for document in read_documents(out)}
    assert sorted(found) == [number for number in range(14) if number != 12]
    for number, body in enumerate(bodies):
        tail = joint + few if number < 3 else ""
        assert found[number] == joint.join([body, "The end", f"After it {number}"]) + tail
    assert found[13] == texts[13]
    [gone] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert (int(gone["id"], 16), gone["rule"], gone["text"]) == (12, "boilerplate", shared)
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert (counts["read"], counts["kept"]) == (14, 13)
    assert (counts["boilerplate"]["units"], counts["boilerplate"]["changed"]) == (13, 13)
    assert counts["boilerplate"]["samples"][0]["documents"] == 13


def test_a_text_whose_only_partner_is_the_sixty_fifth_of_its_bucket_is_found():
    """Compared with the first 64 texts alone, it stayed."""
    from corpus.dedupe.kernels import Sets, compare_buckets

    count = 66
    shingles = np.arange(10 * count, dtype=np.uint32).reshape(count, 10)
    shingles[65] = shingles[64]
    sets = Sets(shingles.ravel(), np.arange(count) * 10, np.full(count, 10))
    originals, similarities = np.full(count, -1), np.zeros(count, np.float32)
    compare_buckets(np.arange(count), np.array([0, count]), sets, 0.8, originals, similarities)
    assert originals.tolist() == [-1] * 65 + [64]


FUNCTION = (
    "def combine(left, right):\n    result = left {} right\n    if result:\n        log(result)\n    return result\n"
)
STATION = "At the station on the ridge the thermometer showed {} °C at noon and {} °C at night, said the warden."
LANGUAGE = "{} is the language that the team uses for the control software of the pumps, and all of them learnt it."
SUM = "Solve for x: 3 x {} 5 = 7. Write down each step and check the result by putting it in."
OPERATORS = "+ - * / % // ** & | ^ < > == != <= >= << >>"
ALIKE_BUT_DIFFERENT = {
    "operators of code": [FUNCTION.format(mark) for mark in OPERATORS.split()],
    "brackets of code": ["x = f[i](y)\nz = {k: v}", "x = f(i)[y]\nz = {k: v}", "x = f[i](y)\nz = (k, v)"],
    "signs of numbers": [
        STATION.format(*pair) for pair in (("12", "12"), ("-12", "-12"), ("+12", "-12"), ("12", "-12"))
    ],
    "names with marks": [LANGUAGE.format(name) for name in ("C", "C++", "C#", "C--", "C*", "F", "F#")],
    "names with marks at the end": [
        f"The software for the pumps, which all of them learnt to write in a year, is in {name}"
        for name in ("C", "C++", "C#", "F#", "J")
    ],
    "operators in prose": [
        f"In that shell the sign {mark} stands between two conditions, as in ready {mark} willing, and each is tried."
        for mark in ("&&", "||", "->", "=>", "::", ":=", "**", "//", "<<", "==", "!=", "")
    ],
    "operators without spaces": [
        f"The manual writes it as std{mark}vector and explains on the next page what that stands for in the programs."
        for mark in ("::", "->", "&&", "||", ".")
    ],
    "operators of letters": [f"The bits of a {mark} b are what the exercise asks for." for mark in "&|^+"],
    "formulas": [SUM.format(sign) for sign in "+-×÷±·∓"],
    "comparisons": [f"The difference was significant with p {sign} 0.05 in all of the trials." for sign in "<>="],
    "raised digits": [
        "The field has an area of 10² metres by the map.",
        "The field has an area of 102 metres by the map.",
    ],
    "vowel signs of Hindi": ["यह किताब उसकी है और वह उसे पढ़ता है", "यह किताब उसके है और वह उसे पढ़ती है", "कु कु कु", "के के के"],
    "vowel signs of Arabic": ["كَتَبَ الولد الدرس في دفتره الجديد", "كُتِبَ الولد الدرس في دفتره الجديد"],
    "tone marks of Thai": ["เขาเดินไปที่ตลาดใกล้บ้าน", "เขาเดินไปที่ตลาดไกลบ้าน", "ไก่ไก่ไก่", "ไก้ไก้ไก้"],
    "voiced kana": ["かきをたべる", "がきをたべる"],
    "tones of Vietnamese": [
        "ông ấy bán cá ở chợ vào buổi sáng",
        "ông ấy bàn cà ở chò vao buổi sang",
        "má má má má",
        "mà mà mà mà",
    ],
    "tones of Pinyin": ["tā mǎi le yì běn shū gěi wǒ", "tā mài le yì běn shū gěi wǒ"],
}
ALIKE = {
    "accents, case and width": [
        "The café in the old harbour serves coffee from six in the morning until the ferry leaves.",
        "THE CAFE IN THE OLD HARBOUR SERVES COFFEE FROM SIX IN THE MORNING UNTIL THE FERRY LEAVES",
        "Ｔｈｅ cafe\u0301 in the old har\u00adbour serves coffee from six in the morning until the ferry leaves.",
    ],
    "composed and decomposed tones": ["ông ấy bán cá ở chợ", unicodedata.normalize("NFD", "ông ấy bán cá ở chợ")],
    "forms of minus and dash": [
        "It was −12 °C (1990–1995) - so they said - in the well-known valley of the north, by and by.",
        "It was -12 °C (1990-1995) — so they said — in the well known valley of the north, by and by.",
    ],
    "layout and quotes of code": [
        FUNCTION.format("+") + "x = call('a', 'b')",
        FUNCTION.format("+").replace("    ", "\t").replace(" = ", "=") + 'x = call("a","b",)',
    ],
    "marks of markup": [
        "The **bold** claim of the warden was that it holds in the second part, as he said:\n\n  so on -- to noon.",
        "The bold claim of the warden was that it holds in the second part, as he said\n\n  so on - to noon.",
    ],
    "quoted mail": [
        "> You wrote that the bridge\n> is closed until May.",
        "You wrote that the bridge\nis closed until May.",
    ],
}


@pytest.mark.parametrize("texts", ALIKE_BUT_DIFFERENT.values(), ids=ALIKE_BUT_DIFFERENT)
def test_marks_that_carry_meaning_tell_texts_apart(build, tmp_path, texts):
    documents = written(tmp_path / "in", texts)
    assert numbers(build(dedupe, DedupeConfig(), documents=documents)) == list(range(len(texts)))


@pytest.mark.parametrize("texts", ALIKE.values(), ids=ALIKE)
def test_marks_without_meaning_do_not(build, tmp_path, texts):
    assert numbers(build(dedupe, DedupeConfig(), documents=written(tmp_path / "in", texts))) == [0]


def test_marks_can_be_left_out(build, tmp_path):
    texts = ALIKE_BUT_DIFFERENT["operators of code"]
    config = DedupeConfig(near={"marks": False})
    assert numbers(build(dedupe, config, documents=written(tmp_path / "in", texts))) == [0]


def test_hashes_of_words_with_marks_stay_as_they_are():
    """Code, prose, tonal passages, scripts without spaces and marks that no word follows. Another digest means that
    dedupe finds other duplicates: raise its version."""
    text = (
        "It was -12 °C and C++, C# or x < 0.05 (5 %).\n\nif (a[i] += 1) { return x->y.z; }\n \n"
        "Tôi đọc sách ở Việt Nam, trời đẹp quá.\n\nnaïve café to\u0300 x² H₂O ½ ∑ € 中文。の が は "
        "कि की \u0e01\u0e35\u0e48 𝒜 😀 𠀀\n\n- \uff0b\uff15 \u2212 3 A*"
    )
    data = np.frombuffer(text.encode(), np.uint8)
    words, marks = np.zeros(data.size, np.uint64), np.zeros(data.size + 1, np.uint64)
    starts, places, words_of_marks = (np.zeros(data.size, np.int64) for _ in range(3))
    count = hash_marked_words(data, 0, data.size, mark_tables(), words, starts, marks, places, words_of_marks)
    shown = [text.encode()[start:].decode()[0] for start in starts[:count]]
    assert "".join(shown[:6]) == "Iw1CaC" and "中文のがは" in "".join(shown)
    digest = hashlib.sha256(words[:count].tobytes() + marks[:count].tobytes()).hexdigest()
    assert (count, digest[:16]) == (48, "c19f15193bc4b5a4")
