"""Small inputs for the training stages: a byte-level tokenizer, packed shards, pairs, a model of two layers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus.tokens.chat_template import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import TRAINER, Told

if trainer := os.environ.get(TRAINER):
    LaunchConfig.model_fields["trainer"].default = trainer
    LaunchConfig.model_rebuild(force=True)

NOUNS = ["array", "matrix", "tensor", "string", "file", "list", "token", "model"]
VERBS = {
    "sum": "Return the sum of the",
    "sort": "Sort the",
    "load": "Load the",
    "save": "Write the",
    "copy": "Copy the",
}
SEQUENCE_LENGTH = 32


class Journal(Told):
    """A run's lines, and what is asked of them."""

    def events(self) -> list[str]:
        return [line["message"] for line in self.lines if line["kind"] == "event"]

    def metric(self, name: str) -> list[float]:
        found = [line["values"].get(name) for line in self.lines if line["kind"] == "metric"]
        return [float(value) for value in found if value is not None]


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def run(tmp_path: Path, journal: Journal) -> Run:
    return Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1), journal=journal)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{start} {noun}." for start in VERBS.values() for noun in NOUNS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shards_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """Packed sequences of sentences, in the format that the shard stage writes."""
    from streaming import MDSWriter
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    folder = tmp_path_factory.mktemp("shards")
    meta: dict[str, Any] = {"vocab_size": len(tokenizer), "sequence_length": SEQUENCE_LENGTH}
    for seed, (split, documents) in enumerate((("train", 600), ("validation", 60))):
        words = random.Random(seed)
        texts = [f"{words.choice(list(VERBS.values()))} {words.choice(NOUNS)}." for _ in range(documents)]
        ids = [number for text in texts for number in [*tokenizer.encode(text), tokenizer.eos_token_id]]
        rows = np.array(ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH], np.uint16).reshape(-1, SEQUENCE_LENGTH)
        ends = rows == tokenizer.eos_token_id
        columns = {"tokens": f"ndarray:uint16:{SEQUENCE_LENGTH}", "starts": "ndarray:uint32"}
        with MDSWriter(out=str(folder / split), columns=columns) as writer:
            for row, end in zip(rows, ends, strict=True):
                starts = np.array([0, *(np.flatnonzero(end[:-1]) + 1)], np.uint32)
                writer.write({"tokens": row, "starts": starts})
        meta |= {f"{split}_tokens": rows.size, f"{split}_bytes": sum(len(text.encode()) for text in texts)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="session")
def mixed_shards_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """Shards of three sources by the stages `mix` and `shard`: some `numbers` come twice, some `letters` never."""
    from corpus.config import ShardConfig
    from corpus.documents.parts import DocumentWriter, make_document
    from corpus.mix.config import MixConfig
    from corpus.mix.stage import mix
    from corpus.shard import shard

    words = random.Random(5)
    texts = {
        "sentences": [f"{words.choice(list(VERBS.values()))} {words.choice(NOUNS)} {n}." for n in range(300)],
        "numbers": [" ".join(str(words.randrange(1000)) for _ in range(4)) for _ in range(150)],
        "letters": ["".join(words.choices("abcdefgh", k=12)) for _ in range(400)],
    }
    folder = tmp_path_factory.mktemp("mixed")
    with DocumentWriter(folder / "documents") as writer:
        for source, those in texts.items():
            for number, text in enumerate(those):
                writer.write(make_document(text, f"{source}/{number}.txt"))

    def run(name: str) -> Run:
        return Run(folder / f"{name}.work", LaunchConfig(device="cpu", threads=1))

    for name in ("mix", "shard"):
        (folder / name).mkdir()
    mixture = MixConfig(weights={"sentences": 1.0, "numbers": 2.0, "letters": 0.5}, heldout_share=0.1)
    mix(mixture, {"documents": folder}, folder / "mix", run("mix"))
    inputs = {"documents": folder / "mix", "tokenizer": tokenizer_dir}
    config = ShardConfig(sequence_length=SEQUENCE_LENGTH, shard_mb=0.004, heldout_share=0.1)
    shard(config, inputs, folder / "shard", run("shard"))
    return folder / "shard"


@pytest.fixture(scope="session")
def apart_shards_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """Shards of three sources, packed by source in several files each."""
    from corpus.config import ShardConfig
    from corpus.documents.parts import DocumentWriter, make_document
    from corpus.shard import shard

    words = np.random.default_rng(5)
    texts = {
        "letters": ["".join(words.choice(list("abcdefgh"), 12)) for _ in range(300)],
        "numbers": [" ".join(map(str, words.integers(0, 1000, 4))) for _ in range(200)],
        "sentences": [f"Sort the list {number}." for number in range(200)],
    }
    folder = tmp_path_factory.mktemp("apart")
    with DocumentWriter(folder / "documents") as writer:
        for source, those in texts.items():
            for number, text in enumerate(those):
                writer.write(make_document(text, f"{source}/{number}.txt"))
    (folder / "shard").mkdir()
    config = ShardConfig(sequence_length=SEQUENCE_LENGTH, shard_mb=0.002, heldout_share=0.1, by_source=True)
    run = Run(folder / "work", LaunchConfig(device="cpu", threads=1))
    shard(config, {"documents": folder, "tokenizer": tokenizer_dir}, folder / "shard", run)
    return folder / "shard"


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """An untrained Llama of two layers with the tokenizer beside it."""
    from training.checkpoint.export import export
    from training.config import ModelConfig
    from training.model.models import build, hf_config

    config = ModelConfig(family="llama", layers=2, width=32, heads=2, positions=128)
    folder = tmp_path_factory.mktemp("base")
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    export(build(hf_config(config, 320, special), seed=3), tokenizer_dir, folder)
    return folder


def _pairs() -> list[dict[str, str]]:
    """Every verb with every noun, mixed: held-out pairs are new combinations of known words."""
    rows = [
        {
            "id": f"{verb}-{noun}",
            "prompt": f"What does {verb}_{noun} do?",
            "response": f"{start} {noun}.",
            "source": "test",
        }
        for verb, start in VERBS.items()
        for noun in NOUNS
    ]
    random.Random(4).shuffle(rows)
    return rows


@pytest.fixture(scope="session")
def instructions_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instructions")
    rows = _pairs()
    write_rows(folder / "train.jsonl", rows[8:])
    write_rows(folder / "heldout.jsonl", rows[:8])
    return folder


@pytest.fixture(scope="session")
def preferences_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The true answer against one that is always about a banana, so that a small model can tell."""
    folder = tmp_path_factory.mktemp("preferences")
    rows = [
        {
            "id": row["id"],
            "prompt": row["prompt"],
            "chosen": row["response"],
            "rejected": "Peel the banana.",
            "source": "test",
        }
        for row in _pairs()
    ]
    write_rows(folder / "train.jsonl", rows[8:])
    write_rows(folder / "heldout.jsonl", rows[:8])
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


@pytest.fixture
def weights() -> Callable[[Path], dict[str, torch.Tensor]]:
    """The tensors of a model folder."""
    from safetensors.torch import load_file

    return lambda folder: load_file(folder / "model.safetensors")
