"""Passages that occurred before are cut out, exactly those of a dictionary of all windows, and the rest stays whole."""

from __future__ import annotations

import json
import random
import unicodedata
import zlib
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus.planted import real_texts
from corpus.dedupe import substrings
from corpus.dedupe.config import DedupeConfig, Substrings
from corpus.dedupe.stage import dedupe
from corpus.dedupe.substring_kernels import WORD_BYTES, Rolling
from corpus.dedupe.substrings import cut_substrings
from corpus.documents.parts import DocumentWriter, link_parts, make_document, read_documents
from corpus.documents.selection import read_table
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.corpus.dedupe.interrupted import check_same_bytes

UNSPACED = ((0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
ONLY = {"exact": False, "near": None}


def written(folder: Path, texts: list[str], parts: int = 1, sources: list[str] | None = None) -> Path:
    sources = sources or ["all/texts"] * len(texts)
    rows = list(zip(range(len(texts)), texts, sources, strict=True))
    for part in range(parts):
        with DocumentWriter(folder / f"part-{part}" / "documents") as writer:
            for number, text, source in rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]:
                writer.write(make_document(text, source)._replace(id=f"{number:016x}"))
    link_parts([folder / f"part-{part}" for part in range(parts)], folder)
    return folder


def repeats(texts: list[str], window: int, classes: int = 1) -> list[bytearray]:
    """By brute force: of each byte of each text 1 if it belongs to a window that occurs before, without overlap.

    classes: rounds in which the windows are gone through, each with some of them, to hold fewer at a time.
    """
    encoded = [text.encode() for text in texts]
    begins = [0, *accumulate(map(len, encoded))]
    marks = [bytearray(len(data)) for data in encoded]
    for remainder in range(classes):
        first: dict[bytes, int] = {}
        for number, data in enumerate(encoded):
            for start in range(len(data) - window + 1):
                here = data[start : start + window]
                if classes > 1 and zlib.crc32(here) % classes != remainder:
                    continue
                position = begins[number] + start
                if first.setdefault(here, position) + window <= position:
                    marks[number][start : start + window] = b"\1" * window
    return marks


def is_in_word(text: str, at: int) -> bool:
    """True if a cut before this character would divide a word."""
    if not 0 < at < len(text):
        return False

    def kind(character: str) -> str:
        category = unicodedata.category(character)
        if ord(character) > 0xFFFF or category in ("Co", "Cs"):
            return "none"
        if category in ("Mn", "Me", "Cf"):
            return "mark"
        if category[0] not in "LN" and category != "Mc":
            return "none"
        return "alone" if any(low <= ord(character) <= high for low, high in UNSPACED) else "word"

    before, after = kind(text[at - 1]), kind(text[at])
    return after == "mark" or (after == "word" and before in ("word", "mark"))


def reference(text: str, marks: bytearray) -> str:
    """A text without the spans of marked bytes, cut between words where a boundary is near, else between characters."""
    offsets = [0, *accumulate(len(character.encode()) for character in text)]
    position = {offset: at for at, offset in enumerate(offsets)}
    edges = [
        at for at in range(len(marks) + 1) if (marks[at - 1] if at else 0) != (marks[at] if at < len(marks) else 0)
    ]
    left, kept_from = "", 0
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        while low < high and low not in position:
            low += 1
        while high > low and high not in position:
            high -= 1
        begin, end = position[low], position[high]
        near = [at for at in range(begin, end) if offsets[at] <= low + WORD_BYTES and not is_in_word(text, at)]
        begin = near[0] if near else begin
        near = [at for at in range(begin + 1, end + 1) if offsets[at] >= high - WORD_BYTES and not is_in_word(text, at)]
        end = near[-1] if near else end
        while 0 < begin < end and text[begin] in " \t\n\v\f\r":
            begin += 1
        if begin < end:
            glued = is_in_word(text[begin - 1 : begin] + text[end : end + 1], 1)
            left += text[kept_from:begin] + (" " if glued else "")
            kept_from = end
    return left + text[kept_from:]


def expected(texts: list[str], window: int, least: int, classes: int = 1) -> dict[int, str]:
    left_texts = {}
    for number, marks in enumerate(repeats(texts, window, classes)):
        text = reference(texts[number], marks)
        if text == texts[number] or len(text.strip()) >= least:
            left_texts[number] = text
    return left_texts


def cut(folder: Path, texts: list[str], parts: int = 1, window: int = 200, least: int = 100) -> dict[int, str]:
    documents = written(folder / "in", texts, parts)
    left_texts = sorted((documents / "documents").glob("*.parquet"))
    config = Substrings(min_bytes=window, min_characters=least)
    result = cut_substrings(config, True, 17, left_texts, Run(folder / "work", LaunchConfig(workers=1)))
    tables = [read_table(folder / "documents" / "part-00000.parquet", ["id", "text"]) for folder in result.folders]
    return {int(row["id"], 16): row["text"] for table in tables for row in table.to_pylist()}


PIECES = st.sampled_from(
    [
        "a",
        "b",
        " ",
        "ab",
        "aaaaaaaa",
        "abababab",
        "ab ba ab",
        "the mill ",
        "中",
        "中文の字",
        "é",
        "\u0301",
        "😀",
        "ก็",
        "\n",
    ]
)
TEXTS = st.lists(st.lists(PIECES, max_size=30).map("".join), min_size=1, max_size=6)


@settings(max_examples=25)
@given(texts=TEXTS, parts=st.integers(1, 3), rows=st.sampled_from([3, 1000]), least=st.integers(1, 10))
def test_cuts_are_those_of_brute_force_on_tiny_alphabets(tmp_path_factory, texts, parts, rows, least):
    """Rows sorted at a time: so few, too, that every file is read in slices."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(substrings, "ROWS_AT_ONCE", rows)
        assert cut(folder, texts, parts, window=16, least=least) == expected(texts, 16, least)


@pytest.fixture(scope="module")
def repeating(real_data) -> list[str]:
    """Half a megabyte of real texts, into a third of which passages of others are pasted."""
    texts = real_texts(Path(real_data("web_demo")))[:250]
    generator = random.Random(5)
    for number in range(0, len(texts), 3):
        source = generator.choice(texts)
        begin, at = generator.randrange(len(source) - 100), generator.randrange(len(texts[number]))
        passage = source[begin : begin + generator.choice([150, 199, 200, 210, 400, 2000])]
        texts[number] = texts[number][:at] + passage + texts[number][at:]
    return texts


def test_cuts_are_those_of_brute_force_on_real_text(tmp_path, repeating):
    left_texts = cut(tmp_path, repeating, parts=3)
    assert left_texts == expected(repeating, 200, 100)
    assert sum(map(len, repeating)) - sum(map(len, left_texts.values())) > 10_000


@pytest.mark.long
def test_cuts_are_those_of_brute_force_on_five_megabytes(tmp_path, real_data):
    """Risk: what a small text does not show, such as hash slices, anchors of long texts, and many parts."""
    texts, size = [], 0
    generator = random.Random(7)
    every = real_texts(Path(real_data("web_demo")).parent)
    while size < 5_000_000:
        texts.append(generator.choice(every))
        size += len(texts[-1].encode())
    assert cut(tmp_path, texts, parts=9) == expected(texts, 200, 100, classes=16)


def test_the_stage_cuts_after_duplicates_are_gone_and_reports_it(build, tmp_path):
    generator = random.Random(2)

    def prose(words: int) -> str:
        return " ".join(f"w{generator.randrange(10_000)}" for _ in range(words))

    licence, first, second = prose(60), prose(80), prose(80)
    texts = [f"{first}\n\n{licence}", first + " " + licence, f"{second}\n\n{licence}\n\nThe end.", licence + " Amen."]
    sources = ["books/1", "books/2", "crawl/3", "crawl/4"]
    documents = written(tmp_path / "in", texts, parts=2, sources=sources)
    out = build(dedupe, DedupeConfig(substrings={}), documents=documents)
    left_texts = {int(document.id, 16): document.text for document in read_documents(out)}
    assert left_texts == {0: texts[0], 2: f"{second}\n\n\n\nThe end."}
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert counts["dropped"] == {"exact_duplicate": 1, "near_duplicate": 0, "substring": 1}
    report = counts["substrings"]
    assert (report["passages"], report["changed"], report["dropped"]) == (2, 1, 1)
    assert report["bytes_cut"] == 2 * len(licence)
    [sample, _] = report["samples"]
    assert (sample["text"], sample["id"], sample["original"]) == (licence[:600], f"{2:016x}", f"{0:016x}")
    assert sample["original_source"] == "books/1"
    rows = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert [(row["rule"], row["text"]) for row in rows] == [("exact_duplicate", texts[1]), ("substring", texts[3])]
    facts = json.loads((out / "sources.json").read_text())
    assert facts["crawl"]["documents"] == 1 and facts["crawl"]["bytes"] == len(left_texts[2])
    apart = build(dedupe, DedupeConfig(substrings={}, across_sources=False), documents=documents)
    assert [document.text for document in read_documents(apart)] == [texts[0], texts[2]]


def test_same_bytes_for_any_number_of_workers_and_after_an_interruption(tmp_path, payload, repeating):
    documents = written(tmp_path / "in", repeating, parts=4)
    check_same_bytes(tmp_path, documents, DedupeConfig(**ONLY, substrings={}), "windows", payload)


def test_a_corpus_of_short_repetitions_is_refused_and_not_emptied(build, tmp_path):
    with pytest.raises(StageError, match="too short after repeated passages are cut"):
        build(dedupe, DedupeConfig(**ONLY, substrings={}), documents=written(tmp_path / "in", ["ะ" * 500]))


def test_equal_hashes_of_different_passages_stop_the_stage(tmp_path, monkeypatch):
    """With bases of 0 a hash is that of the last byte alone."""
    weak = Rolling(np.ones((2, 256), np.uint64), np.zeros(2, np.uint64))
    monkeypatch.setattr(Rolling, "of_seed", classmethod(lambda cls, seed: weak))
    with pytest.raises(StageError, match="equal hashes"):
        cut(tmp_path, ["The river bends twice before the mill.", "The lamp went out, and the wind rose."], window=16)
