"""What is measured of a trained model is the same in the training's process and alone, from the files of the model."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.config import StageConfig
from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run, read_journal
from infra.store.measurements import TRAINED
from tasks.processes.child import JOURNAL, OUTCOME, ChildOutcome, Job, _alone
from tasks.stages import STAGES
from training.checkpoint.export import copy_beside
from training.core.hardware import prepare
from training.train_modules.scorer import load_scorer

FAST = {"learning_rate": 3.0e-3, "weight_decay": 0.0}
SFT = {"duration": "4 batches", "global_batch_examples": 4, "max_length": 64, "answer_max_tokens": 6, "optimizer": FAST}
PAIRS = {"duration": "3 batches", "global_batch_pairs": 4, "max_length": 64, "optimizer": FAST}
ROUNDS = {"rollouts": 2, "rollout_prompts": 4, "minibatch_answers": 4, "answer_max_tokens": 6, "optimizer": FAST}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pretrain": (
        {"duration": "4 batches", "global_batch_tokens": 256, "optimizer": FAST, "model": {"preset": "llama-4m"}},
        {"validation_tokens": 64},
        "validation_loss",
    ),
    "sft": (SFT, {"heldout_limit": 3}, "heldout_loss_sft"),
    "sft-merged": (SFT | {"lora": {"rank": 2}, "start_share": 0.3}, {"answers_limit": 2}, "ends_share_sft_high"),
    "reward_model": (PAIRS, {"heldout_limit": 4}, "heldout_pairs"),
    "preference_tuning": (
        PAIRS | {"answer_max_tokens": 6, "heldout_prompts": 4},
        {"heldout_prompts": 2},
        "kl_to_reference",
    ),
    "rlhf": (ROUNDS | {"max_prompt_tokens": 50, "answers_per_prompt": 2}, {"best_of": 2}, "best_of_2_reward"),
}
"""Of each stage: its config, the key that is changed afterwards, and a figure that depends on it."""


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory,
    base_dir: Path,
    shards_dir: Path,
    tokenizer_dir: Path,
    instructions_dir: Path,
    preferences_dir: Path,
) -> dict[str, dict[str, Path]]:
    judges = tmp_path_factory.mktemp("judges")
    scorer = load_scorer(base_dir, prepare(LaunchConfig(device="cpu", threads=1)), seed=20261127)
    scorer.model.save_pretrained(judges / "reward")
    copy_beside(base_dir, judges / "reward")
    return {
        "pretrain": {"shards": shards_dir, "tokenizer": tokenizer_dir},
        "sft": {"model": base_dir, "instructions": instructions_dir},
        "reward_model": {"model": base_dir, "preferences": preferences_dir},
        "preference_tuning": {"model": base_dir, "preferences": preferences_dir},
        "rlhf": {"model": base_dir, "prompts": instructions_dir, "reward_model": judges / "reward"},
    }


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_measured_alone_as_in_the_process_that_trained_it(
    case: str, inputs: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    name = case.partition("-")[0]
    settings, changed, figure = CASES[case]
    module, config_class = importlib.import_module(f"training.{name}"), STAGES[name].config
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")

    def config(**more: Any) -> StageConfig:
        return config_class.model_validate({**settings, **more})

    trained = module.train(config(), inputs[name], tmp_path / "model", Run(tmp_path / "work", launch))
    assert trained.figures["batches"] > 0 and figure not in trained.figures
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    at_once = trained.measure(tmp_path / "at once", Run(tmp_path / "work", launch))
    given = {**inputs[name], TRAINED: tmp_path / "model"}

    def alone(out: str, **more: Any) -> Any:
        return module.measure_trained(config(**more), given, tmp_path / out, Run(tmp_path / "alone.work", launch))

    again = alone("again")
    assert again.figures == at_once.figures and again.headline == at_once.headline
    assert files_below(tmp_path / "again") == files_below(tmp_path / "at once")
    other = alone("other", **changed)
    assert other.figures.get(figure) != at_once.figures.get(figure)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("name", ["pretrain", "sft", "reward_model", "preference_tuning", "rlhf"])
def test_a_model_whose_hidden_states_overflow_is_no_result(
    name: str, inputs: dict[str, dict[str, Path]], tmp_path: Path
) -> None:
    """Its weights are finite; its losses are not."""
    source = inputs["rlhf"]["reward_model"] if name == "reward_model" else inputs["sft"]["model"]
    trained = Path(shutil.copytree(source, tmp_path / "trained"))
    weights = load_file(trained / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.finfo(torch.float32).max)
    save_file(weights, trained / "model.safetensors", {"format": "pt"})
    config = STAGES[name].config.model_validate(CASES[name][0])
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    measure = importlib.import_module(f"training.{name}").measure_trained
    with pytest.raises(StageError, match=r"finite losses; .* is (nan|inf)|finite logits") as told:
        measure(config, {**inputs[name], TRAINED: trained}, tmp_path / "out", Run(tmp_path / "work", launch))
    assert told.value.problems[0].code == "not_finite"


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.measured_by])
def test_every_model_has_a_measurement_of_the_same_config_that_reads_it(name: str) -> None:
    stage, measuring = STAGES[name], STAGES[STAGES[name].measured_by]
    assert measuring.config is stage.config and measuring.makes == "measurement"
    trained = measuring.input(TRAINED)
    assert trained is not None and trained.takes == (stage.makes,) and callable(measuring.load())


@pytest.mark.parametrize("fault", [RuntimeError("no room"), Cancelled()])
def test_a_model_is_built_though_measuring_it_ends_before_its_time(
    fault: Exception, inputs: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise fault

    monkeypatch.setattr("training.sft._compared", fails)
    for folder in ("out", "measured", "scratch"):
        (tmp_path / folder).mkdir()
    job = Job(
        "sft",
        "sft",
        SFT,
        LaunchConfig(device="cpu", threads=1).model_dump(mode="json"),
        {name: str(folder) for name, folder in inputs["sft"].items()},
        str(tmp_path / "out"),
        str(tmp_path / "scratch"),
        measurement=str(tmp_path / "measured"),
    )
    word = tmp_path / "scratch" / OUTCOME
    outcome = _alone(job, lambda: False, lambda: None, word)
    assert outcome.is_built and outcome.measuring and outcome.measured is None
    assert outcome.figures["batches"] == 4 and (tmp_path / "out" / "model.safetensors").exists()
    said = ChildOutcome.read(word)
    assert said is not None and said.is_built and said.measuring, "of a process that is killed from here on that stays"
    events = [line for line in read_journal(tmp_path / "scratch" / JOURNAL) if line.get("name") == "not_measured"]
    assert len(events) == (0 if isinstance(fault, Cancelled) else 1)
