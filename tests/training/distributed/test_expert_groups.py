"""Ranks that hold a part of a mixture's experts each beside those that share layers or sequences, or hold some layers
each: the loss, its balancing part and gradients of one process for each family, and a training of one process, which
goes on in any other layout."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import called_in_ranks, pretrain_in_ranks
from tests.training.distributed.layouts import GROWING, MIXED, Told, Weights, assert_alike, assert_goes_on, values_of
from tests.training.distributed.test_expert_parallel import SETTINGS as MIXTURE
from tests.training.distributed.test_ranks import GUARDED
from tests.training.distributed.test_ranks import _NotANumber as NotANumber
from tests.training.model.test_balancing import EXPERTS

LENGTH = 16
ROWS = 5
"""So many that a pipeline fills a batch up with sequences that count nothing."""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "stages": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "sequences": (4, {"context_parallel": 2, "expert_parallel": 4}),
    "layers": (4, {"tensor_parallel": 2, "expert_parallel": 4}),
    "stages alone": (2, {"pipeline_parallel": 2}),
    "sequences alone": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "layers alone": (2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "layers, two of each expert": (4, {"tensor_parallel": 2, "expert_parallel": 2}),
    "stages of pieces": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "pipeline_pieces": 2}),
    "stages and sequences": (8, {"pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
    "stages and layers": (8, {"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
    "sequences and layers": (8, {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
    "all": (8, {"pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
}
"""Ranks, and their launch section."""
FAMILIES = ("mixtral", "qwen3_moe")
CHEAP = [("stages", "mixtral"), ("sequences alone", "mixtral"), ("layers alone", "qwen3_moe")]


def _compare(rank: int, count: int, port: int, launch: dict[str, Any], family: str) -> str:
    """In each rank: a model, and the same one in several; the traceback of what differs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        _compare_one(count, launch, family)
    except BaseException:
        return traceback.format_exc()
    return ""


def _compare_one(count: int, keys: dict[str, Any], family: str) -> None:
    from training.config import ModelConfig
    from training.core import ranks
    from training.core.hardware import prepare
    from training.distributed.parallel import parallelize, whole_weights
    from training.guard.norms import _clipped
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel

    launch = LaunchConfig(device="cpu", threads=1, precision="fp32", processes=count, trainer="native", **keys)
    hardware = prepare(launch, shares_examples=True)
    sizes: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 24}
    sizes |= {"router_aux_loss_coef": 0.5, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    if family == "qwen3_moe":
        sizes |= {"mlp_only_layers": [0]}  # the first stage of a pipeline may have no experts
    config = ModelConfig(transformers=EXPERTS | sizes | {"model_type": family})
    one, shared = (LanguageModel(build(hf_config(config, 64, {}), 1, "plain", 0.2), hardware) for _ in range(2))
    parallelize(shared, launch, hardware)
    held = {name.split("experts.")[1].split(".")[0] for name, _ in shared.named_parameters() if ".experts." in name}
    assert len(held) in ((0, 8) if ranks.expert_parallel() == 1 else (0, 8 // ranks.expert_parallel()))
    # Padding is not counted. Without context parallelism sequences may be of any length.
    length = LENGTH if ranks.context_parallel() > 1 else LENGTH - 3
    torch.manual_seed(3)
    ids = torch.randint(0, 64, (ranks.data_ranks(), ROWS, length))
    ids[:, :, 0] = 5
    labels = ids.roll(-1, 2)
    labels[..., -1] = -100
    labels[:, 1, 5:] = -100
    batches = [{"input_ids": ids[number], "labels": labels[number]} for number in range(ranks.data_ranks())]
    for size in (1, 2):
        for model in (one, shared):
            model.zero_grad()
        shares = int((labels != -100).sum()) / ranks.data_ranks()
        expected = [_passed(one, batch, size, shares) for batch in batches]
        for weight in one.parameters():
            if weight.grad is not None:
                weight.grad /= ranks.data_ranks()
        total, routed = _trained(shared, batches[ranks.data_rank()], size, shares)
        wanted, of_routers = expected[ranks.data_rank()]
        if total is not None:
            torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-6)
            for ours, theirs in zip(routed, of_routers, strict=True):
                torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-5, atol=1e-6)
        batch = batches[ranks.data_rank()]
        torch.testing.assert_close(shared.losses(batch), one.losses(batch), rtol=1e-4, atol=1e-5)
        _hold(shared, one)
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        assert _clipped(shared, 0.1) == pytest.approx(float(norm), rel=1e-4)
        _hold(shared, one)
    joined = whole_weights(shared)
    for name, weight in whole_weights(one).items():
        assert torch.equal(joined.pop(name), weight)
    assert not joined


def _passed(model: Any, batch: dict[str, Tensor], size: int, shares: float) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch, whose gradients are added up over microbatches, and of each the figures of its routers."""
    from training.core.train_state import split_batch

    total, routed = torch.zeros(()), []
    for part in split_batch(batch, size):
        outputs = model(part)
        loss = model.loss(outputs, part) * (part["labels"] != -100).sum() / shares
        loss.backward()
        total = total + loss.detach()
        routed.append(outputs[1:])
    return total, [torch.stack(one).detach() for one in zip(*routed, strict=True)]


def _trained(model: Any, batch: dict[str, Tensor], size: int, shares: float) -> tuple[Tensor | None, list[Tensor]]:
    """The same in ranks, with the gradients of all."""
    from training.core import ranks
    from training.distributed.tensor_parallel import sum_gradients

    if model.pipeline:
        found = []

        def loss_of(outputs: Any, labels: Tensor) -> Tensor:
            found.append(model.loss(outputs, {"labels": labels}) * (labels != -100).sum() / shares)
            return found[-1]

        outputs, _ = model.pipeline.train(batch, size, loss_of, lambda: None)
        if outputs is None:
            return None, []
        return _mean(model, torch.stack(found).sum().detach()), [*outputs[1:]]
    spread: Any = model
    if ranks.tensor_parallel() == 1:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, model.experts.names(model))
        spread = DistributedDataParallel(model)
    with spread.no_sync() if spread is not model else nullcontext():
        half = {name: value[: ROWS // 2] for name, value in batch.items()}
        first, of_first = _passed_through(spread, model, half, size, shares)
    half = {name: value[ROWS // 2 :] for name, value in batch.items()}
    # DDP sums with the last microbatch.
    second, of_second = _passed_through(spread, model, half, size, shares, last=True)
    if ranks.tensor_parallel() > 1:
        sum_gradients(model.parameters())
    model.experts.join_gradients()
    return _mean(model, first + second), [torch.cat(both) for both in zip(of_first, of_second, strict=True)]


def _mean(model: Any, total: Tensor) -> Tensor:
    """Of ranks that share sequences, of which each has the loss of its tokens."""
    return total if model.sequences is None else model.sequences.sum(total) / model.sequences.size


def _passed_through(
    spread: Any, model: Any, batch: dict[str, Tensor], size: int, shares: float, last: bool = False
) -> tuple[Tensor, list[Tensor]]:
    from training.core.train_state import split_batch

    total, routed, parts = torch.zeros(()), [], split_batch(batch, size)
    for number, part in enumerate(parts):
        waits = last and number < len(parts) - 1 and spread is not model
        with spread.no_sync() if waits else nullcontext():
            outputs = spread(part)
            loss = model.loss(outputs, part) * (part["labels"] != -100).sum() / shares
            loss.backward()
        total = total + loss.detach()
        routed.append(outputs[1:])
    return total, [torch.stack(one).detach() for one in zip(*routed, strict=True)]


def _hold(ours: Any, theirs: Any) -> None:
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        gradient = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        wanted = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=2e-6, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda said: f"{name}: {said}"


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *CHEAP,
        *(
            pytest.param(layout, family, marks=pytest.mark.long)
            for layout in LAYOUTS
            for family in FAMILIES
            if (layout, family) not in CHEAP
        ),
    ],
)
def test_experts_beside_other_groups_have_loss_and_gradients_of_the_whole_model(layout: str, family: str) -> None:
    """The risk of each: tokens of a sequence or a layer that ranks share are sent twice or counted twice, a balancing
    loss of one rank's or one stage's tokens, gradients of experts that are summed over ranks of other layers."""
    count, launch = LAYOUTS[layout]
    found = called_in_ranks(_compare, count, launch, family)
    assert not any(found), "\n".join(found)


MODEL = MIXTURE["model"]["transformers"] | {"num_hidden_layers": 4, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = MIXTURE | {"model": {"transformers": MODEL, "vocab_multiple": 64}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "experts": (2, {"expert_parallel": 2}),
    "stages": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "stages-alone": (2, {"pipeline_parallel": 2}),
    "stages-ddp": (8, {"pipeline_parallel": 2, "expert_parallel": 2, "recompute": "full"}),
    "stages-zero1": (8, {"pipeline_parallel": 2, "expert_parallel": 2, "sharding": "zero1"}),
    "pieces": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "pipeline_pieces": 2}),
    "sequences": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "sequences-alone": (2, {"context_parallel": 2}),
    "sequences-fsdp": (2, {"context_parallel": 2, "sharding": "fsdp"}),
    "sequences-ddp": (4, {"context_parallel": 2, "expert_parallel": 2, "recompute": "selective"}),
    "sequences-zero1": (4, {"context_parallel": 2, "expert_parallel": 2, "sharding": "zero1"}),
    "sequences-4": (4, {"context_parallel": 2, "expert_parallel": 4}),
    "layers": (2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "layers-ddp": (4, {"tensor_parallel": 2, "expert_parallel": 2, "recompute": "full"}),
    "layers-4": (4, {"tensor_parallel": 2, "expert_parallel": 4}),
    "layers-sequences": (8, {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
    "stages-sequences": (8, {"pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4}),
    "stages-layers": (8, {"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
    "all": (8, {"pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
    "all-ddp": (16, {"pipeline_parallel": 2, "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4}),
}
"""Ranks, and their launch section. The balancing loss is of a microbatch: it is a sequence in all of them."""


@pytest.fixture(scope="module")
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _train(
    inputs: dict[str, Path], way: str, out: Path, settings: Mapping[str, Any] | None = None, **more: Any
) -> Told:
    count, launch = WAYS[way]
    launch = {"trainer": "native", "microbatch": 1, **launch, **more}
    return pretrain_in_ranks(count, SETTINGS | dict(settings or {}), inputs, out, launch=launch)


@pytest.fixture(scope="module")
def one(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The model of one process, and what it told."""
    folder = tmp_path_factory.mktemp("one") / "model"
    return folder, _train(inputs, "one", folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("one", "stages"),
        ("stages", "one"),
        ("stages-alone", "sequences-alone"),
        ("stages-ddp", "stages"),
        ("stages-zero1", "stages-ddp"),
        ("pieces", "layers-ddp"),
        ("sequences", "experts"),
        ("sequences-alone", "one"),
        ("sequences-fsdp", "stages-alone"),
        ("sequences-ddp", "sequences"),
        ("sequences-zero1", "sequences-4"),
        ("sequences-4", "sequences-fsdp"),
        ("layers", "one"),
        ("layers-ddp", "sequences-zero1"),
        ("layers-4", "pieces"),
        ("layers-sequences", "layers-4"),
        ("stages-sequences", "layers"),
        ("stages-layers", "stages-zero1"),
        ("all", "one"),
        ("experts", "all"),
        ("all-ddp", "all"),
    ],
)
def test_each_way_goes_on_to_the_bit_and_into_any_other(
    way: str,
    other: str,
    one: tuple[Path, list[dict[str, Any]]],
    inputs: dict[str, Path],
    tmp_path: Path,
    weights: Weights,
) -> None:
    """The risk: an expert's weights or moments come back to another stage's, or stay away where copies of it among
    ranks that share layers or sequences share out what they write."""

    told = assert_goes_on(partial(_train, inputs), way, other, one, tmp_path / "model", weights, METRICS)
    losses = [values_of(both, "validation/sample_loss") for both in (told, one[1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0]


METRICS = (
    ("train/loss", 1e-4),
    ("train/grad_norm", 1e-3),
    ("train/balancing_loss", 1e-4),
    ("train/expert_most", 1e-3),
    ("train/expert_share/3", 1e-3),
    ("train/activation_norm", 1e-3),
)
"""What a training tells, and how close it must be."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "precision"),
    [
        ("stages", "bf16"),
        ("sequences", "bf16"),
        ("layers", "bf16"),
        ("all", "bf16"),
        ("stages", "fp16"),
        ("sequences", "fp16"),
        ("layers", "fp16"),
        ("experts", "fp16"),
        ("experts", "bf16"),
    ],
)
def test_half_precision_trains_as_in_one_process(
    way: str, precision: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: tokens that are sent in another type than experts would take them in, or a loss scale of fp16 that
    ranks of other layers or sequences do not share."""
    assert_alike(partial(_train, inputs), way, tmp_path, weights, precision=precision)


@pytest.mark.long
@pytest.mark.parametrize("way", ["experts", "stages", "sequences", "layers"])
def test_growing_batches_train_as_in_one_process(
    way: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: a rank takes its share of a whole batch while it is a part of one."""
    assert_alike(partial(_train, inputs), way, tmp_path, weights, 1e-4, settings=GROWING)


@pytest.mark.long
@pytest.mark.parametrize("way", ["experts", "stages", "sequences", "layers", "all"])
def test_a_mixture_of_sources_is_read_as_in_one_process(
    way: str, inputs: dict[str, Path], apart_shards_dir: Path, tmp_path: Path, weights: Weights
) -> None:
    """The risk: ranks that share a sequence, its layers or its experts take different sequences of a source."""
    mixed = inputs | {"shards": apart_shards_dir}
    assert_alike(partial(_train, mixed), way, tmp_path, weights, 1e-4, settings=MIXED)


@pytest.mark.long
@pytest.mark.parametrize("way", ["stages", "sequences", "layers", "all"])
def test_a_fault_is_corrected_and_texts_and_benchmarks_are_as_in_one_process(
    way: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """NaN on the last rank alone. The risk: ranks that share layers or sequences, or hold others, do not go back with
    it, or wait for each other's tokens for ever while they write texts."""
    asked = {"evaluate_tasks": ["minimal_pairs"], "evaluate_limit": 8, "sample_prompts": ["Sort "]}
    settings = GUARDED | asked | {"model": SETTINGS["model"]}
    told, made = {}, {}
    for one_way in ("one", way):
        count, launch = WAYS[one_way]
        launch = {"trainer": "native", "microbatch": 1, **launch}
        told[one_way] = pretrain_in_ranks(
            count, settings, inputs, tmp_path / one_way, launch=launch, prepare=NotANumber(count)
        )
        (made[one_way],) = json.loads((tmp_path / one_way / "aux" / "corrections.json").read_text())
    assert made["one"]["alarm"]["batch"] == 25
    assert {**made["one"], "alarm": None} == {**made[way], "alarm": None}
    metrics = (("train/loss", 1e-3), ("train/activation_norm", 1e-3), ("benchmarks/minimal_pairs/acc", 0.13))
    for metric, close in metrics:
        ours, theirs = (values_of(told[name], metric) for name in (way, "one"))
        assert ours == pytest.approx(theirs, rel=close, abs=close, nan_ok=True) and ours, metric
