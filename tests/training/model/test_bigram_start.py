"""A model that starts from bigrams and with induction heads: what it knows before its first batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from training.config import ModelConfig
from training.core.hardware import Hardware
from training.model.initial.bigrams import start_from_bigrams
from training.model.initial.induction import start_induction, unused_width
from training.model.models import build, hf_config
from training.model.ngram import Bigram

VOCABULARY, ROWS = 96, 90
SIZES = {"layers": 2, "width": 64, "heads": 2, "positions": 64, "mlp_width": 48, "tie_embeddings": False}


def _markov_text(seed: int, sequences: int) -> NDArray[np.int64]:
    """Sequences (B, 64) in which every token has a few likely successors."""
    random = np.random.default_rng(seed)
    table = np.random.default_rng(7).dirichlet(np.full(ROWS, 0.05), ROWS).cumsum(1)
    text = np.zeros((sequences, 64), np.int64)
    for place in range(1, 64):
        text[:, place] = (random.random((sequences, 1)) > table[text[:, place - 1]]).sum(1).clip(max=ROWS - 1)
    return text


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_before_its_first_batch_the_model_predicts_as_the_counts_do(family: str) -> None:
    counted, unseen = _markov_text(1, 1500), _markov_text(2, 100)
    bigram = Bigram([counted[:700], counted[700:]], ROWS, counted.size)
    model = build(
        # Rows beyond the tokenizer's ids, as vocab_multiple gives them.
        hf_config(ModelConfig(family=family, **SIZES), VOCABULARY, {}), 3, zero_residual=True
    )  # fmt: skip

    start_from_bigrams(model, bigram, Hardware(torch.device("cpu"), bf16=False), seed=3)

    with torch.no_grad():
        logits = model(torch.from_numpy(unseen)).logits
    loss = float(cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(unseen[:, 1:]).flatten()))
    assert loss < bigram.losses(unseen).mean() + 0.1
    assert torch.allclose(model.get_input_embeddings().weight.square().mean(1), torch.ones(VOCABULARY), atol=1e-3)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_look_where_they_are_said_to_and_the_model_says_what_it_said(kv_heads: int) -> None:
    sizes = {**SIZES, "width": 256, "heads": 4, "kv_heads": kv_heads, "positions": 128}
    model = build(hf_config(ModelConfig(family="qwen3", **sizes), VOCABULARY, {}), 3, zero_residual=True)
    text = _markov_text(1, 300)
    bigram = Bigram([text], ROWS, text.size)
    start_from_bigrams(model, bigram, Hardware(torch.device("cpu"), bf16=False), 3, unused_width(model))
    model.set_attn_implementation("eager")
    once = np.random.default_rng(4).permutation(ROWS)[:40]
    ids = torch.from_numpy(np.concatenate([once, once]))[None]
    with torch.no_grad():
        before = model(ids).logits
        start_induction(model, seed=3)
        found = model(ids, output_attentions=True)

    first, second = found.attentions[:2]
    for back in (1, 2, 3, 4):
        assert first[0, back - 1].diagonal(-back).min() > 0.9
    # The second time a token comes, the one after its first time is 39 places back.
    assert second[0, 0].diagonal(-39).mean() > 0.8
    # What is written beside the token's own entries makes the last norm divide all logits by a little more.
    ratio = (found.logits * before).sum(-1) / before.square().sum(-1)
    assert ratio.min() > 0.9
    assert ratio.max() <= 1.001
    assert torch.allclose(found.logits, ratio[..., None] * before, atol=1e-2)


def test_the_same_seed_gives_the_same_start() -> None:
    text = _markov_text(1, 200)
    weights = []
    for seed in (3, 3, 4):
        model = build(hf_config(ModelConfig(family="llama", **SIZES), VOCABULARY, {}), 3)
        bigram = Bigram([text], ROWS, text.size)
        start_from_bigrams(model, bigram, Hardware(torch.device("cpu"), bf16=True), seed)
        weights.append(model.get_output_embeddings().weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_shares_are_the_counted_ones() -> None:
    text = _markov_text(5, 40)
    dense = np.zeros((ROWS, VOCABULARY))
    np.add.at(dense, (text[:, :-1].ravel(), text[:, 1:].ravel()), 1)
    asked = np.array([ROWS - 1, 0, 17])
    assert np.allclose(Bigram([text], ROWS, text.size).shares(asked, VOCABULARY), (dense / dense.sum())[asked])


@pytest.mark.parametrize(
    "sizes",
    [{"family": "gpt2", **SIZES}, {"preset": "llama-4m"}, {"preset": "bert-nano"}],
    ids=["gpt2", "tied", "bert"],
)
def test_other_models_are_refused_at_check(sizes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="embedding_init: bigram only with llama or qwen3 and tie_embeddings: f"):
        ModelConfig.model_validate({**sizes, "embedding_init": "bigram"})
