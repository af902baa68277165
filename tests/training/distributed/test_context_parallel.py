"""Ranks that share every sequence: loss and gradients of one process for each family. Whole trainings are in
test_groups_of_ranks.py."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from torch import distributed

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import called_in_ranks, pretrain_in_ranks
from tests.training.distributed.layouts import values_of
from tests.training.distributed.test_groups_of_ranks import SETTINGS
from training.config.families import FAMILIES

ABLE = sorted(name for name, one in FAMILIES.items() if one.context_parallel and not one.router)
"""Mixtures of experts are tried in four ranks."""
LENGTH, WINDOW = 24, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
         "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.5,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0}  # fmt: skip
QUIET = {"attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "residual_dropout": 0.0,
         "embedding_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0}  # fmt: skip
Weights = Callable[[Path], dict[str, torch.Tensor]]


def _prepared(
    rank: int, count: int, port: int, precision: Literal["fp32", "bf16"] = "fp32"
) -> tuple[LaunchConfig, Any]:
    """In each of `count` ranks, which share sequences: where it is, and on what it computes."""
    from training.core.hardware import prepare

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    launch = LaunchConfig(
        device="cpu", threads=1, precision=precision, processes=count, context_parallel=count, trainer="native"
    )
    return launch, prepare(launch, shares_examples=True)


def _compare(rank: int, count: int, port: int, families: list[str]) -> str:
    """A model, and the same one with its sequences shared; the traceback of what differs."""
    family = ""
    try:
        from training.distributed.parallel import parallelize
        from training.model.blocks import checkpoint_activations

        launch, hardware = _prepared(rank, count, port)
        for number, family in enumerate(families):
            one, two = _model(family, hardware), _model(family, hardware)
            if number % 2:
                checkpoint_activations(two, "full")
            parallelize(two, launch, hardware)
            for batch in _batches():
                _hold(one, two, batch, count)
    except BaseException:
        return f"{family}: {traceback.format_exc()}"
    return ""


def _model(family: str, hardware: Any) -> Any:
    from training.config import ModelConfig
    from training.model.attention import CAUSAL_BLOCKS
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel

    values = {"model_type": family, **(GPT2 if family == "gpt2" else {**SIZES, **QUIET})}
    values |= EXPERTS if FAMILIES[family].router else {}
    if FAMILIES[family].windows == "by_layer":
        values["layer_types"] = ["sliding_attention", "full_attention"]
    # Weights so wide that what a token sees tells in its loss.
    network = build(hf_config(ModelConfig(transformers=values), 64, {"pad_token_id": 0}), 1, "plain", 0.2)
    # The kernels of a GPU and of a CPU, in turn.
    network.set_attn_implementation(CAUSAL_BLOCKS if family in ("llama", "gpt2") else "sdpa")
    return LanguageModel(network, hardware)


def _batches() -> list[dict[str, torch.Tensor]]:
    """With documents, one of which goes over the border of two chunks, and without; labels are not spread evenly."""
    from training.model.documents import positions_within

    torch.manual_seed(3)
    ids = torch.randint(0, 64, (3, LENGTH))
    labels = ids.roll(-1, 1).index_fill(1, torch.tensor([1, 2, 4, LENGTH - 1]), -100)
    documents = torch.stack([(torch.arange(LENGTH) >= begin).int() for begin in (5, 8, 17)])
    plain = {"input_ids": ids, "labels": labels}
    return [{**plain, "documents": documents, "position_ids": positions_within(documents)}, plain]


def _hold(one: Any, two: Any, batch: dict[str, torch.Tensor], count: int) -> None:
    for model in (one, two):
        model.zero_grad()
    outputs = one(batch), two(batch)
    whole, part = one.loss(outputs[0], batch), two.loss(outputs[1], batch)
    states = outputs[1][0] if isinstance(outputs[1], tuple) else outputs[1]
    assert states.shape[1] == LENGTH // count
    mean = part.detach().clone()
    distributed.all_reduce(mean)
    torch.testing.assert_close(mean / count, whole.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two.losses(batch), one.losses(batch), rtol=1e-4, atol=1e-5)
    of_examples = one.example_losses(outputs[0], batch), two.example_losses(outputs[1], batch)
    torch.testing.assert_close(of_examples[1], of_examples[0], rtol=1e-4, atol=1e-5)
    whole.backward()
    part.backward()
    theirs = dict(one.named_parameters())
    for name, weight in two.named_parameters():
        distributed.all_reduce(weight.grad)
        wanted = theirs[name].grad  # none of experts that no token chose
        wanted = torch.zeros_like(weight) if wanted is None else wanted
        torch.testing.assert_close(weight.grad / count, wanted, rtol=1e-3, atol=1e-5, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda said: f"{name}: {said}"


def _held(rank: int, count: int, port: int) -> str:
    """The most bytes of tensors in two steps of a small Llama in bf16."""
    try:
        from tests.support.programs.peak import counted
        from training.config import ModelConfig
        from training.distributed.parallel import parallelize
        from training.model.models import build, hf_config
        from training.train_modules.language_model import LanguageModel

        launch, hardware = _prepared(rank, count, port, "bf16")
        config = ModelConfig(family="llama", layers=8, width=128, heads=4, mlp_width=344, positions=512)
        with counted() as peak:
            model = LanguageModel(build(hf_config(config, 1024, {}), 1), hardware)
            parallelize(model, launch, hardware)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            ids = torch.randint(0, 1024, (2, 512))
            batch = {"input_ids": ids, "labels": ids, "documents": torch.zeros(2, 512, dtype=torch.int32)}
            batch["position_ids"] = torch.arange(512).repeat(2, 1)
            for step in range(4):
                if step > 0:  # the first has no optimizer state yet
                    peak.begin()
                model.loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        # Weights, gradients and two moments are whole on every rank.
        return str(peak.most - 16 * sum(weight.numel() for weight in model.parameters()))
    except BaseException:
        return traceback.format_exc()


def test_shared_sequences_have_loss_and_gradients_of_the_whole() -> None:
    assert called_in_ranks(_compare, 2, ABLE) == ["", ""]


@pytest.mark.long
def test_four_ranks_share_them_too() -> None:
    """The risk: chunks of more than two ranks come together in another order, or a balancing loss is of a rank's own
    tokens."""
    families = ["llama", "gpt2", "mistral", "gemma3_text", "mixtral", "qwen3_moe"]
    assert called_in_ranks(_compare, 4, families) == [""] * 4


@pytest.mark.long
def test_a_rank_holds_its_part_of_the_activations(record_property: Callable[[str, object], None]) -> None:
    """The risk: each rank computes whole sequences somewhere. Beside its part it holds all keys and values of a layer,
    and the weights' copies in bf16. The figures go to --junit-xml."""
    held = {count: [int(one) for one in called_in_ranks(_held, count)] for count in (1, 2, 4)}
    record_property("bytes", held)
    assert max(held[2]) < 0.55 * held[1][0] and max(held[4]) < 0.3 * held[1][0]


SHARED: dict[str, Any] = {"trainer": "native", "context_parallel": 2}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [{"precision": "bf16"}, {"precision": "bf16", "sharding": "fsdp"}, {"sharding": "fsdp", "offload": True}],
    ids=["bf16", "bf16-fsdp", "offload"],
)
def test_it_trains_in_bf16_and_offloaded(inputs: dict[str, Path], tmp_path: Path, more: dict[str, Any]) -> None:
    """The risk: keys, values and masks are of different types, or lie on different devices."""
    one = {"trainer": "native", **{key: value for key, value in more.items() if key == "precision"}}
    alone = pretrain_in_ranks(1, SETTINGS, inputs, tmp_path / "one", launch=one)
    told = pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "two", launch=SHARED | more)
    assert values_of(told, "train/loss") == pytest.approx(values_of(alone, "train/loss"), rel=2e-3)


def test_what_does_not_go_with_it_is_refused() -> None:
    for wrong, said in (
        ({"trainer": "composer"}, "trainer: native"),
        (
            {"processes": 6, "tensor_parallel": 2, "sharding": "fsdp"},
            "a divisor of the 6 ranks, not 2 times tensor_parallel: 2",
        ),
        ({"processes": 3}, "a divisor of the 3 ranks, not 2"),
        ({"attention": "flash_attention_2"}, "attention: auto, sdpa or causal_blocks, not flash_attention_2"),
    ):
        with pytest.raises(ValidationError, match=f"expected with context_parallel {said}"):
            LaunchConfig(**{"processes": 2, **SHARED, **wrong})  # type: ignore[arg-type]
