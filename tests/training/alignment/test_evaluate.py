"""Losses by source, and what a look at a model in training tells."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from infra.run import Run
from training.config import ModelConfig, PretrainConfig
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.core.train_state import Clock
from training.data.open_shards import OpenShards
from training.model.documents import Packed
from training.model.models import build, hf_config, load
from training.objectives.causal import Causal
from training.pretrain import pretrain
from training.train_modules.language_model import LanguageModel
from training.validation.evaluate import Side, bits_per_byte, losses_by_source, sides, token_losses
from training.validation.in_loop import SAMPLES, InLoopEvaluator

CPU = Hardware(torch.device("cpu"), bf16=False)
META = {
    "sources": {
        "web": {"id": 0, "validation": {"tokens": 12, "bytes": 30}},
        "books": {"id": 2, "validation": {"tokens": 4, "bytes": 20}},
        "empty": {"id": 1, "validation": {"tokens": 0, "bytes": 0}},
    }
}


def test_each_token_counts_for_the_source_of_its_document() -> None:
    model = LanguageModel(
        build(hf_config(ModelConfig(family="llama", layers=1, width=16, heads=2, positions=8), 50, {}), 0), CPU
    )
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8))
    packed = Packed(tokens, (np.array([0, 5]), np.array([0])), (np.array([0, 2]), np.array([0])))
    losses = token_losses(model, packed, Causal(0, within_documents=False))
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(tokens)).logits[:, :-1]
    expected = cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:]).flatten(), reduction="none")
    expected = expected.view(2, 7).double().numpy()
    found = losses_by_source(losses, packed, sides(META))
    # The label at position 4 is the first token of the document that begins at 5.
    books = expected[0, 4:]
    web = np.concatenate([expected[0, :4], expected[1]])
    assert found == {"web": pytest.approx(web.mean(), rel=1e-4), "books": pytest.approx(books.mean(), rel=1e-4)}


def test_bits_per_byte_of_a_source_uses_its_own_bytes() -> None:
    assert sides(META) == [Side("web", 0, 2.5), Side("books", 2, 5.0)]
    assert bits_per_byte(math.log(2) * 5, 5.0) == pytest.approx(1.0)


@pytest.mark.long
def test_a_training_on_several_sources_tells_each_one_s_bits_per_byte(
    mixed_shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    """Against transformers' own forward pass of the exported model, and the bytes of the decoded text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = PretrainConfig.model_validate(
        {
            "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
            "attention": "sequence",
            "duration": "40 batches",
            "global_batch_tokens": 256,
            "optimizer": {"learning_rate": 1.0e-2},
            "evaluate_every": "20 batches",
        }
    )
    inputs = {"shards": mixed_shards_dir, "tokenizer": tokenizer_dir}
    figures = pretrain(config, inputs, tmp_path / "model", run).figures
    names = {
        found["id"]: name for name, found in json.loads((mixed_shards_dir / "meta.json").read_text())["sources"].items()
    }
    assert sorted(names.values()) == ["letters", "numbers", "sentences"]

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    nats, counts, tokens = Counter[str](), Counter[str](), Counter[str]()
    sizes = Counter[str]()
    with OpenShards(mixed_shards_dir, run) as shards:
        packed = shards.read(shards.validation, range(shards.validation.sequences), with_sources=True)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(packed.tokens)).logits.double()
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), torch.from_numpy(packed.tokens[:, 1:]), reduction="none")
    for row, starts, sources, loss in zip(packed.tokens, packed.starts, packed.sources, losses, strict=True):
        for begin, end, source in zip(starts, [*starts[1:], len(row)], sources, strict=True):
            name = names[int(source)]
            tokens[name] += int(end - begin)
            sizes[name] += len(tokenizer.decode(row[begin:end], skip_special_tokens=True).encode())
            counts[name] += int(end - max(begin, 1))
            nats[name] += float(loss[max(begin, 1) - 1 : end - 1].sum())
    expected = {name: nats[name] / counts[name] / math.log(2) / (sizes[name] / tokens[name]) for name in tokens}
    assert expected["sentences"] < expected["numbers"], "sources that differ, so that mixing them up would show"
    for name, value in expected.items():
        assert figures[f"bits_per_byte_{name}"] == pytest.approx(value, rel=1e-3)
        told = journal.metric(f"validation/sample_bits_per_byte/{name}")
        assert len(told) == 2 and told[1] < told[0]
        assert told[1] == pytest.approx(value, rel=1e-3)


def test_measuring_leaves_every_random_state_as_it_was() -> None:
    import random

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with measuring(model):
        draws()
        assert not model.training
    assert draws() == expected
    assert model.training


def test_a_look_takes_benchmarks_and_samples(base_dir: Path, run: Run, journal: Any) -> None:
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    config = PretrainConfig.model_validate(
        {"evaluate_tasks": ["minimal_pairs"], "evaluate_limit": 6, "sample_prompts": ["Sort the "], "sample_tokens": 4}
    )
    look = InLoopEvaluator(load(base_dir), AutoTokenizer.from_pretrained(base_dir), config, 10, CPU, run)
    for batch in (10, 15, 20):
        state: Any = SimpleNamespace(clock=Clock(batch=batch))
        look.batch_end(state)
    scores = journal.metric("benchmarks/minimal_pairs/acc")
    assert len(scores) == 2 and scores[0] == scores[1]
    lines = (run.work_dir / SAMPLES).read_text().splitlines()
    assert [line.replace("20", "10") for line in lines] == [lines[0]] * 2
