"""The balancing loss of a mixture of experts: transformers' own, with its gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.training.model.test_families import CPU, LENGTH, SPECIAL, tokens_of_two_rows, values_of_family
from training.config import ModelConfig
from training.config.families import FAMILIES
from training.distributed.expert_parallel import IdleExperts, expert_layers, reach_every_expert
from training.model.balancing import balancing_loss, router_sums
from training.model.blocks import checkpoint_activations
from training.model.models import build, hf_config
from training.objectives.causal import next_token_batch
from training.train_modules.language_model import LanguageModel

EXPERTS: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("k", [1, 3])
def test_it_is_transformers_function_and_counts_the_tokens_of_each_expert(k: int) -> None:
    """transformers adds tokens up layer by layer, and rounds as often."""
    torch.manual_seed(k)
    logits = tuple(torch.randn(2 * LENGTH, 5) + torch.arange(5) for _ in range(3))
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    seen[1, 9:] = 0
    loss, chosen = balancing_loss(router_sums(logits, k, seen.flatten()), k, seen.sum())
    expected = load_balancing_loss_func(logits, 5, k, seen)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for layer, found in zip(logits, chosen, strict=True):
        choices = layer[seen.flatten().bool()].topk(k).indices
        assert found.tolist() == torch.bincount(choices.flatten(), minlength=5).tolist()
    even, _ = balancing_loss(router_sums((torch.eye(5).repeat(4, 1) * 50,), 1, torch.ones(20)), 1, 20)
    assert float(even) == pytest.approx(1.0)


def _gradient_of(theirs: Any, key: str) -> torch.Tensor:
    """The gradient of a weight of ours in a network whose experts' weights are stacked."""
    expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", key)
    if not expert:
        return theirs.get_parameter(key).grad
    layer, number = theirs.get_submodule(expert[1]), int(expert[2])
    if expert[3] in ("down_proj", "w2"):
        return layer.down_proj.grad[number]
    gate, up = layer.gate_up_proj.grad[number].chunk(2)
    return gate if expert[3] in ("gate_proj", "w1") else up


@pytest.mark.parametrize(("name", "idle"), [("mixtral", False), ("olmoe", True)])
def test_experts_without_tokens_are_trained_as_before_their_weights_were_stacked(name: str, idle: bool) -> None:
    """In one process and in ranks."""
    network = build(hf_config(ModelConfig(transformers=values_of_family(name)), 320, SPECIAL), 1)
    experts = expert_layers(network)[0].experts
    unchosen = list(experts[1].parameters())

    def backward() -> None:
        tokens = torch.randn(4, network.config.hidden_size)
        experts(tokens, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)).sum().backward()

    backward()
    assert all(weight.grad.any() for weight in experts[0].parameters())
    assert all((weight.grad is not None) == idle for weight in unchosen)
    reach_every_expert(network)
    backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in unchosen)
    state: Any = None
    IdleExperts(network).after_train_batch(state)
    assert all((weight.grad is not None) == idle for weight in unchosen)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.router])
def test_loss_and_gradients_are_those_of_transformers_with_its_router_logits(
    name: str, recompute: str, tmp_path: Path
) -> None:
    """On packed sequences, and where rows end in padding that is not counted. Theirs has read the file of ours, and has
    the weights of a layer's experts in one."""
    values = ModelConfig(transformers=values_of_family(name))
    ours = build(hf_config(values, 320, SPECIAL), 1, "plain", 0.2)
    ours.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).train()
    for network in (ours, theirs):
        network.set_attn_implementation("eager")
    model = LanguageModel(ours, CPU)
    checkpoint_activations(model, recompute)
    tokens = tokens_of_two_rows()
    plain, padded = next_token_batch(tokens), next_token_batch(tokens)
    padded["labels"][0, 14:] = -100
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    seen[0, 15:] = 0
    for batch, mask in ((plain, torch.ones_like(seen)), (padded, seen)):
        given = torch.from_numpy(tokens).masked_fill(mask == 0, -100)
        told = theirs(
            torch.from_numpy(tokens), attention_mask=mask, labels=given, output_router_logits=True, use_cache=False
        )
        loss = model.loss(model(batch), batch)
        torch.testing.assert_close(loss, told.loss, rtol=1e-5, atol=1e-5)
        assert float(told.aux_loss.detach()) > 0.1
        for one in (told.loss, loss):
            one.backward()
        for key, weight in ours.named_parameters():
            found = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(found, _gradient_of(theirs, key), rtol=1e-5, atol=1e-5)
        # The check can fail: the routers learn from the balancing loss.
        router = next(key for key, _ in theirs.named_parameters() if key.endswith("gate.weight"))
        (with_it,) = torch.autograd.grad(model.loss(model(batch), batch), ours.get_parameter(router))
        ours.config.router_aux_loss_coef = 0.0
        (without,) = torch.autograd.grad(model.loss(model(batch), batch), ours.get_parameter(router))
        ours.config.router_aux_loss_coef = theirs.config.router_aux_loss_coef
        assert float((with_it - without).abs().max()) > 1e-3
        with torch.no_grad():
            counted = model.losses(batch).sum() / (batch["labels"] != -100).sum()
        assert float(counted) == pytest.approx(float(told.loss.detach() - 0.5 * told.aux_loss.detach()), rel=1e-4)
        for network in (ours, theirs):
            network.zero_grad()
