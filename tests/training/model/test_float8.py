"""`launch.precision: fp8`, whose products are emulated on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import pretrain_in_ranks
from tests.training.distributed.layouts import Told, Weights, assert_alike
from tests.training.distributed.test_groups_of_ranks import SETTINGS
from training.config import ModelConfig, PretrainConfig
from training.model.float8 import train_in_float8
from training.model.models import build, hf_config
from training.pretrain import pretrain

pytest.importorskip("torchao")
CPU = torch.device("cpu")
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LEARNT: dict[str, Any] = SETTINGS | {"duration": "40 batches", "evaluate_every": "20 batches"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 24))])

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.layers[0][0](given)  # type: ignore[index]
        return found


def _rounded(numbers: Tensor, to: torch.dtype) -> Tensor:
    """Scaled so that the largest is the type's largest, rounded, and scaled back."""
    scale = torch.finfo(to).max / numbers.abs().max()
    return (numbers * scale).to(to).float() / scale


def test_products_are_of_numbers_that_were_rounded_to_8_bits() -> None:
    torch.manual_seed(3)
    model = Layer()
    given = torch.randn(2, 5, 32, requires_grad=True)
    upstream = torch.randn(2, 5, 48)
    weight, bias = (one.detach().clone() for one in model.layers[0][0].parameters())  # type: ignore[index]
    assert train_in_float8(model, CPU) == 1, "24 is no multiple of 16"
    out = model(given)
    out.backward(upstream)
    inputs, matrix = (_rounded(one.detach(), torch.float8_e4m3fn) for one in (given, weight))
    gradient = _rounded(upstream, torch.float8_e5m2)
    learnt = model.layers[0][0]  # type: ignore[index]
    for ours, theirs in (
        (out, inputs @ matrix.T + bias),
        (given.grad, gradient @ matrix),
        (learnt.weight.grad, torch.einsum("bto,bti->oi", gradient, inputs)),
        (learnt.bias.grad, upstream.sum((0, 1))),
    ):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out, given @ weight.T + bias, rtol=1e-3, atol=1e-3)
    measured = model.eval()(given)
    torch.testing.assert_close(measured, given @ weight.T + bias)


def _train(inputs: dict[str, Path], out: Path, journal: Any, until: int | None = None, **launch: Any) -> dict[str, Any]:
    journal.lines.clear()
    run = Run(
        out.with_suffix(".work"),
        LaunchConfig(**{"device": "cpu", "threads": 1, **launch}),
        journal=journal,
        is_cancelled=lambda: until is not None and len(journal.metric("train/loss")) >= until,
    )
    return dict(pretrain(PretrainConfig.model_validate(LEARNT), inputs, out, run).figures)


@pytest.fixture(scope="module")
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def test_a_training_learns_as_in_full_precision_and_leaves_a_model_like_any(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, weights: Weights
) -> None:
    plain = _train(inputs, tmp_path / "plain", journal, precision="fp32")
    ours = _train(inputs, tmp_path / "fp8", journal, precision="fp8")
    assert any("linear layers train in FP8, emulated" in said for said in journal.events())
    assert ours["validation_loss"] == pytest.approx(plain["validation_loss"], rel=0.02)
    found, expected = (weights(tmp_path / name) for name in ("fp8", "plain"))
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in expected.items()}
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], expected["model.layers.0.mlp.up_proj.weight"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8")
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_model_without_fitting_layers_is_refused() -> None:
    values = {"family": "llama", "layers": 1, "width": 24, "heads": 2, "mlp_width": 40, "positions": 32}
    network = build(hf_config(ModelConfig.model_validate(values), 320, SPECIAL), 1, "plain", 0.2)
    with pytest.raises(StageError, match="multiples of 16"):
        train_in_float8(network, CPU)


def test_a_mixture_s_experts_and_routers_stay_out() -> None:
    values = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    network = build(hf_config(ModelConfig(transformers=values | sizes), 320, SPECIAL), 1, "plain", 0.2)
    assert train_in_float8(network, CPU) == 4, "queries, keys, values and what attention gives"


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(StageError, match="torchao is not installed"):
        train_in_float8(Layer(), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert [one.path for one in LaunchConfig(precision="fp8").missing_packages()] == ["launch.precision"]


def test_ranks_that_share_layers_or_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="expected with precision: fp8 tensor_parallel: 1"):
        LaunchConfig.model_validate({"precision": "fp8", "tensor_parallel": 2, "processes": 2, "trainer": "native"})


@pytest.mark.long
def test_it_goes_on_to_the_bit_under_either_loop(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, weights: Weights
) -> None:
    """The risk: something of FP8 that a checkpoint does not hold, or that one of the loops does otherwise."""
    _train(inputs, tmp_path / "whole", journal, precision="fp8")
    with pytest.raises(Cancelled):
        _train(inputs, tmp_path / "parts", journal, until=9, precision="fp8", trainer="native")
    _train(inputs, tmp_path / "parts", journal, precision="fp8", trainer="native")
    whole, parts = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "launch"),
    [
        (2, {"sharding": "ddp"}),
        (2, {"sharding": "zero1"}),
        (2, {"sharding": "zero2"}),
        (2, {"sharding": "fsdp"}),
        (2, {"sharding": "fsdp", "recompute": "selective"}),
        (2, {"sharding": "fsdp", "offload": True}),
        (4, {"sharding": "hsdp", "shard_ranks": 2}),
    ],
)
def test_ranks_learn_as_one_process_does(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, ranks: int, launch: dict[str, Any]
) -> None:
    """The risk: weights that are sharded, or layers that are computed again, under layers of another class. Each rank
    scales its own tokens, so losses agree to what 8 bits leave."""
    ways = {"one": (1, {}), "ranks": (ranks, launch)}

    def train(way: str, out: Path) -> Told:
        count, given = ways[way]
        return pretrain_in_ranks(count, SETTINGS, inputs, out, launch={"precision": "fp8", **given})

    assert_alike(train, "ranks", tmp_path, weights, 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that multiplies in FP8")
def test_a_gpu_s_products_are_those_that_are_emulated() -> None:
    gpu = torch.device("cuda")
    if torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("needs a GPU that multiplies in FP8")
    results = []
    for device in (CPU, gpu):
        torch.manual_seed(3)
        model, given = Layer(), torch.randn(2, 16, 32)
        model.to(device)
        train_in_float8(model, device)
        model(given.to(device)).square().sum().backward()
        results.append(model.layers[0][0].weight.grad.cpu())  # type: ignore[index]
    torch.testing.assert_close(results[1], results[0], rtol=0.1, atol=0.1)
