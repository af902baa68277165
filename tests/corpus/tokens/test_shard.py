"""Shards: what is read back is what went in, split without leaks, the same bytes however it was made."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from corpus.config import IngestConfig, InstructionsConfig, ShardConfig
from corpus.documents.parts import DocumentWriter, is_heldout, make_document, read_documents
from corpus.ingest import ingest
from corpus.instructions import instructions
from corpus.shard import shard
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run


@pytest.fixture
def read_back(tmp_path: Path) -> Callable[[Path], list[dict]]:
    """read_back(folder) gives the samples in order through StreamingDataset.

    Each call reads a copy of its own: streaming names shared memory after the folder, keeps it until the process ends,
    and its way to clean up takes away that of other processes too.
    """
    from streaming import StreamingDataset

    count = 0

    def read(folder: Path) -> list[dict]:
        nonlocal count
        count += 1
        copy = shutil.copytree(folder, tmp_path / f"copy-{count}")
        dataset = StreamingDataset(local=str(copy), shuffle=False, batch_size=1)
        return [dataset[i] for i in range(len(dataset))]

    return read


def index_of(artifact: Path, side: str) -> list[dict]:
    return [row for row in pq.read_table(artifact / "index.parquet").to_pylist() if row["side"] == side]


def test_samples_read_back_are_the_documents_joined(shards, documents, trained_tokenizer, read_back):
    model = Tokenizer.from_file(str(trained_tokenizer / "tokenizer.json"))
    meta = json.loads((shards / "meta.json").read_text())
    by_id = {document.id: document for document in read_documents(documents)}
    for side, heldout in (("train", False), ("validation", True)):
        samples = read_back(shards / side)
        index = index_of(shards, side)
        mine = {name for name, document in by_id.items() if is_heldout(document.group, 0.05) == heldout}
        assert {row["id"] for row in index} == mine and len(index) == len(mine) == meta[f"{side}_documents"]
        expected = [token for row in index for token in [*model.encode(by_id[row["id"]].text).ids, 0]]
        assert sum(row["tokens"] for row in index) == len(expected)
        length = len(samples) * 64
        assert np.concatenate([sample["tokens"] for sample in samples]).tolist() == expected[:length]
        assert samples[0]["tokens"].dtype == np.uint16 and samples[0]["tokens"].shape == (64,)
        assert meta[f"{side}_tokens"] == length and len(expected) - length == meta[f"{side}_left_out_tokens"] < 64
        decoded = model.decode(expected[:length], skip_special_tokens=True)
        assert abs(meta[f"{side}_bytes"] - len(decoded.encode())) <= 3


def test_starts_are_where_documents_begin(shards, read_back):
    samples = read_back(shards / "train")
    assert any(len(sample["starts"]) > 1 for sample in samples)
    for sample in samples:
        ends = np.flatnonzero(sample["tokens"] == 0)
        assert sample["starts"].tolist() == [0, *(end + 1 for end in ends if end < 63)]


TEXTS = {
    "letters": [f"Letter {i}: the post came late, and the answer was {'no' * (i % 9)}." for i in range(150)],
    "numbers": [" ".join(str(i * j) for j in range(40)) for i in range(120)],
    "spaces": ["word " * (5 + i) for i in range(90)],
}


def write_documents(folder: Path, texts: list[tuple[str, str]], part_bytes: int = 16_000_000) -> Path:
    with DocumentWriter(folder / "documents", part_bytes) as writer:
        for number, (source, text) in enumerate(texts):
            if number % 40 == 0:
                writer._flush()
            writer.write(make_document(text, f"{source}/{number}.txt", language="en"))
    return folder


@pytest.fixture
def mixed(tmp_path: Path) -> list[tuple[str, str]]:
    return [(source, text) for source, texts in TEXTS.items() for text in texts]


def test_each_token_is_counted_under_its_documents_source(build, tmp_path, mixed, trained_tokenizer, read_back):
    documents = write_documents(tmp_path / "mixed", mixed)
    out = build(shard, ShardConfig(sequence_length=32), documents=documents, tokenizer=trained_tokenizer)
    meta = json.loads((out / "meta.json").read_text())
    assert {name: found["id"] for name, found in meta["sources"].items()} == {"letters": 0, "numbers": 1, "spaces": 2}
    for side in ("train", "validation"):
        for key in ("tokens", "bytes", "documents"):
            assert sum(found[side][key] for found in meta["sources"].values()) == meta[f"{side}_{key}"]
        tokens = Counter()
        samples = read_back(out / side)
        for sample in samples:
            assert sample["sources"].dtype == np.uint16 and len(sample["sources"]) == len(sample["starts"])
            lengths = np.diff(sample["starts"].astype(int), append=32)
            for source, length in zip(sample["sources"].tolist(), lengths.tolist(), strict=True):
                tokens[source] += length
        assert tokens == {found["id"]: found[side]["tokens"] for found in meta["sources"].values()}
        rows = iter(index_of(out, side))
        order = {name: found["id"] for name, found in meta["sources"].items()}
        ended = 0
        begun = []
        for sample in samples:
            for source, at in zip(sample["sources"].tolist(), sample["starts"].tolist(), strict=True):
                if at or ended:
                    begun.append(source)
            ended = sample["tokens"][-1] == 0
        next(rows)
        assert begun == [order[next(rows)["source"]] for _ in begun]


def test_every_stretch_mixes_all_sources(build, tmp_path, mixed, trained_tokenizer):
    out = build(
        shard,
        ShardConfig(sequence_length=32),
        documents=write_documents(tmp_path / "mixed", mixed),
        tokenizer=trained_tokenizer,
    )
    sources = [row["source"] for row in index_of(out, "train")]
    assert all(len(set(sources[begin : begin + 30])) == 3 for begin in range(0, len(sources) - 30, 30))


def test_neither_workers_nor_order_nor_partitions_change_a_byte(tmp_path, mixed, trained_tokenizer, payload):
    shuffled = random.Random(1).sample(mixed, len(mixed))
    # The number in the source is where it stood; the source itself is what comes before the slash.
    ways = {
        "one worker": (1, write_documents(tmp_path / "a", mixed)),
        "two workers": (2, write_documents(tmp_path / "b", mixed, part_bytes=3000)),
        "other order": (1, write_documents(tmp_path / "c", shuffled, part_bytes=5000)),
    }
    assert len(list((tmp_path / "b" / "documents").iterdir())) > 3
    found = {}
    for name, (workers, documents) in ways.items():
        out = tmp_path / f"out {name}"
        out.mkdir()
        config = ShardConfig(sequence_length=32, shard_mb=0.003)
        run = Run(tmp_path / f"work {name}", LaunchConfig(workers=workers))
        shard(config, {"documents": documents, "tokenizer": trained_tokenizer}, out, run)
        found[name] = payload(out)
    assert len([name for name in found["one worker"] if name.startswith("train/shard")]) > 2
    assert found["two workers"] == found["one worker"] and found["other order"] == found["one worker"]


def test_copies_of_a_document_are_kept_and_lie_apart(build, tmp_path, mixed, trained_tokenizer):
    documents = write_documents(tmp_path / "twice", [*mixed, *mixed])
    out = build(shard, ShardConfig(sequence_length=32), documents=documents, tokenizer=trained_tokenizer)
    names = [row["id"] for side in ("train", "validation") for row in index_of(out, side)]
    assert len(names) == 2 * len(mixed) and set(Counter(names).values()) == {2}
    neighbours = sum(a == b for a, b in pairwise(names))
    assert neighbours < 0.05 * len(names)


def test_an_interrupted_build_goes_on_where_it_was(tmp_path, mixed, trained_tokenizer, payload):
    documents = write_documents(tmp_path / "mixed", mixed, part_bytes=3000)
    inputs = {"documents": documents, "tokenizer": trained_tokenizer}
    config = ShardConfig(sequence_length=32)
    journal = io.StringIO()
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        out.mkdir()
        shard(config, inputs, out, Run(tmp_path / "work", LaunchConfig(workers=1), journal=journal))
    assert "continuing tokenise" in journal.getvalue()
    assert payload(outs[0]) == payload(outs[1])


def test_a_damaged_shard_does_not_match_its_hash(shards, tmp_path):
    from streaming import StreamingDataset

    remote = shutil.copytree(shards / "validation", tmp_path / "remote")
    whole = StreamingDataset(
        remote=str(remote), local=str(tmp_path / "local"), validate_hash="xxh3_64", shuffle=False, batch_size=1
    )
    assert len(whole[0]["tokens"]) == 64
    [file] = remote.glob("shard*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damaged = StreamingDataset(
        remote=str(remote), local=str(tmp_path / "other"), validate_hash="xxh3_64", shuffle=False, batch_size=1
    )
    with pytest.raises(ValueError, match="Checksum failure"):
        damaged[0]


def test_docstrings_of_held_out_instructions_are_in_no_training_shard(
    build, documents, trained_tokenizer, shards, lines_of, read_back
):
    source = {"kind": "docstrings", "packages": ["click", "jinja2", "networkx"]}
    heldout = lines_of(build(instructions, InstructionsConfig(read=[source])) / "heldout.jsonl")
    sources = {document.source: document.group for document in read_documents(documents)}
    in_corpus = [pair for pair in heldout if pair["source"] in sources]
    assert len(in_corpus) >= 5
    assert all(is_heldout(sources[pair["source"]], 0.05) for pair in in_corpus)

    model = Tokenizer.from_file(str(trained_tokenizer / "tokenizer.json"))
    tokens = np.concatenate([sample["tokens"] for sample in read_back(shards / "train")]).tolist()
    opening_sentences = set()
    for text in model.decode(tokens, skip_special_tokens=False).split("<|endoftext|>"):
        opening_sentences.add(" ".join(text.partition("\n\n")[2].split())[:60])
    assert not [pair for pair in in_corpus if pair["response"][:60] in opening_sentences]


def test_special_tokens_spelt_in_a_text_are_ordinary_text(build, write, trained_tokenizer, read_back):
    texts = [f"Document {i} spells <|endoftext|> and <|user|> in its words." for i in range(100)]
    path = write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    config = ShardConfig(sequence_length=16)
    out = build(shard, config, documents=documents, tokenizer=trained_tokenizer)
    tokens = np.concatenate([sample["tokens"] for sample in read_back(out / "train")])
    meta = json.loads((out / "meta.json").read_text())
    assert meta["train_documents"] - 1 <= (tokens == 0).sum() <= meta["train_documents"]
    assert not (tokens == 2).any()


def test_compressed_shards_hold_the_same_samples(build, documents, trained_tokenizer, shards, read_back):
    config = ShardConfig(sequence_length=64, compression="zstd")
    out = build(shard, config, documents=documents, tokenizer=trained_tokenizer)
    plain, packed = read_back(shards / "validation"), read_back(out / "validation")
    assert len(plain) == len(packed)
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(plain, packed, strict=True))


def test_too_little_text_for_one_sequence_says_how_much_there_is(build, write, trained_tokenizer):
    path = write("a.jsonl", "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100)))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    with pytest.raises(
        StageError, match=r"side has \d+ documents with \d+ tokens, expected at least one sequence of 2,048"
    ):
        build(shard, ShardConfig(sequence_length=2048), documents=documents, tokenizer=trained_tokenizer)


def test_by_source_no_sequence_and_no_file_is_of_two(build, tmp_path, mixed, trained_tokenizer, read_back):
    """The same text and the same validation side as without, cut into sequences source by source."""
    documents = write_documents(tmp_path / "mixed", [*mixed, ("crumbs", "a b c")])
    apart, joined = (
        build(
            shard,
            ShardConfig(sequence_length=32, shard_mb=0.002, by_source=on),
            documents=documents,
            tokenizer=trained_tokenizer,
        )
        for on in (True, False)
    )
    for file in sorted((joined / "validation").iterdir()):
        assert (apart / "validation" / file.name).read_bytes() == file.read_bytes()
    meta = json.loads((apart / "meta.json").read_text())
    samples = read_back(apart / "train")
    index = index_of(apart, "train")
    model = Tokenizer.from_file(str(trained_tokenizer / "tokenizer.json"))
    by_id = {document.id: document for document in read_documents(documents)}
    assert {row["id"] for row in index} == {row["id"] for row in index_of(joined, "train")}
    edges = {0}
    for name, found in meta["sources"].items():
        train = found["train"]
        mine = samples[train["first_sequence"] : train["first_sequence"] + train["sequences"]]
        text = [
            token for row in index if row["source"] == name for token in [*model.encode(by_id[row["id"]].text).ids, 0]
        ]
        assert np.concatenate([[], *(sample["tokens"] for sample in mine)]).tolist() == text[: len(mine) * 32]
        assert train["tokens"] == len(mine) * 32 and len(text) - train["tokens"] < 32
        assert all(set(sample["sources"].tolist()) == {found["id"]} for sample in mine)
        edges |= {train["first_sequence"], train["first_sequence"] + train["sequences"]}
    assert meta["sources"]["crumbs"]["train"]["sequences"] == 0, "too little for a sequence is left out"
    assert max(edges) == len(samples) == meta["train_sequences"] and meta["train_tokens"] == 32 * len(samples)
    shards = json.loads((apart / "train" / "index.json").read_text())["shards"]
    assert edges <= {0, *np.cumsum([one["samples"] for one in shards]).tolist()} and len(shards) > 4
