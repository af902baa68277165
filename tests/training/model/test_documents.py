"""Attention in packed sequences stays within documents: shown on gradients and against each document alone."""

from __future__ import annotations

from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from training.config import ModelConfig
from training.core.hardware import Hardware
from training.model.attention import CAUSAL_BLOCKS, causal_blocks
from training.model.documents import document_numbers, positions_within, within_documents
from training.model.models import build, hf_config
from training.objectives.causal import next_token_batch
from training.train_modules.language_model import LanguageModel

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
END = 0
# Texts of 5, 1, 7 and 4 tokens and the beginning of one more, each but the last with its <|endoftext|>.
TEXTS = [5, 1, 7, 4]
LENGTH = 24
STARTS = np.array([0, 6, 8, 16, 21])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "positions": 64},
    "gpt2": {"family": "gpt2", "layers": 2, "width": 32, "heads": 4, "positions": 64},
    "mistral": {"transformers": {"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 2,
                                 "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}},
}  # fmt: skip


def _model(name: str, attention: str, *, bf16: bool = False) -> LanguageModel:
    network = build(hf_config(ModelConfig(**MODELS[name]), 320, SPECIAL), seed=1)
    network.set_attn_implementation(attention)
    return LanguageModel(network, Hardware(torch.device("cpu"), bf16)).eval()


KERNELS = ["eager", "sdpa", CAUSAL_BLOCKS]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of a test have several."""
    monkeypatch.setattr("training.model.attention._BLOCK", 7)


def _tokens() -> np.ndarray[Any, np.dtype[np.int64]]:
    tokens = np.random.default_rng(3).integers(4, 320, LENGTH)
    tokens[STARTS[1:] - 1] = END
    return tokens


def _spans() -> list[slice]:
    """Each document with the <|endoftext|> that it begins with, which ends the one before."""
    begins = [0, *(STARTS[1:] - 1)]
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True)]


def test_a_document_begins_with_the_end_of_the_one_before() -> None:
    numbers = document_numbers([np.array([0, 3, 4, 7]), np.array([0, 1])], 8)
    assert numbers.tolist() == [[0, 0, 1, 2, 2, 2, 3, 3], [0] * 8]
    assert positions_within(numbers).tolist() == [[0, 1, 0, 0, 1, 2, 0, 1], list(range(8))]


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_a_document_s_loss_has_no_gradient_in_another_document(name: str, attention: str) -> None:
    model = _model(name, attention, bf16=True)
    batch = next_token_batch(_tokens()[None], [STARTS])
    embedded: list[torch.Tensor] = []

    def remember(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.model.get_input_embeddings().register_forward_hook(remember)
    for span in _spans():
        embedded.clear()
        labels = torch.full_like(batch["labels"], -100)
        labels[:, span] = batch["labels"][:, span]
        model.loss(model(batch), batch | {"labels": labels}).backward()
        (gradient,) = embedded[0].grad  # type: ignore[misc]
        moved = gradient.abs().sum(1) > 0
        inside = torch.zeros(LENGTH, dtype=torch.bool)
        inside[span] = True
        if span.stop == LENGTH:
            inside[-1] = False  # the last token of a sequence has no label
        assert torch.equal(moved, inside)


@pytest.mark.parametrize(("name", "attention"), list(product(MODELS, KERNELS)))
def test_packed_logits_are_those_of_each_document_alone(name: str, attention: str) -> None:
    model = _model(name, attention)
    tokens = _tokens()
    alone = _model(name, "eager").model
    with torch.no_grad():
        hidden = model(next_token_batch(np.stack([tokens, tokens]), [STARTS, STARTS]))
        packed = model.model.get_output_embeddings()(hidden)
        for span in _spans():
            expected = alone(torch.from_numpy(tokens[span])[None]).logits[0]
            for row in packed:
                torch.testing.assert_close(row[span], expected, rtol=1e-4, atol=1e-5)


def test_the_mask_is_the_one_that_transformers_takes_from_positions() -> None:
    from transformers.masking_utils import create_causal_mask

    documents = document_numbers([STARTS, np.array([0])], LENGTH)
    config = hf_config(ModelConfig(**MODELS["llama"]), 320, SPECIAL)
    config._attn_implementation = "sdpa"
    # Named differently by version 4 of transformers, which wants the positions in the cache too, and by version 5.
    embedded = torch.zeros(2, LENGTH, 32)
    either = {"input_embeds": embedded, "inputs_embeds": embedded, "cache_position": torch.arange(LENGTH)}
    theirs = create_causal_mask(
        config=config,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions_within(documents),
        **{name: value for name, value in either.items() if name in signature(create_causal_mask).parameters},
    )
    assert torch.equal(within_documents(documents), theirs)


@pytest.mark.parametrize("queries", [1, 9, 24])
def test_attention_in_blocks_is_torch_s(queries: int) -> None:
    """With keys and values shared by heads; fewer queries than keys are the last ones, as in generation."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 8)
    visible = torch.ones(24, 24, dtype=torch.bool).tril()[-queries:]
    theirs = scaled_dot_product_attention(query, key, value, visible, scale=0.3, enable_gqa=True).transpose(1, 2)
    mask = torch.zeros(2, 1, queries, 24).masked_fill_(~visible, torch.finfo(torch.float32).min)
    found, _ = causal_blocks(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, theirs)
