"""The planned bytes of trainings in FP8. A CPU emulates the products, and so keeps other things: the graph is split
into forward and backward pass as for a GPU, and not run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import PreTrainedModel

from training.config import ModelConfig
from training.core.devices import DEVICES
from training.model.blocks import blocks
from training.model.float8 import train_in_float8
from training.model.models import build, hf_config
from training.planner.architecture import of_preset, of_transformers
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.memory import kept_by, memory
from training.planner.step_time import RankLayout, Training, step_time

pytest.importorskip("torchao")
CPU = torch.device("cpu")
VOCABULARY, SEQUENCES, LENGTH = 512, 4, 128
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 704, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
QWEN3 = {"model_type": "qwen3", "head_dim": 64, **SIZES}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **SIZES}


def network_of_sizes(sizes: dict[str, Any]) -> PreTrainedModel:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    network = build(hf_config(ModelConfig(transformers=sizes), VOCABULARY, special), 0)
    network.set_attn_implementation("sdpa")
    return network.train()


def job(sizes: dict[str, Any], precision: str) -> Training:
    arch, device = of_transformers(sizes, VOCABULARY), DEVICES["h100"]
    assert arch is not None
    return Training(arch, device, KERNELS["compiled"], network_of(device), LENGTH, SEQUENCES, precision)


def kept(network: PreTrainedModel) -> float:
    """Bytes a token that the compiler hands from a block's forward pass to its backward pass, with the block's input
    and without weights."""
    found: list[Tensor] = []

    def split(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **how: Any) -> Any:
        graphs = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **how)
        outputs: Any = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
        found.extend(node.meta["val"] for node in outputs[num_fwd_outputs:] if node.op != "placeholder")
        raise InterruptedError("enough is known, and the graphs are not run")

    tokens, width = SEQUENCES * LENGTH, network.config.hidden_size
    given, turns = torch.randn(SEQUENCES, LENGTH, width, requires_grad=True), torch.ones(1, LENGTH, 64)
    tables = select_decomp_table()
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=split, decompositions=tables)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16), suppress(Exception):
        torch.compile(blocks(network)[0], backend=backend)(
            given, attention_mask=None, position_embeddings=(turns, turns)
        )
    of_tokens = [one for one in found if isinstance(one, Tensor) and SEQUENCES in one.shape[:1]]
    of_tokens += [one for one in found if isinstance(one, Tensor) and tokens in one.shape[:1]]
    assert of_tokens
    return sum(one.numel() * one.element_size() for one in of_tokens) / tokens + 4 * width


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are not emulated, of what autocast makes bf16."""
    import torchao.float8

    from training.model.float8 import _training_linear

    whole = torchao.float8.Float8LinearConfig
    monkeypatch.setattr(torchao.float8, "Float8LinearConfig", lambda **how: whole(**{**how, "emulate": False}))
    forward = _training_linear().forward
    monkeypatch.setattr(_training_linear(), "forward", lambda self, given: forward(self, given.to(torch.bfloat16)))


@pytest.mark.parametrize(("sizes", "fp8"), [(LLAMA, False), (LLAMA, True), (QWEN3, True)])
def test_what_a_compiled_block_keeps_is_planned(
    sizes: dict[str, Any], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of_sizes(sizes)
    if fp8:
        as_on_a_gpu(monkeypatch)
        train_in_float8(network, CPU)
    arch = job(sizes, "bf16").arch
    told = kept_by(arch, LENGTH, 2, scores=False, compiled=True, fp8=fp8)
    # A CPU's attention gives heads first, and what the next product is given of it is a copy, which is kept too.
    turned = arch.width * (1 if fp8 else 2)
    assert told.layer + turned == pytest.approx(kept(network), rel=0.02)


@pytest.mark.parametrize("sizes", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_what_computes_in_8_bits_is_planned_so(sizes: dict[str, Any]) -> None:
    """Copies of its weights take a byte; what the layer does not convert, a mixture's experts, takes two."""
    network = network_of_sizes(sizes)
    train_in_float8(network, CPU)
    converted = [one for one in network.modules() if isinstance(one, nn.Linear) and type(one) is not nn.Linear]
    copies = [memory(job(sizes, precision), RankLayout(microbatch=SEQUENCES)).casts for precision in ("bf16", "fp8")]
    assert copies[0] - copies[1] == sum(one.weight.numel() for one in converted)


def test_experts_gain_no_time_from_8_bits() -> None:
    """In Mixtral they are nearly all of a step."""
    mixtral = job(MIXTRAL, "bf16")
    whole = replace(mixtral, arch=of_preset("mixtral-8x7b"), length=2048)
    bf16, fp8 = (step_time(replace(whole, precision=one), RankLayout(ep=8, dp=8)).compute for one in ("bf16", "fp8"))
    assert 0.9 * bf16 < fp8 < bf16
