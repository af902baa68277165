"""A training that goes on from a kept state of another: longer, branched, on other data, with another learning rate.

What goes on unchanged ends with the bits of a training that was that long from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus.config import ShardConfig
from corpus.shard import shard
from corpus.tokens.trained import TrainedSequences, split_fingerprint
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run, open_journal, read_journal
from infra.store.states import kept_states
from training.checkpoint.snapshot import STATE
from training.config import PretrainConfig, RlhfConfig, SftConfig
from training.pretrain import pretrain
from training.rlhf import rlhf
from training.sft import sft

Weights = Callable[[Path], dict[str, torch.Tensor]]
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
    "schedule": {"decay": "constant", "warmup": "4 batches"},
}
BATCH = 256 // 32
"""Sequences."""
LAUNCH = LaunchConfig(device="cpu", threads=1, precision="fp32")
WSD = {"decay": "wsd", "warmup": "4 batches", "decay_length": "8 batches"}


def _pretrain(folder: Path, inputs: Mapping[str, Path], launch: LaunchConfig = LAUNCH, **settings: Any) -> Path:
    config = PretrainConfig.model_validate(SETTINGS | settings)
    (folder / "model").mkdir(parents=True)
    with open_journal(folder / "journal.jsonl") as journal:
        run = Run(folder / "work", launch, journal=journal)
        pretrain(config, inputs, folder / "model", run)
        run.close()
    return folder / "model"


def _seen(folder: Path, shards: str = "") -> list[bool]:
    """What a model or a state says of the sequences of these shards; of those that were read last by default."""
    trained = TrainedSequences.read(folder)
    assert trained is not None
    seen = trained.of(shards or trained.shards)
    assert seen is not None
    return list(seen.tolist())


@pytest.fixture(scope="module")
def inputs(mixed_shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": mixed_shards_dir, "tokenizer": tokenizer_dir}


@pytest.fixture(scope="module")
def first(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 batches, with a state every 16, and the last."""
    folder = tmp_path_factory.mktemp("first")
    return _pretrain(folder, inputs, duration="40 batches", keep_state={"every": "16 batches"})


@pytest.mark.long
def test_states_are_kept_by_policy(first: Path, inputs: dict[str, Path], tmp_path: Path) -> None:
    states = kept_states(first)
    assert [state.batch for state in states] == [16, 32, 40]
    assert len({state.digest for state in states}) == 3
    model = _pretrain(tmp_path / "none", inputs, duration="16 batches", keep_state="none")
    assert not kept_states(model) and not (model / "aux" / "state").exists()
    # The same training, cut short where a state was kept: the same state.
    model = _pretrain(tmp_path / "last", inputs, duration="16 batches")
    assert [(state.batch, state.digest) for state in kept_states(model)] == [(16, states[0].digest)]
    # Each knows what was trained on until then.
    assert _seen(states[0].folder) == _seen(model) != _seen(states[1].folder)
    assert _seen(states[2].folder) == _seen(first)


@pytest.mark.parametrize(
    ("at", "schedule"), [(None, SETTINGS["schedule"]), ("32 batches", SETTINGS["schedule"]), ("32 batches", WSD)]
)
def test_going_on_unchanged_ends_with_the_bits_of_a_long_training(
    at: str | None, schedule: dict[str, Any], first: Path, inputs: dict[str, Path], weights: Weights, tmp_path: Path
) -> None:
    """Beyond an epoch's end, with dropout. With wsd, the state of a constant rate is the plateau of a branch."""
    settings = {"duration": "56 batches", "schedule": schedule}
    whole = _pretrain(tmp_path / "whole", inputs, **settings)
    branch = _pretrain(
        tmp_path / "branch", inputs | {"state": first}, continues={"step": "first", "at": at}, **settings
    )
    one, other = weights(whole), weights(branch)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert kept_states(whole)[-1].digest == kept_states(branch)[-1].digest
    assert (whole / "trained_sequences.json").read_bytes() == (branch / "trained_sequences.json").read_bytes()
    steps = [line["step"] for line in read_journal(tmp_path / "branch" / "journal.jsonl") if line["kind"] == "metric"]
    assert min(steps) == (32 if at else 40) + 1


def test_other_data_and_another_rate_from_a_state_on(
    first: Path, inputs: dict[str, Path], shards_dir: Path, weights: Weights, tmp_path: Path
) -> None:
    """The new data are read from their beginning; the optimizer goes on with what it has learnt of the old."""
    other = inputs | {"shards": shards_dir, "state": first}
    model = _pretrain(
        tmp_path / "other",
        other,
        duration="48 batches",
        optimizer={"learning_rate": 1.0e-3},
        continues={"step": "first"},
    )
    events = [line for line in read_journal(tmp_path / "other" / "journal.jsonl") if line["kind"] == "event"]
    assert any("at batch 40 of 48" in event["message"] for event in events)
    before, after = weights(first), weights(model)
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 0 < moved < 8 * 1.0e-3 * 1.5  # AdamW moves a weight by about the rate a batch

    old, new = (split_fingerprint(folder / "train") for folder in (inputs["shards"], shards_dir))
    assert _seen(model, old) == _seen(first) and sum(_seen(model, new)) == 8 * BATCH
    more = _pretrain(
        tmp_path / "more", other | {"state": model}, duration="52 batches", continues={"step": "other"}, seed=3
    )
    assert _seen(more, old) == _seen(first) and sum(_seen(more, new)) == 12 * BATCH
    both = [ours and theirs for ours, theirs in zip(_seen(more, new), _seen(model, new), strict=True)]
    assert both == _seen(model, new)
    early = _pretrain(tmp_path / "early", other, duration="20 batches", continues={"step": "first", "at": "16 batches"})
    assert _seen(early, old) == _seen(kept_states(first)[0].folder) and sum(_seen(early, new)) == 4 * BATCH


@pytest.mark.long
def test_a_training_goes_on_with_longer_sequences(
    first: Path, inputs: dict[str, Path], weights: Weights, tmp_path: Path
) -> None:
    """Twice as long, and beyond the positions of the first model."""
    (tmp_path / "longer").mkdir()
    long = ShardConfig(sequence_length=128, shard_mb=0.004, heldout_share=0.1)
    texts = {"documents": inputs["shards"].parent / "mix", "tokenizer": inputs["tokenizer"]}
    shard(long, texts, tmp_path / "longer", Run(tmp_path / "shard.work", LAUNCH))
    longer = inputs | {"shards": tmp_path / "longer", "state": first}
    with pytest.raises(StageError, match="positions"):
        _pretrain(tmp_path / "short", longer, duration="44 batches", continues={"step": "first"})
    settings = {"model": SETTINGS["model"] | {"positions": 128}, "duration": "44 batches"}
    model = _pretrain(tmp_path / "long", longer, continues={"step": "first"}, **settings)
    logged = [line.get("values", {}) for line in read_journal(tmp_path / "long" / "journal.jsonl")]
    losses = [values["train/loss"] for values in logged if "train/loss" in values]
    logged = [line.get("values", {}) for line in read_journal(first.parent / "journal.jsonl")]
    began = next(values["train/loss"] for values in logged if "train/loss" in values)
    assert len(losses) == 4 and max(losses) < began - 1  # it did not begin again
    before, after = weights(first), weights(model)
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 128


def test_a_training_goes_on_by_another_optimizer_and_back(
    first: Path, inputs: dict[str, Path], weights: Weights, tmp_path: Path
) -> None:
    """What the other optimizer kept of a matrix is no state of this one, which begins anew there."""
    rates: dict[str, Any] = {"learning_rate": 1.0e-3}
    by_muon = _pretrain(
        tmp_path / "muon",
        inputs | {"state": first},
        duration="43 batches",
        optimizer=rates | {"muon": {}},
        continues={"step": "first"},
    )
    back = _pretrain(
        tmp_path / "back",
        inputs | {"state": by_muon},
        duration="46 batches",
        optimizer=rates,
        continues={"step": "muon"},
    )
    logged = [line.get("values", {}) for line in read_journal(tmp_path / "muon" / "journal.jsonl")]
    rates_of = [(one["train/lr"], one["train/lr_muon"]) for one in logged if "train/loss" in one]
    assert rates_of == [(pytest.approx(1.0e-3), pytest.approx(0.02))] * 3
    before, between, after = map(weights, (first, by_muon, back))
    assert all(not torch.equal(before[name], between[name]) for name in before)
    assert all(not torch.equal(between[name], after[name]) for name in before)


def test_a_guard_and_a_loss_scale_that_the_state_knows_nothing_of_begin_anew(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    unguarded = _pretrain(tmp_path / "unguarded", inputs, duration="4 batches", guard={"enabled": False})
    more = inputs | {"state": unguarded}
    half = LaunchConfig(device="cpu", threads=1, precision="fp16")
    on = _pretrain(tmp_path / "on", more, half, duration="6 batches", continues={"step": "unguarded"})
    callbacks = json.loads((kept_states(on)[-1].folder / STATE).read_text(encoding="utf8"))["callbacks"]
    assert len(callbacks["Guard"]["start"]) == 2 and callbacks["LossScale"]["good"] == 2


def test_an_epoch_more_of_instructions(
    base_dir: Path, instructions_dir: Path, weights: Weights, tmp_path: Path
) -> None:
    given = {"model": base_dir, "instructions": instructions_dir}
    settings: dict[str, Any] = {
        "optimizer": {"learning_rate": 1.0e-3},
        "schedule": {"decay": "constant"},
        "global_batch_examples": 8,
        "answers_limit": 2,
    }

    def tuned(name: str, epochs: int, more: Mapping[str, Path], **extra: Any) -> Path:
        out = tmp_path / name
        out.mkdir()
        config = SftConfig.model_validate(settings | {"duration": f"{epochs} epochs"} | extra)
        sft(config, given | more, out, Run(tmp_path / f"{name}.work", LAUNCH))
        return out

    one = tuned("one", 1, {})
    two = tuned("two", 2, {})
    on = tuned("on", 2, {"state": one}, continues={"step": "one"})
    assert all(torch.equal(value, weights(on)[name]) for name, value in weights(two).items())


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"continues": {"step": "first", "at": "20 batches"}}, "no_state", "16, 32, 40"),
        ({"duration": "32 batches"}, "nothing_to_train", "more than the 40 batches"),
        ({"model": SETTINGS["model"] | {"width": 64}}, "other_architecture", "is [319, 32] there"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(
    settings: dict[str, Any], code: str, said: str, first: Path, inputs: dict[str, Path], tmp_path: Path
) -> None:
    given = {"duration": "48 batches", "continues": {"step": "first"}} | settings
    with pytest.raises(StageError) as refused:
        _pretrain(tmp_path / "refused", inputs | {"state": first}, **given)
    problem = refused.value.problems[0]
    assert problem.code == code and said in problem.message


def test_rlhf_goes_on_with_rounds_of_another_size(base_dir: Path, instructions_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithm": "rloo",
        "answers_per_prompt": 2,
        "rollout_prompts": 8,
        "minibatch_answers": 4,
        "answer_max_tokens": 4,
        "heldout_prompts": 2,
        "reward_functions": {"tests.training.rl.test_grading:brevity": 1.0},
        "rollouts": 2,
    }

    def trained(name: str, more: Mapping[str, Path], **extra: Any) -> Any:
        out = tmp_path / name
        out.mkdir()
        given = {"model": base_dir, "prompts": instructions_dir, **more}
        run = Run(tmp_path / f"{name}.work", LAUNCH)
        return rlhf(RlhfConfig.model_validate(settings | extra), given, out, run).figures

    assert trained("one", {})["batches"] == 4
    on: dict[str, Any] = {"more": {"state": tmp_path / "one"}, "continues": {"step": "one"}}
    assert trained("larger", **on, rollout_prompts=16)["batches"] == 8
    assert trained("smaller", **on, rollout_prompts=4, rollouts=6)["batches"] == 6
