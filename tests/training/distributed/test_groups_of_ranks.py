"""Groups of ranks that share layers (tensor parallelism) or sequences (context parallelism), or hold some layers each
(pipeline parallelism), and shard their weights beside it: a training of one process, which goes on in any other
layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs.ranked import pretrain_in_ranks
from tests.training.distributed.layouts import (
    GROWING,
    MIXED,
    Told,
    Weights,
    assert_alike,
    assert_close,
    assert_goes_on,
    values_of,
)

SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 4, "width": 32, "heads": 2, "positions": 64, "vocab_multiple": 64},
    "duration": "12 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2, "muon": {}},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "6 batches",
    "checkpoint_every": "4 batches",
}
LAYERS: dict[str, Any] = {"trainer": "native", "tensor_parallel": 2}
SEQUENCES: dict[str, Any] = {"trainer": "native", "context_parallel": 2}
STAGES: dict[str, Any] = {"trainer": "native", "pipeline_parallel": 2}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"trainer": "native"}),
    "zero1": (2, {"trainer": "native", "sharding": "zero1"}),
    "zero2": (2, {"trainer": "native", "sharding": "zero2"}),
    "zero2-offload": (2, {"trainer": "native", "sharding": "zero2", "offload": True}),
    "hsdp": (4, {"trainer": "native", "sharding": "hsdp", "shard_ranks": 2}),
    "hsdp-offload": (4, {"trainer": "native", "sharding": "hsdp", "shard_ranks": 2, "offload": True}),
    "layers": (2, LAYERS),
    "layers-offload": (4, LAYERS | {"sharding": "fsdp", "offload": True}),
    "layers-recompute": (2, LAYERS | {"recompute": "full"}),
    "layers-hsdp2": (8, LAYERS | {"sharding": "hsdp", "shard_ranks": 2}),
    "layers-fsdp": (4, LAYERS | {"sharding": "fsdp", "microbatch": 2}),
    "layers-zero2": (4, LAYERS | {"sharding": "zero2"}),
    "layers-hsdp": (4, LAYERS | {"sharding": "hsdp", "shard_ranks": 1}),
    "sequences": (2, SEQUENCES),
    "sequences-ddp": (4, SEQUENCES | {"recompute": "selective"}),
    "sequences-fsdp": (4, SEQUENCES | {"sharding": "fsdp", "microbatch": 1}),
    "sequences-zero1": (2, SEQUENCES | {"sharding": "zero1"}),
    "sequences-zero2": (2, SEQUENCES | {"sharding": "zero2"}),
    "sequences-hsdp": (4, SEQUENCES | {"sharding": "hsdp", "shard_ranks": 2}),
    "both": (4, LAYERS | SEQUENCES | {"sharding": "fsdp"}),
    "both-zero2": (8, LAYERS | SEQUENCES | {"sharding": "zero2", "microbatch": 1}),
    "stages": (2, STAGES),
    "stages-ddp": (4, STAGES | {"recompute": "full"}),
    "stages-zero1": (4, STAGES | {"sharding": "zero1"}),
    "pieces": (2, STAGES | {"pipeline_pieces": 2}),
    "stages-layers": (4, STAGES | LAYERS),
    "stages-layers-ddp": (8, STAGES | LAYERS | {"recompute": "full"}),
    "stages-sequences": (4, STAGES | SEQUENCES),
    "stages-sequences-ddp": (8, STAGES | SEQUENCES | {"recompute": "selective"}),
    "all": (8, STAGES | SEQUENCES | LAYERS),
    "all-ddp": (16, STAGES | SEQUENCES | LAYERS),
    "pieces-layers": (4, STAGES | LAYERS | {"pipeline_pieces": 2}),
}
"""Ranks, and their launch section."""


@pytest.fixture(scope="module")
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _train(
    inputs: dict[str, Path], way: str, out: Path, settings: Mapping[str, Any] | None = None, **more: Any
) -> Told:
    count, launch = WAYS[way]
    return pretrain_in_ranks(count, SETTINGS | dict(settings or {}), inputs, out, launch=launch | more)


@pytest.fixture(scope="module")
def one(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The model of one process, and what it told."""
    folder = tmp_path_factory.mktemp("one") / "model"
    return folder, _train(inputs, "one", folder)


@pytest.mark.long
@pytest.mark.parametrize("way", ["layers", "sequences", "stages"])
def test_two_ranks_train_as_one_process_which_then_goes_on(
    way: str, one: tuple[Path, list[dict[str, Any]]], inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    whole, expected = one
    told = _train(inputs, way, tmp_path / "model")
    for name in ("train/loss", "train/grad_norm", "train/activation_norm", "validation/sample_loss"):
        assert values_of(told, name) == pytest.approx(values_of(expected, name), rel=1e-3), name
    assert_close(weights(tmp_path / "model"), weights(whole))
    shutil.rmtree(tmp_path / "model.work" / "checkpoints" / "ba000000012")
    again = _train(inputs, "one", tmp_path / "model")
    assert values_of(again, "train/loss") == pytest.approx(values_of(expected, "train/loss")[8:], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("layers", "layers-fsdp"),
        ("layers-fsdp", "layers-hsdp"),
        ("layers-zero2", "layers"),
        ("layers-hsdp", "layers-zero2"),
        ("one", "layers-fsdp"),
        ("sequences", "sequences-fsdp"),
        ("sequences-fsdp", "sequences-hsdp"),
        ("sequences-ddp", "sequences"),
        ("sequences-zero1", "sequences-ddp"),
        ("sequences-zero2", "sequences-zero1"),
        ("one", "sequences"),
        ("layers", "sequences"),
        ("both", "both-zero2"),
        ("both-zero2", "layers"),
        ("sequences-fsdp", "both"),
        ("stages", "stages-ddp"),
        ("pieces", "stages"),
        ("stages-zero1", "pieces"),
        ("stages-ddp", "stages-zero1"),
        ("stages", "pieces"),
        ("stages-ddp", "layers-fsdp"),
        ("one", "stages"),
        ("sequences-zero1", "stages"),
        ("stages-layers", "stages-layers-ddp"),
        ("stages-layers-ddp", "pieces-layers"),
        ("pieces-layers", "both"),
        ("one", "stages-layers"),
        ("stages-sequences", "stages-sequences-ddp"),
        ("stages-sequences-ddp", "all"),
        ("all", "stages-layers"),
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
    """The risk: parts of a matrix that is cut in both dimensions come back to other places than their own, or ranks of
    a group go on at different places of the data."""
    assert_goes_on(partial(_train, inputs), way, other, one, tmp_path / "model", weights)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("way", ["zero1", "zero2", "hsdp", "layers", "layers-fsdp", "sequences", "stages-layers"])
def test_half_precision_trains_as_in_one_process(
    way: str, precision: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: a loss scale of fp16 that is taken out of some weights alone, that ranks do not share, or that a
    checkpoint does not hold."""
    assert_alike(partial(_train, inputs), way, tmp_path, weights, precision=precision)


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero2-offload", "hsdp-offload", "layers-offload", "layers-recompute", "layers-hsdp2"])
def test_what_saves_memory_trains_as_in_one_process(
    way: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: weights that lie elsewhere, or are computed again, are taken for those of another rank."""
    assert_alike(partial(_train, inputs), way, tmp_path, weights, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero2", "layers", "sequences", "stages-layers"])
def test_growing_batches_train_as_in_one_process(
    way: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: a rank takes its share of a whole batch while it is a part of one."""
    assert_alike(partial(_train, inputs), way, tmp_path, weights, 1e-4, settings=GROWING)


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero2", "layers-fsdp", "sequences-ddp", "stages-ddp", "all"])
def test_a_mixture_is_read_as_in_one_process(
    way: str, inputs: dict[str, Path], apart_shards_dir: Path, tmp_path: Path, weights: Weights
) -> None:
    """The risk: ranks that share a sequence or its layers take different sequences of a source, or a training that goes
    on in a later phase begins a source anew."""
    mixed = inputs | {"shards": apart_shards_dir}
    assert_alike(partial(_train, mixed), way, tmp_path, weights, 1e-4, settings=MIXED)
    told = [json.loads((tmp_path / name / "aux" / "mixture.json").read_text()) for name in ("one", way)]
    assert told[0] == told[1]


@pytest.mark.long
@pytest.mark.parametrize("way", ["layers", "sequences", "stages-layers", "all"])
def test_dropout_learns_as_in_one_process(
    way: str, one: tuple[Path, Told], inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """What is dropped differs, and is the same again in a training that goes on. The risk: nothing is dropped where
    ranks share heads or sequences, or what is computed again for the gradient drops something else."""
    dropped = {"model": SETTINGS["model"] | {"dropout": 0.5}}
    told = assert_alike(partial(_train, inputs), way, tmp_path, weights, 0.05, settings=dropped)
    assert values_of(told, "train/loss") != pytest.approx(values_of(one[1], "train/loss"), rel=1e-3)
