"""What dedupe, decontaminate and mix write is no text; whoever reads it sees the documents that are left."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.config import ShardConfig
from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.stage import decontaminate
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.cuts import Cut, joined, without
from corpus.documents.parts import (
    DocumentWriter,
    copy_documents,
    document_parts,
    link_parts,
    make_document,
    read_documents,
)
from corpus.documents.selection import link_selections, read_batches, read_table, write_selection
from corpus.mix.config import MixConfig
from corpus.mix.stage import mix
from corpus.shard import shard
from infra.errors import ConfigError, StageError
from tasks.building.payloads import check_payload
from tests.corpus.conftest import build_stage
from tests.support.programs.command import REPOSITORY

COLUMNS = ("id", "text", "source", "group", "metadata")


def cut_text(text: bytes, cuts: list[Cut]) -> bytes:
    for cut in reversed(cuts):
        text = text[: cut.begin] + cut.put.encode() + text[cut.end :]
    return text


@st.composite
def cuts_in(draw, size: int) -> list[Cut]:
    """Cuts in a text of `size` bytes, ascending and apart, some of nothing and some side by side."""
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    puts = st.sampled_from(["", "\n\n", "…"])
    return [Cut(begin, end, draw(puts)) for begin, end in zip(edges[::2], edges[1::2], strict=False)]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_joined_cuts_do_what_one_after_the_other_does(data):
    text = b"0123456789abcdefghijklmnop"[: data.draw(st.integers(0, 26))]
    first = data.draw(cuts_in(len(text)))
    once = cut_text(text, first)
    # An end within the bytes of one character is no place that a stage cuts at.
    places = [place for place in range(len(once) + 1) if place == len(once) or once[place] & 0xC0 != 0x80]
    edges = sorted(data.draw(st.lists(st.sampled_from(places), max_size=8)))
    then = [Cut(begin, end, "\n\n") for begin, end in zip(edges[::2], edges[1::2], strict=False)]
    both = joined(first, then)
    assert cut_text(text, both) == cut_text(once, then)
    assert all(one.end <= other.begin for one, other in itertools.pairwise(both))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.data())
def test_cuts_leave_the_other_texts_of_a_table_as_they_are(texts, data):
    cuts, expected = {}, list(texts)
    for place, text in enumerate(texts):
        if data.draw(st.booleans()):
            begin, end = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
            cuts[place] = [Cut(len(text[:begin].encode()), len(text[:end].encode()), "é")]
            expected[place] = text[:begin] + "é" + text[end:]
    table = pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string())})
    for some in (table, pa.concat_tables([table.slice(0, 1), table.slice(1)])):
        assert without(some, cuts)["text"].to_pylist() == expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """300 documents in three parts of several row groups: every tenth there twice, each with a line of boilerplate."""
    folder = tmp_path_factory.mktemp("selection")
    generator = random.Random(3)
    words = [f"wörd{number}" for number in range(500)]
    texts = [" ".join(generator.choices(words, k=60)) for _ in range(270)]
    texts = [f"{text}\nSubscribe to our newsletter, and miss nothing!\n{text[::-1]}" for text in texts]
    texts += texts[::9]
    folders = []
    for part in range(3):
        folders.append(folder / f"part-{part}")
        with DocumentWriter(folders[-1] / "documents") as writer:
            for number in range(part, len(texts), 3):
                writer.write(make_document(texts[number], f"{'ab'[number % 2]}/{number}", metadata='{"page": 1}'))
        file = folders[-1] / "documents" / "part-00000.parquet"
        pq.write_table(pq.read_table(file), file, row_group_size=17)
    link_parts(folders, folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module")
def items(tmp_path_factory, corpus):
    """Test items: some words of every 20th document."""
    texts = [document.text.split("\n")[0].split() for document in read_documents(corpus)]
    folder = tmp_path_factory.mktemp("items")
    rows = [{"task": "told", "item": str(i), "texts": [" ".join(text[20:36])]} for i, text in enumerate(texts[::20])]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


CUTTING = DecontaminateConfig(action="cut", context_characters=10, min_piece_characters=20)
STEPS = {
    "dedupe": (dedupe, DedupeConfig(boilerplate={"max_documents": 10})),
    "decontaminate": (decontaminate, CUTTING),
    "mix": (mix, MixConfig(shares={"a": 0.8}, max_epochs=3, heldout_share=0.2)),
    "again": (mix, MixConfig(target_share=1.4, heldout_share=0.2, seed=3)),
}


def inputs_of(step, documents, items):
    return {"documents": documents} | ({"benchmark_text": items} if step == "decontaminate" else {})


def plain(artifact, folder):
    """The artifact with its text in files of its own, as its stage wrote it before there were selections."""
    copy_documents(artifact, folder / "documents")
    (folder / "sources.json").write_bytes((artifact / "sources.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def chain(tmp_path_factory, corpus, items):
    """The artifact of each step, each made from the one before."""
    made, documents, folder = {}, corpus, tmp_path_factory.mktemp("chain")
    for step, (function, config) in STEPS.items():
        documents = made[step] = build_stage(function, config, folder / step, **inputs_of(step, documents, items))
    return made


def test_a_chain_of_selections_gives_the_documents_and_shards_of_parts_with_their_text(
    build, payload, chain, corpus, items, trained_tokenizer, tmp_path
):
    documents, before = corpus, list(read_documents(corpus))
    for step, (function, config) in STEPS.items():
        made = build(function, config, **inputs_of(step, documents, items))
        documents = plain(made, tmp_path / f"plain-{step}")
        found = list(read_documents(chain[step]))
        assert found == list(read_documents(documents))
        assert found != before
        before = found
    assert sum(document.text.count("newsletter") for document in before) == 0
    assert any("\n\n" in document.text for document in before)
    assert {json.loads(document.metadata).get("epoch", 0) for document in before} >= {0, 1}
    config = ShardConfig(sequence_length=64, heldout_share=0.2)
    one, other = (
        build(shard, config, documents=some, tokenizer=trained_tokenizer) for some in (chain["again"], documents)
    )
    assert payload(one) == payload(other)


def test_no_text_is_written_again(chain, corpus):
    names = Counter(part.stat().st_ino for part in document_parts(corpus))
    for artifact in chain.values():
        texts = sorted((artifact / "text").iterdir())
        assert {text.stat().st_ino for text in texts} == set(names)
        for part in document_parts(artifact):
            assert pq.read_schema(part).names == ["row", "cuts", "epoch"]
            assert pq.read_schema(part).metadata[b"stemma.text_part"].decode() in {text.name for text in texts}
        assert sum(part.stat().st_size for part in document_parts(artifact)) < 0.2 * sum(
            text.stat().st_size for text in texts
        )


def test_what_reads_parts_gives_the_same_rows_whatever_it_reads_at_a_time(chain):
    for part in document_parts(chain["again"]):
        table = read_table(part, COLUMNS)
        assert len(table) == pq.read_metadata(part).num_rows
        for rows in (1, 5, 1000):
            batches = list(read_batches(part, rows, COLUMNS))
            assert max(map(len, batches)) <= rows
            assert pa.Table.from_batches(batches).to_pylist() == table.to_pylist()


def test_the_text_of_an_artifact_is_had_in_files_of_its_own(chain, tmp_path):
    command = [sys.executable, "-m", "corpus.documents.parts", chain["decontaminate"], tmp_path / "documents"]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    rows = pq.read_table(tmp_path / "documents").to_pylist()
    assert rows == [document._asdict() for document in read_documents(chain["decontaminate"])]


def test_parts_of_which_nothing_stays_and_their_texts_are_left_out(corpus, tmp_path):
    folders = []
    for number, part in enumerate(document_parts(corpus)):
        rows = np.arange(0 if number == 1 else 4)
        folders.append(tmp_path / f"some-{number}")
        write_selection(part, rows, folders[-1])
    link_selections([*folders, folders[2]], tmp_path / "out")
    assert [part.name for part in document_parts(tmp_path / "out")] == [f"part-0000{i}.parquet" for i in range(3)]
    assert [text.name for text in sorted((tmp_path / "out" / "text").iterdir())] == [
        f"part-0000{i}.parquet" for i in range(2)
    ]
    assert len(list(read_documents(tmp_path / "out"))) == 12


def test_a_copy_is_whole_by_itself_and_one_without_its_text_says_what_to_run(chain, tmp_path):
    copy = shutil.copytree(chain["mix"], tmp_path / "copy")
    assert list(read_documents(copy)) == list(read_documents(chain["mix"]))
    (copy / "text" / "part-00001.parquet").unlink()
    with pytest.raises(StageError, match=r"text/part-00001\.parquet: no such file.*--force STAGE.*its folder text/"):
        list(read_documents(copy))
    with pytest.raises(ConfigError, match=r"text/part-00001\.parquet.*copy the folder text/ too"):
        check_payload("mix", copy)


def test_a_selection_from_elsewhere_is_taken_only_if_its_text_lies_beside_it(chain, tmp_path):
    check_payload("dedupe", chain["dedupe"])
    write_selection(document_parts(chain["dedupe"])[0], np.arange(3), tmp_path / "leading_out")
    with pytest.raises(ConfigError, match=r"names the text part /.*expected a file of the folder text/"):
        check_payload("dedupe", tmp_path / "leading_out")
