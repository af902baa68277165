"""Frozen weights in 4 bits under adapters: the numbers of the references, and an SFT near that of plain adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evaluation.release.adapters import export_adapters
from evaluation.results.artifacts import Artifact
from infra.launch.config import LaunchConfig
from infra.run import Run
from infra.store.measurements import TRAINED
from tests.training.adapters.test_lora import SETTINGS
from training.config import LoraConfig, SftConfig
from training.model.lora import add_adapters
from training.model.models import load
from training.model.nf4 import Nf4Linear, quantize_frozen
from training.sft import measure_trained, sft

Q_LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "quantize": "nf4"}


def layer(inputs: int = 256, outputs: int = 128, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def test_codes_are_torchao_s_but_at_the_bounds_and_a_weight_takes_less_than_4_2_bits() -> None:
    reference = pytest.importorskip("torchao.quantization")
    if not hasattr(reference, "to_nf4"):
        reference = pytest.importorskip("torchao.dtypes")  # where torchao 0.17 has it
    plain = layer()
    quantized, expected = Nf4Linear(plain), reference.to_nf4(plain.weight.detach(), 64, 256)
    # torchao takes the nearest value with the scale in 8 bits, bitsandbytes and this project with the scale itself.
    assert float((quantized.codes == expected.quantized_data).float().mean()) > 0.999
    dense = quantized.dense(torch.float32)
    assert float((dense - expected.to(torch.float32)).abs().mean() / plain.weight.abs().mean()) < 1e-3
    stored = sum(part.numel() * part.element_size() for part in quantized.buffers())
    assert stored * 8 < 4.2 * plain.weight.numel()
    assert float((dense - plain.weight).abs().mean() / plain.weight.abs().mean()) < 0.09


def test_outputs_and_gradients_are_those_of_the_dense_weight() -> None:
    """The numbers of rows and of weights are not whole blocks, and a block of zeros has no scale."""
    plain = layer(40, 7, bias=True)
    plain.weight[:3] = 0
    quantized = Nf4Linear(plain)
    weight = quantized.dense(torch.float32)
    assert not weight[:1].any()
    inputs = torch.randn(2, 5, 40, requires_grad=True)
    quantized(inputs).square().sum().backward()
    gradient, inputs.grad = inputs.grad, None
    nn.functional.linear(inputs, weight, plain.bias).square().sum().backward()
    torch.testing.assert_close(gradient, inputs.grad)


def test_backward_keeps_no_dense_weight() -> None:
    quantized, kept = Nf4Linear(layer()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()), lambda _: None):
        quantized(torch.randn(1, 256, requires_grad=True))
    assert not any(size >= 256 * 128 for size in kept)


LAUNCH = LaunchConfig(device="cpu", threads=1, precision="fp32")


@pytest.mark.usefixtures("loaded_by_a_fork")
def test_sft_learns_beside_weights_in_4_bits_and_leaves_a_model_like_any_other(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, weights: Any
) -> None:
    """The base model is measured in 4 bits too, and again from its adapters after the training."""
    inputs = {"model": base_dir, "instructions": instructions_dir}
    config = SftConfig.model_validate(SETTINGS | {"lora": Q_LORA})
    result = sft(config, inputs, tmp_path / "sft", Run(tmp_path / "work", LAUNCH))
    assert result.figures["improvement_low"] > 0.1

    again = measure_trained(config, inputs | {TRAINED: tmp_path / "sft"}, tmp_path / "again", Run(tmp_path, LAUNCH))
    assert again.figures["heldout_loss_base"] == result.figures["heldout_loss_base"]
    assert again.figures["heldout_loss_sft"] == pytest.approx(result.figures["heldout_loss_sft"], rel=1e-5)

    before, after = weights(base_dir), weights(tmp_path / "sft")
    assert before.keys() == after.keys()
    norms = {name for name in before if "norm" in name or "embed" in name}
    assert all(torch.equal(before[name], after[name]) for name in norms)
    settings_file = tmp_path / "sft" / "aux" / "adapters" / "settings.json"
    assert json.loads(settings_file.read_text())["r"] == 4


@pytest.mark.long
def test_sft_learns_as_with_plain_adapters_and_its_adapters_go_to_peft(
    base_dir: Path, instructions_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the adapters are tried with PEFT")
    inputs = {"model": base_dir, "instructions": instructions_dir}
    results = {}
    for name, lora in {"plain": {**Q_LORA, "quantize": None}, "nf4": Q_LORA}.items():
        config = SftConfig.model_validate(SETTINGS | {"duration": "20 batches", "lora": lora})
        results[name] = sft(config, inputs, tmp_path / name, Run(tmp_path / f"{name}.work", LAUNCH)).figures
    for name in ("heldout_loss_base", "heldout_loss_sft"):
        assert 0 < abs(results["nf4"][name] - results["plain"][name]) < 0.05
    assert results["nf4"]["improvement_low"] > 0.2
    loaded = export_adapters(Artifact("sft", tmp_path / "nf4", None), "", tmp_path / "hub", str(base_dir))
    assert loaded.checks[-1] == "merge_and_unload()"


def test_all_linear_layers_but_the_output_layer_are_in_4_bits(base_dir: Path) -> None:
    network = load(base_dir)
    before = sum(weight.numel() for name, weight in network.named_parameters() if "_proj" in name)
    assert quantize_frozen(network) == before
    assert not [name for name, _ in network.named_parameters() if "_proj" in name]
    assert isinstance(network.get_output_embeddings(), nn.Linear)
    learning = add_adapters(network, LoraConfig(rank=2, quantize="nf4"), seed=1)
    assert learning == sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
