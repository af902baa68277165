"""Text for open models: documents end and begin as the model has read them, in shards, training and examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus.config import ShardConfig, ValidateConfig
from corpus.documents.parts import DocumentWriter, make_document
from corpus.shard import shard
from corpus.tokens.encode import bounds_of, load_tokenizer
from corpus.validate import validate
from evaluation.safety.packed_documents import Split
from flows.config.read import parse
from infra.errors import ConfigError, StageError
from infra.io.json import read_own_json
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.open_models import SENTENCES, save_model, tokenizer_of
from training.adopt import import_model
from training.config import BaseModelConfig, PretrainConfig
from training.model.documents import document_numbers
from training.pretrain import pretrain
from training.train_modules.mixed_text import text_examples

LENGTH = 64


def run_in(folder: Path) -> Run:
    return Run(folder, LaunchConfig(device="cpu", threads=1, trainer="native"))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    with DocumentWriter(folder / "documents") as writer:
        for number in range(120):
            writer.write(make_document(f"Note {number}. {SENTENCES[number]}", f"{number}.txt"))
    return folder


def shards_of(documents: Path, tokenizer: Path, out: Path, **settings: Any) -> Path:
    out.mkdir()
    inputs = {"documents": documents, "tokenizer": tokenizer}
    shard(ShardConfig(sequence_length=LENGTH, heldout_share=0.2, **settings), inputs, out, run_in(out / "work"))
    return out


@pytest.mark.parametrize(
    ("family", "settings", "end", "begin"),
    [
        ("llama3", {}, "<|end_of_text|>", "<|begin_of_text|>"),
        ("llama3-instruct", {}, "<|end_of_text|>", "<|begin_of_text|>"),
        ("mistral", {}, "</s>", "<s>"),
        ("gemma", {}, "<eos>", "<bos>"),
        ("qwen", {}, "<|endoftext|>", None),
        ("quiet", {}, "</s>", None),
        ("quiet", {"begin_of_text": "<s>"}, "</s>", "<s>"),
        ("llama3", {"end_of_text": "<|eot_id|>", "begin_of_text": ""}, "<|eot_id|>", None),
    ],
)
def test_documents_end_and_begin_as_the_model_has_read_them(
    documents: Path, tmp_path: Path, family: str, settings: dict[str, str], end: str, begin: str | None
) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    shards = shards_of(documents, tmp_path / "tokenizer", tmp_path / "shards", **settings)
    closing = tokenizer.convert_tokens_to_ids(end)
    opening = None if begin is None else tokenizer.convert_tokens_to_ids(begin)
    meta = read_own_json(shards / "meta.json")
    assert meta["end_of_text_id"] == closing and meta.get("begin_of_text_id") == opening
    split = Split(shards / "train", tmp_path / "work")
    read = list(split.read(np.arange(len(split))))
    stream = np.concatenate([tokens for tokens, _ in read]).tolist()
    if not settings and family != "llama3-instruct":
        in_front = tokenizer("a").input_ids[:1]
        assert (in_front == [opening]) == (opening is not None), "as transformers puts it in front of a text"
    known = {f"Note {number}. {SENTENCES[number]}" for number in range(120)}
    pieces = np.split(np.array(stream), np.flatnonzero(np.array(stream) == closing) + 1)[1:-1]
    assert len(pieces) > 50
    for piece in pieces:
        text = piece[:-1] if opening is None else piece[1:-1]
        assert opening is None or piece[0] == opening
        assert tokenizer.decode(text) in known
    checked = 0
    for tokens, starts in read:
        numbers = document_numbers([starts], LENGTH)[0].tolist()
        for at in range(1, LENGTH):
            if opening is None:
                begins = tokens[at] == closing and at < LENGTH - 1
            else:
                begins = tokens[at] == opening and at < LENGTH - 1
            assert (numbers[at] != numbers[at - 1]) == begins
            checked += begins
    assert checked > 50
    (tmp_path / "verdict").mkdir()
    validate(ValidateConfig(), {"data": shards}, tmp_path / "verdict", run_in(tmp_path / "validate"))
    examples = text_examples(shards, 20, 40, 1, run_in(tmp_path / "examples"), tokenizer=tokenizer)
    for one in examples:
        assert opening is None or (one.ids.count(opening) <= 1 and opening not in one.response)
    assert opening is None or sum(one.prompt == [opening] for one in examples) > 10


def test_pretraining_of_an_open_model_goes_on(documents: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "llama", tokenizer_of("llama3"))
    (tmp_path / "base").mkdir()
    import_model(BaseModelConfig(path=str(tmp_path / "llama")), {}, tmp_path / "base", run_in(tmp_path / "work"))
    shards = shards_of(documents, tmp_path / "base", tmp_path / "shards")
    (tmp_path / "more").mkdir()
    inputs = {"model": tmp_path / "base", "shards": shards, "tokenizer": tmp_path / "base"}
    settings = {
        "duration": "10 batches", "global_batch_tokens": 8 * LENGTH, "optimizer": {"learning_rate": 1.0e-3},
        "evaluate_tokens": 512,
    }  # fmt: skip
    result = pretrain(PretrainConfig.model_validate(settings), inputs, tmp_path / "more", run_in(tmp_path / "train"))
    assert result.figures["validation_loss"] < 5.6


def test_a_tokenizer_without_an_end_is_refused_before_anything_runs(documents: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("quiet", tokens=["<s>", "<unk>"])
    save_model(tmp_path / "model", tokenizer)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = tmp_path / "model" / name
        if path.exists():
            path.write_text("{}")
    config = {
        "name": "continued",
        "ingest": {"read": [{"kind": "docstrings"}]},
        "base_model": {"path": str(tmp_path / "model")},
        "steps": {"packed": {"uses": "shard", "inputs": {"documents": "ingest", "tokenizer": "base_model"}}},
    }
    with pytest.raises(ConfigError) as caught:
        parse(config)
    [problem] = caught.value.problems
    assert problem.code == "no_end_of_text" and problem.path == "steps.packed.end_of_text"
    assert "shard.end_of_text" in problem.fix
    named = config["steps"] | {"packed": config["steps"]["packed"] | {"end_of_text": "<s>"}}  # type: ignore[operator]
    parse(config | {"steps": named})
    tokenizer_json = load_tokenizer(tmp_path / "model")
    with pytest.raises(StageError, match="expected the token <e> to end documents with"):
        bounds_of(tokenizer_json, tmp_path / "model", "<e>")
    with pytest.raises(StageError, match="expected the token <b> to begin documents with"):
        bounds_of(tokenizer_json, tmp_path / "model", "<s>", "<b>")
