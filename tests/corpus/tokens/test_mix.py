"""Sources come out in the proportions that were asked for, within the epoch cap, and no held-out document twice."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from pydantic import ValidationError

from corpus.documents.parts import DocumentWriter, is_heldout, link_parts, make_document, read_documents
from corpus.documents.sources import SourceCounts, SourceFacts, source_name, write_sources
from corpus.mix.config import MixConfig
from corpus.mix.stage import mix
from infra.errors import StageError

SIZES = {"books": 600, "web": 2400, "wiki": 300}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three sources of documents of some 500 bytes, in five parts; web has half the weight of the others."""
    folder = tmp_path_factory.mktemp("mix")
    generator = random.Random(1)
    counts = SourceCounts()
    documents = [
        make_document(
            f"{name} {number} " + "x" * generator.randrange(200, 800), f"{name}/{number}", metadata='{"a": "é"}'
        )
        for name, size in SIZES.items()
        for number in range(size)
    ]
    parts = []
    for part in range(5):
        parts.append(folder / f"part-{part}")
        with DocumentWriter(parts[-1] / "documents") as writer:
            for document in documents[part::5]:
                writer.write(document)
                counts.add(document)
    link_parts(parts, folder)
    write_sources(folder, {name: SourceFacts(weight=0.5 if name == "web" else 1.0) for name in SIZES}, counts)
    return folder


def mixed(build, corpus, **config):
    out = build(mix, MixConfig(**config), documents=corpus)
    return list(read_documents(out)), json.loads((out / "aux" / "mixture.json").read_text())


def sizes(documents):
    found = Counter()
    for document in documents:
        found[source_name(document.source)] += len(document.text.encode())
    return found


def epoch_of(document):
    return json.loads(document.metadata).get("epoch", 0)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        ({"weights": {"web": 1}}, {"books": 600 / 3300, "web": 2400 / 3300, "wiki": 300 / 3300}),
        ({}, {"books": 600 / 2100, "web": 1200 / 2100, "wiki": 300 / 2100}),
        ({"shares": {"wiki": 0.25}, "weights": {"web": 1}}, {"books": 0.15, "web": 0.6, "wiki": 0.25}),
        (
            {"shares": {"wiki": 0.3, "books": 0.3, "web": 0.4}, "target_mb": 0.4},
            {"books": 0.3, "web": 0.4, "wiki": 0.3},
        ),
        ({"shares": {"wiki": 0.4, "books": 0.6}, "target_share": 0.5}, {"books": 0.6, "wiki": 0.4}),
    ],
)
def test_shares_come_out_as_asked_for(build, corpus, config, shares):
    documents, told = mixed(build, corpus, **config)
    found = sizes(documents)
    assert {name: found[name] / found.total() for name in found} == pytest.approx(shares, abs=0.005)
    assert {name: row["share"] for name, row in told.items() if row["bytes"]} == pytest.approx(shares, abs=0.005)


def test_everything_once_where_nothing_is_asked_for(build, corpus, payload):
    documents, _ = mixed(build, corpus, weights={"web": 1})
    assert documents == list(read_documents(corpus))


@pytest.mark.parametrize(
    ("target", "size"), [({"target_mb": 0.5}, 5e5), ({"target_tokens": 1e5}, 4e5), ({"target_share": 0.25}, None)]
)
def test_target_size_is_met(build, corpus, target, size):
    documents, _ = mixed(build, corpus, **target)
    available = sum(len(document.text.encode()) for document in read_documents(corpus))
    assert sizes(documents).total() == pytest.approx(size or 0.25 * available, rel=0.01)


def test_no_source_is_seen_more_often_than_the_cap_and_the_others_make_up_for_it(build, corpus):
    documents, told = mixed(build, corpus, shares={"wiki": 0.8}, max_epochs=2)
    assert told["wiki"]["epochs"] <= 2
    assert max(Counter(document.id for document in documents).values()) == 2
    available = sum(len(document.text.encode()) for document in read_documents(corpus))
    assert sizes(documents).total() == pytest.approx(available, rel=0.01)


def test_a_target_beyond_the_cap_of_all_sources_gives_what_there_is(build, corpus):
    documents, _ = mixed(build, corpus, target_share=10, max_epochs=1)
    assert documents == list(read_documents(corpus))


def test_repetitions_say_so_are_never_held_out_and_lie_apart(build, corpus):
    documents, _ = mixed(build, corpus, shares={"wiki": 0.3}, heldout_share=0.2)
    assert len({(document.id, epoch_of(document)) for document in documents}) == len(documents)
    by_id: dict[str, list] = {}
    for place, document in enumerate(documents):
        by_id.setdefault(document.id, []).append((place, document))
    repeated = [copies for copies in by_id.values() if len(copies) > 1]
    assert repeated
    for copies in repeated:
        assert [epoch_of(document) for _, document in copies] == list(range(len(copies)))
        assert len({(document.text, document.group) for _, document in copies}) == 1
        assert not is_heldout(copies[0][1].group, 0.2)
        assert all(json.loads(document.metadata)["a"] == "é" for _, document in copies)
        assert copies[1][0] - copies[0][0] > 1
    heldout = {document.id for document in read_documents(corpus) if is_heldout(document.group, 0.2)}
    assert {copies[0][1].id for copies in by_id.values()} >= heldout & {d.id for d in documents}


def test_a_smaller_target_takes_a_part_of_what_a_larger_one_does(build, corpus):
    small, large = ({document.id for document in mixed(build, corpus, target_share=share)[0]} for share in (0.2, 0.4))
    assert small < large
    other = {document.id for document in mixed(build, corpus, target_share=0.2, seed=18)[0]}
    assert other != small


def test_unknown_names_and_impossible_shares_are_told(build, corpus):
    with pytest.raises(StageError, match=r"mix.shares.blogs.*did you mean books"):
        mixed(build, corpus, shares={"blogs": 0.5})
    with pytest.raises(ValidationError, match="at most 1 in all"):
        MixConfig(shares={"a": 0.7, "b": 0.6})
    with pytest.raises(ValidationError, match="one of target_mb"):
        MixConfig(target_mb=1, target_share=1)
