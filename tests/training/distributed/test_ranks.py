"""Several ranks: the same weights as one process, and every sample seen once, on whichever number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs.ranked import RankFailed, pretrain_in_ranks
from tests.training.distributed.layouts import assert_goes_on

SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
    "duration": "12 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2, "muon": {}},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "6 batches",
    "checkpoint_every": "4 batches",
}
BATCH = 8  # sequences
FSDP = {"sharding": "fsdp"}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "fsdp": (2, FSDP),
    "hsdp": (4, {"sharding": "hsdp", "shard_ranks": 2}),
    "ddp of four": (4, {}),
    "ddp of four, native": (4, {"trainer": "native"}),
}
Weights = Callable[[Path], dict[str, torch.Tensor]]


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def _values(told: list[dict[str, Any]], metric: str) -> list[float]:
    return [float(line["values"][metric]) for line in told if metric in line.get("values", {})]


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _losses(told: list[dict[str, Any]]) -> list[float]:
    return _values(told, "train/loss")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("ddp", "zero1", "fsdp"), id="two ranks"),
        pytest.param(("ddp", "zero1", "hsdp"), id="four", marks=pytest.mark.long),
    ],
)
def test_ranks_end_with_the_weights_of_one_process(
    names: tuple[str, ...], inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk of four: groups of ranks that hold copies of each other's shards sum over the wrong ones."""
    benchmarks: dict[str, Any] = {"evaluate_tasks": ["minimal_pairs"], "evaluate_limit": 8}
    told = {
        name: pretrain_in_ranks(
            count,
            SETTINGS | {"sample_prompts": ["Sort "]} | (benchmarks if name in ("one", "fsdp") else {}),
            inputs,
            tmp_path / name,
            launch=launch,
        )
        for name, (count, launch) in {"one": (1, {}), **WAYS, "ddp": (2, {"profile": 2})}.items()
        if name in ("one", *names)
    }
    for name in names:
        _close(weights(tmp_path / name), weights(tmp_path / "one"))
        assert _losses(told[name]) == pytest.approx(_losses(told["one"]), rel=1e-4)
        # Adam and the clip hide the scale of gradients; their norm does not.
        ours, theirs = (_values(told[one], "train/grad_norm") for one in (name, "one"))
        assert ours == pytest.approx(theirs, rel=1e-3) and len(ours) == 12
        assert not list((tmp_path / f"{name}.rank1").iterdir()), "only rank 0 writes the model"
    for name in {*names} & {"ddp", "zero1", "fsdp"}:
        samples = [tmp_path / one / "aux" / "training_samples.jsonl" for one in (name, "one")]
        assert samples[0].read_text() == samples[1].read_text() != ""
    if "fsdp" in names:
        scores = [_values(told[one], "benchmarks/minimal_pairs/acc") for one in ("fsdp", "one")]
        assert len(scores[0]) == 2
        assert scores[0] == pytest.approx(scores[1], abs=0.13), "one of eight may turn by rounding"
    profile = json.loads((tmp_path / "ddp" / "aux" / "profile.json").read_text())
    assert 0 < profile["communication_share"] < 1, "gradients are summed over the ranks"
    assert _same(weights(tmp_path / "zero1"), weights(tmp_path / "ddp")), "each number is stepped once, by one rank"


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("zero1", "hsdp"),
        ("zero2", "zero1"),
        ("hsdp", "zero2"),
        ("ddp of four", "ddp"),
        ("ddp of four, native", "ddp of four"),
    ],
)
def test_each_sharding_goes_on_to_the_bit_and_into_any_other(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, way: str, other: str
) -> None:
    """The risk: optimizer state that comes back to other rows than its own trains on, a little worse; and gradients
    that are summed in another order after a resume, which only more than two ranks show."""

    def train(name: str, out: Path) -> list[dict[str, Any]]:
        count, launch = WAYS[name]
        return pretrain_in_ranks(count, SETTINGS, inputs, out, launch=launch)

    one = tmp_path / "one", pretrain_in_ranks(1, SETTINGS, inputs, tmp_path / "one")
    assert_goes_on(train, way, other, one, tmp_path / "model", weights)


@pytest.fixture(scope="module")
def compressed(shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shards in many files of zstd."""
    from streaming import MDSWriter

    from training.data.packed_shards import PackedShards
    from training.data.shard_index import Split

    folder, unused = tmp_path_factory.mktemp("compressed"), tmp_path_factory.mktemp("unused")
    shutil.copyfile(shards_dir / "meta.json", folder / "meta.json")
    columns = {"tokens": "ndarray:uint16:32", "starts": "ndarray:uint32"}
    for split in ("train", "validation"):
        shards = PackedShards(Split.read(shards_dir / split), unused, 1, 0)
        with MDSWriter(out=str(folder / split), columns=columns, compression="zstd", size_limit=2_000) as writer:
            for tokens, starts, _ in (shards[number] for number in range(shards.size)):
                writer.write({"tokens": tokens.astype("uint16"), "starts": starts.astype("uint32")})
    return folder


def test_nodes_that_share_the_work_folder_each_unpack_the_shards_for_themselves(
    inputs: dict[str, Path], compressed: Path, tmp_path: Path, weights: Weights
) -> None:
    """Two processes that take themselves for two machines; each of several runs ends as two ranks of one machine do."""
    given, settings = inputs | {"shards": compressed}, SETTINGS | {"duration": "6 batches"}
    scratch = tmp_path / "scratch"
    spread: dict[str, Any] = {"nodes": 2, "launch": {"scratch": str(scratch)}}
    pretrain_in_ranks(2, settings, given, tmp_path / "one_node")
    with pytest.raises(RankFailed):
        pretrain_in_ranks(2, settings, given, tmp_path / "killed", prepare=_die_at_the_first_checkpoint, **spread)
    assert len(list(scratch.glob("*/*/train"))) == 2, "a folder for each node; killed ranks leave them behind"
    for out in (tmp_path / "killed", tmp_path / "whole"):
        pretrain_in_ranks(2, settings, given, out, **spread)
        ours, theirs = weights(out), weights(tmp_path / "one_node")
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert [path.name for path in scratch.glob("*/*")] == [".lock"], "all are cleaned up"
    assert not list(tmp_path.glob("*.work/**/*.mds"))


def _want_bf16_layers(rank: int) -> None:
    """Ends a rank whose layers compute with weights that were gathered in another type."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def checked(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        assert self.up_proj.weight.dtype == torch.bfloat16, "gathered in bf16"
        return forward(self, hidden)

    LlamaMLP.forward = checked  # type: ignore[method-assign]


def test_sharded_layers_are_gathered_in_bf16_and_lose_nothing(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """Against whole fp32 weights under bf16 autocast."""
    bf16 = {"precision": "bf16"}
    ddp = pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "ddp", launch=bf16)
    fsdp = pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "fsdp", launch=bf16 | FSDP, prepare=_want_bf16_layers)
    assert _losses(fsdp) == pytest.approx(_losses(ddp), rel=2e-3)
    ours, theirs = weights(tmp_path / "fsdp"), weights(tmp_path / "ddp")
    moved = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    assert moved < 1e-3 * sum(float(tensor.square().sum()) for tensor in theirs.values())
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


SEEN = "STEMMA_TEST_SEEN"


def _record_samples(rank: int) -> None:
    """Writes down the number of every sample that this rank trains on."""
    from training.data.packed_shards import PackedShards

    read = PackedShards.__getitem__

    def recorded(self: PackedShards, at: Any) -> Any:
        if self.shuffle:
            with open(f"{os.environ[SEEN]}.rank{rank}", "a") as file:
                file.write(f"{at}\n")
        return read(self, at)

    PackedShards.__getitem__ = recorded  # type: ignore[method-assign]


def _seen(start: Path, ranks: int) -> list[frozenset[int]]:
    """The samples of each global batch."""
    each = [list(map(int, Path(f"{start}.rank{rank}").read_text().split())) for rank in range(ranks)]
    share = BATCH // ranks
    batches = [[numbers[at : at + share] for at in range(0, len(numbers), share)] for numbers in each]
    return [frozenset(number for part in parts for number in part) for parts in zip(*batches, strict=True)]


def test_every_sample_is_seen_once_when_the_number_of_ranks_changes_within_an_epoch(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    def train(name: str, ranks: int, model: str, duration: str) -> list[frozenset[int]]:
        settings = SETTINGS | {"duration": duration, "checkpoint_every": "4 batches"}
        environment = {SEEN: str(tmp_path / name)}
        pretrain_in_ranks(ranks, settings, inputs, tmp_path / model, prepare=_record_samples, environment=environment)
        return _seen(tmp_path / name, ranks)

    unbroken = train("unbroken", 1, "whole", "2 epochs")
    parts = [
        *train("two", 2, "moved", "4 batches"),
        *train("one", 1, "moved", "8 batches"),
        *train("again", 2, "moved", "2 epochs"),
    ]
    assert parts == unbroken, "the same samples in the same batches"
    epoch = len(unbroken) // 2
    for batches in (parts[:epoch], parts[epoch:]):
        assert len(frozenset.union(*batches)) == epoch * BATCH, "each once"


def _die_at_the_first_checkpoint(rank: int) -> None:
    from training.checkpoint.manager import CheckpointManager

    save = CheckpointManager.save

    def die(self: CheckpointManager, series: Any, state: Any) -> Path:
        path = save(self, series, state)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with what watches over its shared memory
        return path

    CheckpointManager.save = die  # type: ignore[method-assign]


def test_shared_memory_of_killed_ranks_is_cleaned_and_a_neighbour_is_left_alone(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    from training.data.node_storage import own_shared_memory
    from training.data.packed_shards import PackedShards
    from training.data.shard_index import Split

    def present() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name[:6].isdigit()}

    neighbour = tmp_path / "neighbour"
    neighbour.mkdir()
    with own_shared_memory(neighbour):
        shards = PackedShards(Split.read(inputs["shards"] / "validation"), neighbour, 1, 0)
        ours = {name for name in present() if name.startswith(f"{os.getpid() * 64:06}")}
        with pytest.raises(RankFailed):
            pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "model", prepare=_die_at_the_first_checkpoint)
        (record,) = (tmp_path / "model.work").glob("shared_memory.*")
        first = record.read_text()
        left = {name for name in present() if name.startswith(f"{int(first):06}")}
        assert left, "killed ranks leave their memory behind"
        pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "model")
        assert not left & present() and not record.exists()
        assert ours and ours <= present(), "a neighbour's memory stays"
        assert len(shards[0][0]), "and can be read"


GUARDED: dict[str, Any] = SETTINGS | {
    "duration": "40 batches",
    "guard": {"rollback_every": 10, "healthy_after": 5, "window_least": 10},
}


class _NotANumber:
    """Makes the loss of batch 25 NaN, on the last rank alone, wherever a training builds its callbacks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(self, rank: int) -> None:
        from training import pretrain as module
        from training.core.callbacks import Callback

        class Fault(Callback):
            def before_backward(self, state: Any) -> None:
                if state.clock.batch == 25:
                    assert isinstance(state.loss, torch.Tensor)
                    state.loss.mul_(float("nan"))

        fit = module.fit
        faults = [Fault()] if rank == self._ranks - 1 else []
        module.fit = lambda *given, **named: fit(*given[:-1], [*faults, *given[-1]], **named)


@pytest.mark.long
def test_ranks_correct_a_fault_of_one_of_them_alike(inputs: dict[str, Path], tmp_path: Path) -> None:
    """NaN on one rank alone, which all have to go back for, also where each holds its shard of the weights. The risk:
    ranks that go back to different batches wait for each other for ever.
    """
    corrections, losses = {}, {}
    for name, count, launch in (("one", 1, {}), ("ddp", 2, {}), ("fsdp", 2, FSDP)):
        prepare = _NotANumber(count)
        losses[name] = _losses(
            pretrain_in_ranks(count, GUARDED, inputs, tmp_path / name, launch=launch, prepare=prepare)
        )
        corrections[name] = json.loads((tmp_path / name / "aux" / "corrections.json").read_text())
    (made,) = corrections["one"]
    assert (made["alarm"]["batch"], made["back_to"]) == (25, 20)
    for name in ("ddp", "fsdp"):
        (again,) = corrections[name]
        assert {**again, "alarm": None} == {**made, "alarm": None}
        assert losses[name] == pytest.approx(losses["one"], rel=0.02, nan_ok=True)


def _begin_with_a_scale_too_high(rank: int) -> None:
    from functools import partial

    from training.trainer import fit

    fit.LossScale = partial(fit.LossScale, scale=2.0**24)  # type: ignore[misc, assignment]


@pytest.mark.long
def test_ranks_with_shards_agree_on_the_loss_scale_of_fp16(inputs: dict[str, Path], tmp_path: Path) -> None:
    """At first fp16 gradients are infinite, though not in the shard of every rank. The risk: some step, some do not."""
    losses = {
        sharding: _losses(
            pretrain_in_ranks(
                2,
                SETTINGS,
                inputs,
                tmp_path / sharding,
                launch={"precision": "fp16", "sharding": sharding},
                prepare=_begin_with_a_scale_too_high,
            )
        )
        for sharding in ("ddp", "fsdp")
    }
    first, *_, last = losses["ddp"]
    assert losses["ddp"][1] == pytest.approx(first, rel=2e-3), "no update by infinite gradients"
    assert last < 0.95 * first
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=2e-3)
