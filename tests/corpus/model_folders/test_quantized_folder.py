"""Folders of quantized weights, MXFP4 and FP8: unquantized when loaded, refused where the parts do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
)

from corpus.model_folders.folder import folder_problems
from corpus.model_folders.pretrained import load_pretrained_model, weights_problems
from infra.errors import StageError
from tests.corpus.model_folders.damage import CPU, Weights, adopted, config, deepseek, edit, rewrite, without
from training.train_modules.scorer import load_scorer

EXPERTS = tuple(f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


@pytest.fixture
def mxfp4(folder: Path) -> Path:
    """A gpt-oss of one layer whose experts are stored as OpenAI stores them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(6)
    model = GptOssForCausalLM(
        GptOssConfig(vocab_size=6, eos_token_id=1, rope_scaling=None, **sizes, **experts, **heads)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})

    def quantized(weights: Weights) -> Weights:
        for name in EXPERTS:
            count, inputs, outputs = weights.pop(name).shape
            weights[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.randint(118, 124, (count, outputs, inputs // 32), dtype=torch.uint8)
        return weights

    rewrite(folder, quantized)
    return folder


def unquantized(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """By the specification of microscaling formats: E2M1 numbers, the lower 4 bits first, times a power of two."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    exponents, mantissas = (codes >> 1 & 3).astype(np.int32), (codes & 1) / 2
    sizes = np.where(exponents == 0, mantissas, (1 + mantissas) * 2.0 ** (exponents - 1))
    numbers = np.where(codes & 8, -sizes, sizes) * 2.0 ** (scales.astype(np.int32) - 127)[..., None]
    return numbers.reshape(*numbers.shape[:2], -1).transpose(0, 2, 1).astype(np.float32)


def test_experts_of_gpt_oss_in_mxfp4_are_unquantized(mxfp4: Path, tmp_path: Path) -> None:
    stored = load_file(mxfp4 / "model.safetensors")
    messages: list[str] = []
    model = load_pretrained_model(AutoModelForCausalLM, mxfp4, say=messages.append, dtype=torch.float32)
    assert messages == [f"{mxfp4}: weights in MXFP4 are turned into float32"]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    for name in EXPERTS:
        expected = unquantized(stored[f"{name}_blocks"].numpy(), stored[f"{name}_scales"].numpy())
        np.testing.assert_array_equal(model.get_parameter(name).numpy(force=True), expected)
    kept = load_file(adopted(mxfp4, tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(kept[name], model.get_parameter(name)) for name in EXPERTS)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("gate_up_proj_scales"), "missing: .*gate_up_proj; left over: .*gate_up_proj_blocks"),
        (without("down_proj_bias"), "missing: model.layers.0.mlp.experts.down_proj_bias"),
        (lambda folder: edit(folder, intermediate_size=96), r"gate_up_proj is \[2, 32, 128\], not \[2, 32, 192\]"),
    ],
    ids=["scales", "bias", "width"],
)
def test_quantized_experts_that_do_not_fit_are_refused(
    mxfp4: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(mxfp4)
    assert weights_problems(AutoModelForCausalLM, mxfp4, "")
    with pytest.raises(StageError, match=message):
        load_pretrained_model(AutoModelForCausalLM, mxfp4)


BLOCK = 16


def in_fp8(weights: Weights) -> Weights:
    """Matrices of the layers as DeepSeek stores them: E4M3 numbers, and what each block of them is multiplied by."""
    stored = dict(weights)
    for name, weight in weights.items():
        if weight.dim() != 2 or not name.endswith("proj.weight"):
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scales = torch.empty(rows, columns)
        numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                scales[row, column] = weight[part].abs().max() / 448
                numbers[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
        stored |= {name: numbers, f"{name}_scale_inv": scales}
    return stored


def fp8_settings(**changes: Any) -> dict[str, Any]:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK] * 2}
    return {"quantization_config": settings | changes}


@pytest.fixture
def fp8(folder: Path) -> Path:
    """A Llama in FP8 whose last blocks are smaller than the others."""
    torch.manual_seed(7)
    LlamaForCausalLM(config(hidden_size=24, intermediate_size=40)).save_pretrained(folder)
    rewrite(folder, in_fp8)
    edit(folder, **fp8_settings())
    return folder


def test_weights_in_fp8_are_unquantized(fp8: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    original = LlamaForCausalLM(config(hidden_size=24, intermediate_size=40)).eval()
    assert folder_problems(fp8, "", tokenizer=True) == weights_problems(AutoModelForCausalLM, fp8, "") == []
    messages: list[str] = []
    model = load_pretrained_model(AutoModelForCausalLM, fp8, say=messages.append, dtype=torch.float32).eval()
    assert messages == [f"{fp8}: weights in FP8 are turned into float32"]
    stored = load_file(fp8 / "model.safetensors")
    for name, weight in model.state_dict().items():
        ours, exact = weight.numpy(), original.get_parameter(name).numpy(force=True)
        if (scale := stored.get(f"{name}_scale_inv")) is None:
            np.testing.assert_array_equal(ours, exact)
            continue
        each = np.kron(scale.numpy(), np.ones((BLOCK, BLOCK), np.float32))[: ours.shape[0], : ours.shape[1]]
        np.testing.assert_array_equal(ours, stored[name].float().numpy() * each)
        # E4M3 has 4 bits of a number, and below 2^-6 steps of 2^-9.
        assert (np.abs(ours - exact) <= np.abs(exact) * 2**-4 * (1 + 1e-5) + each * 2**-10 * (1 + 1e-5)).all()
    ids = torch.tensor([[0, 2, 3, 5, 4, 1, 2]])
    with torch.inference_mode():
        ours, exact = model(ids).logits, original(ids).logits
    assert 0 < (ours - exact).abs().max() < 0.05 * exact.std()
    kept = load_file(adopted(fp8, tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(kept[name][:2], weight[:2]) for name, weight in model.state_dict().items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    drawn = load_scorer(fp8, CPU, seed=3).model.state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(drawn[name], model.state_dict()[name])


def test_experts_in_fp8_are_those_of_transformers(tmp_path: Path) -> None:
    """In whole blocks, for which transformers takes the scales as they are meant."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    torch.manual_seed(8)
    deepseek(tmp_path, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, **experts)
    edit(tmp_path, **fp8_settings())

    def whole_blocks(weights: Weights) -> Weights:
        quantized = in_fp8(weights)
        odd = [name for name, one in weights.items() if any(size % BLOCK for size in one.shape)]
        return {name: one for name, one in quantized.items() if name.removesuffix("_scale_inv") not in odd} | {
            name: weights[name] for name in odd
        }

    rewrite(tmp_path, whole_blocks)
    assert any("experts.3.down_proj.weight_scale_inv" in name for name in load_file(tmp_path / "model.safetensors"))
    ours = load_pretrained_model(AutoModelForCausalLM, tmp_path, dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("down_proj.weight_scale_inv"), "missing: model.layers.0.mlp.down_proj.weight_scale_inv, "),
        (without("layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (
            lambda folder: edit(folder, **fp8_settings(weight_block_size=[8, 16])),
            r"gate_proj.weight_scale_inv is \[3, 2\], not \[5, 2\]",
        ),
        (lambda folder: edit(folder, intermediate_size=48), r"down_proj.weight is \[24, 40\], not \[24, 48\]"),
    ],
    ids=["scales", "weight", "blocks", "width"],
)
def test_weights_in_fp8_that_do_not_fit_are_refused(fp8: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(fp8)
    [problem] = weights_problems(AutoModelForCausalLM, fp8, "")
    assert re.search(message, problem.message)
    with pytest.raises(StageError, match=message):
        load_pretrained_model(AutoModelForCausalLM, fp8)


def test_fp8_in_another_form_is_refused_by_config_json_alone(fp8: Path) -> None:
    for changes in ({"expert_dtype": "fp4"}, {"weight_block_size": None}):
        edit(fp8, **fp8_settings(**changes))
        assert [one.code for one in folder_problems(fp8, "")] == ["quantized_model"]
