"""Shards: what is read back is what went in, split without leaks, the same bytes however it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from corpus.config import IngestConfig, InstructionsConfig, ShardConfig
from corpus.documents import read_documents
from corpus.ingest import ingest
from corpus.instructions import instructions
from corpus.shard import shard
from corpus.split import is_heldout
from infra.errors import StageError


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


def test_samples_read_back_are_the_documents_joined(shards, documents, trained_tokenizer, read_back):
    model = Tokenizer.from_file(str(trained_tokenizer / "tokenizer.json"))
    meta = json.loads((shards / "meta.json").read_text())
    for side, heldout in (("train", False), ("validation", True)):
        samples = read_back(shards / side)
        texts = [d.text for d in read_documents(documents) if is_heldout(d.group, 0.05) == heldout]
        expected = [token for text in texts for token in [*model.encode(text).ids, 0]]
        length = len(samples) * 64
        assert np.concatenate([sample["tokens"] for sample in samples]).tolist() == expected[:length]
        assert samples[0]["tokens"].dtype == np.uint16 and samples[0]["tokens"].shape == (64,)
        assert meta[f"{side}_tokens"] == length and len(expected) - length == meta[f"{side}_left_out_tokens"] < 64
        decoded = model.decode(expected[:length], skip_special_tokens=True)
        assert abs(meta[f"{side}_bytes"] - len(decoded.encode())) <= 3
        assert meta[f"{side}_documents"] == len(texts)


def test_starts_are_where_documents_begin(shards, read_back):
    samples = read_back(shards / "train")
    assert any(len(sample["starts"]) > 1 for sample in samples)
    for sample in samples:
        ends = np.flatnonzero(sample["tokens"] == 0)
        assert sample["starts"].tolist() == [0, *(end + 1 for end in ends if end < 63)]


def test_number_of_workers_does_not_change_a_byte(build, documents, trained_tokenizer, shards, payload):
    for workers in (1, 4):
        config = ShardConfig(sequence_length=64, workers=workers)
        assert payload(build(shard, config, documents=documents, tokenizer=trained_tokenizer)) == payload(shards)


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
