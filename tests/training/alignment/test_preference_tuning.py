"""DPO, IPO, KTO and ORPO on a model of two layers: what they learn, what has no room, ranks, and going on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import train_in_ranks
from tests.training.conftest import write_rows
from training.chat.base import Chat
from training.checkpoint.export import copy_beside
from training.config import PreferenceTuningConfig, RlhfConfig
from training.core import ranks
from training.core.hardware import prepare
from training.data.preferences import fitted_pairs
from training.model.models import load
from training.preference_tuning import _examples, preference_tuning
from training.rlhf import rlhf
from training.train_modules.language_model import LanguageModel
from training.train_modules.preference_losses import dpo, ipo, kto, log_odds, orpo
from training.train_modules.preference_model import Mismatched, PreferenceTuned
from training.train_modules.scorer import load_scorer
from training.trainer import microbatch

SETTINGS: dict[str, Any] = {
    "duration": "12 batches",
    "global_batch_pairs": 8,
    "max_length": 64,
    "answer_max_tokens": 8,
    "heldout_prompts": 4,
    "evaluate_pairs": 4,
    "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def inputs(base_dir: Path, preferences_dir: Path) -> dict[str, Path]:
    return {"model": base_dir, "preferences": preferences_dir}


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo"])
def test_the_chosen_answers_gain_on_held_out_pairs(
    loss: str, inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"loss": loss, "beta": 1.0 if loss == "orpo" else 0.1})
    result = preference_tuning(config, inputs, tmp_path / "out", run)
    figures = result.figures
    assert figures["win_rate"] == 1.0 and figures["win_rate_low"] > 0.5 and figures["p_value"] == 0.5**8
    assert 0 < figures["margin_low"] < figures["margin"] < figures["margin_high"]
    assert figures["margin"] == pytest.approx(figures["chosen_rise"] - figures["rejected_rise"])
    assert figures["prefers_chosen_policy"] >= figures["prefers_chosen_reference"]
    assert figures["kl_to_reference"] > 0 and figures["prompts_cut"] == figures["pairs_dropped"] == 0
    losses, margins = journal.metric("train/loss"), journal.metric("preference/margin")
    assert losses[-1] < losses[0] and margins[0] == pytest.approx(0, abs=1e-4) and margins[-1] > 1
    if loss != "orpo":
        assert losses[0] == pytest.approx({"dpo": np.log(2), "ipo": 25.0, "kto": 0.5}[loss], abs=1e-3)
    assert len(journal.metric("validation/sample_margin")) == 6
    lines = [json.loads(line) for line in (tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and lines[0]["answers"].keys() == {"reference", "policy"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, 4]


def test_a_judge_scores_the_answers_of_both_models(inputs: dict[str, Path], base_dir: Path, tmp_path: Path) -> None:
    launch = LaunchConfig(device="cpu", threads=1)
    load_scorer(base_dir, prepare(launch), seed=1).model.save_pretrained(tmp_path / "judge")
    copy_beside(base_dir, tmp_path / "judge")
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"duration": "2 batches"})
    figures = preference_tuning(
        config, inputs | {"judge": tmp_path / "judge"}, tmp_path / "out", Run(tmp_path / "work", launch)
    ).figures
    gain = figures["heldout_judge_policy"] - figures["heldout_judge_reference"]
    assert figures["judge_gain"] == pytest.approx(gain)
    line = json.loads((tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()[0])
    assert line["judge"].keys() == line["answers"].keys()


def _other_tokenizer(judge: Path) -> None:
    text = json.loads((judge / "tokenizer.json").read_text())
    ids = text["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (judge / "tokenizer.json").write_text(json.dumps(text))


def _fewer_positions(judge: Path) -> None:
    settings = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 7}))


@pytest.mark.parametrize("stage", ["preference_tuning", "rlhf"])
@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (_other_tokenizer, "other_vocabulary", "4 entries of them differ"),
        (_fewer_positions, "too_few_positions", "a prompt with its answer, not 7"),
    ],
)
def test_a_judge_that_cannot_read_the_answers_is_refused_at_once(
    stage: str,
    change: Callable[[Path], None],
    code: str,
    said: str,
    inputs: dict[str, Path],
    base_dir: Path,
    instructions_dir: Path,
    tmp_path: Path,
    run: Run,
    journal: Any,
) -> None:
    """It would read other text than was answered, or a part of it, and score that."""
    judge = tmp_path / "judge"
    load_scorer(base_dir, prepare(run.launch), seed=1).model.save_pretrained(judge)
    copy_beside(base_dir, judge)
    change(judge)
    with pytest.raises(StageError, match=said) as caught:
        if stage == "rlhf":
            given = {"model": base_dir, "prompts": instructions_dir, "reward_model": judge}
            sizes = {"rollouts": 1, "rollout_prompts": 4, "minibatch_answers": 4, "answer_max_tokens": 4}
            rlhf(RlhfConfig.model_validate(sizes), given, tmp_path / "out", run)
        else:
            preference_tuning(
                PreferenceTuningConfig.model_validate(SETTINGS), inputs | {"judge": judge}, tmp_path / "out", run
            )
    assert [one.code for one in caught.value.problems] == [code]
    assert not journal.metric("train/loss")


@pytest.mark.parametrize("loss", ["kto"])
def test_a_stopped_training_goes_on_to_the_same_weights(
    loss: str, inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    config = PreferenceTuningConfig.model_validate(
        SETTINGS | {"loss": loss, "checkpoint_every": "2 batches", "duration": "7 batches"}
    )
    preference_tuning(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch))
    stopped = Run(
        run.work_dir, run.launch, is_cancelled=lambda: len(journal.metric("train/loss")) >= 5, journal=journal
    )  # type: ignore[arg-type]
    with pytest.raises(Exception, match="cancelled"):
        preference_tuning(config, inputs, tmp_path / "stopped", stopped)
    preference_tuning(config, inputs, tmp_path / "continued", run)
    assert any(message.startswith("continuing preference_tuning at batch 5") for message in journal.events())
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("continued", "unbroken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("loss", "sharding"), [("dpo", "ddp"), ("kto", "fsdp")])
def test_ranks_and_microbatches_end_with_the_weights_of_one_process(
    loss: str, sharding: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    # With AdamW's own eps, or clipped, the scale of gradients would not show.
    optimizer = {**SETTINGS["optimizer"], "eps": 1e-5, "gradient_clip": 1e3}
    settings = SETTINGS | {"loss": loss, "duration": "4 batches", "optimizer": optimizer}
    train_in_ranks("preference_tuning", 1, settings, inputs, tmp_path / "one")
    told = {"sharding": sharding, "microbatch": 2}
    train_in_ranks("preference_tuning", 2, settings, inputs, tmp_path / "two", launch=told)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [("abc", "bca"), ("aaabbc", "bbbcca"), ("abbba", "baaab"), ("aa", "aa")],
    ids=["pairs", "rankings", "the last prompt is the first", "one prompt"],
)
def test_kto_judges_a_prompt_by_answers_to_another(prompts: str, expected: str, base_dir: Path) -> None:
    chat, config = Chat.load(base_dir), PreferenceTuningConfig.model_validate(SETTINGS | {"loss": "kto"})
    rows = [
        {"prompt": f"Why {prompt}?", "chosen": f"{prompt} good {number}", "rejected": f"{prompt} bad {number}"}
        for number, prompt in enumerate(prompts)
    ]
    examples = _examples(fitted_pairs(chat, rows, 64, "drop"), config, chat, 64)
    for example, prompt, other in zip(examples, prompts, expected, strict=True):
        assert example.mismatched
        for name, one in (("good", example.mismatched.chosen), ("bad", example.mismatched.rejected)):
            assert chat.decode(one.response).startswith(f"{other} {name}")
            assert one.prompt == chat.prompts([f"Why {prompt}?"], 64)[0]
    of_last = examples[-1].mismatched
    assert of_last and (of_last.chosen.response != examples[-1].pair.chosen.response)


def test_what_kto_holds_answers_against_is_of_the_whole_batch_over_all_ranks(
    base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"loss": "kto"})
    model = PreferenceTuned(LanguageModel(load(base_dir), prepare(LaunchConfig())), config)
    ids = torch.randint(5, 300, (3, 4, 9), generator=torch.Generator().manual_seed(1))
    reference = torch.full((3, 4), -500.0)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 2), "reference": reference, "kl": torch.zeros(3)}
    with torch.no_grad():
        risen = model(batch).sums - reference
    # Another rank's share of the batch: 6 mismatched answers that rose by 300 nats together.
    monkeypatch.setattr(ranks, "all_reduce", lambda ours: ours + torch.tensor([300.0, 6.0], dtype=torch.float64))
    state: Any = SimpleNamespace(batch=batch, device=torch.device("cpu"))
    Mismatched(model).batch_start(state)
    expected = float(risen[:, 2:].double().sum() + 300) / (6 + 6)
    assert expected > 100
    torch.testing.assert_close(state.batch["kl"], torch.full((3,), expected))
    assert state.batch["input_ids"].shape == (3, 2, 9), "the mismatched answers leave the batch"


def test_how_many_pairs_fit_is_tried_without_the_answers_that_bear_no_gradient(
    inputs: dict[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where memory is tried; the weights are those of a training that tried nothing."""
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"loss": "kto", "duration": "2 batches"})
    preference_tuning(config, inputs, tmp_path / "untried", Run(tmp_path / "other", run.launch))
    tried = []
    forward = PreferenceTuned.forward

    def counted(self: PreferenceTuned, batch: dict[str, Tensor]) -> Any:
        if torch.is_grad_enabled():
            tried.append(tuple(batch["input_ids"].shape[:2]))
        return forward(self, batch)

    monkeypatch.setattr(microbatch, "can_be_tried", lambda device: True)
    monkeypatch.setattr(PreferenceTuned, "forward", counted)
    preference_tuning(config, inputs, tmp_path / "tried", run)
    assert tried == [(8, 2)] * 4, "twice before the first batch, then once a batch"
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("tried", "untried"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_answers_stay_whole_and_what_has_no_room_is_counted(base_dir: Path) -> None:
    chat = Chat.load(base_dir)
    rows = [
        {"prompt": "q" * 60 + "?", "chosen": "Sort the list.", "rejected": "z" * 20},
        {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Why?", "chosen": "z" * 80, "rejected": "No."},
    ]
    fitted = fitted_pairs(chat, rows, 48, "cut_prompt")
    assert (fitted.cut, fitted.dropped) == (1, 1) and fitted.rows == rows[:2]
    long = fitted.examples[0]
    assert long.chosen.prompt == long.rejected.prompt
    assert max(len(long.chosen.ids), len(long.rejected.ids)) == 48
    assert long.rejected.response == [*chat.encode(["z" * 20])[0], chat.end]
    assert long.chosen.prompt[-5:] == chat.prompts(["q" * 60 + "?"], 1000)[0][-5:]
    dropped = fitted_pairs(chat, rows, 48, "drop")
    assert (dropped.cut, dropped.dropped) == (0, 2) and dropped.rows == rows[1:2]


def test_pairs_that_all_have_no_room_stop_the_stage_by_name(inputs: dict[str, Path], tmp_path: Path, run: Run) -> None:
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"max_length": 12, "too_long": "drop"})
    with pytest.raises(StageError, match=r"preference_tuning\.max_length.*are longer"):
        preference_tuning(config, inputs, tmp_path / "out", run)


def test_prompts_longer_than_the_context_are_shortened_and_reported(
    base_dir: Path, preferences_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    """Far more than the model's 128 positions: what decides is at the end, and is kept."""
    long = tmp_path / "long"
    long.mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = [json.loads(line) for line in (preferences_dir / name).read_text().splitlines()]
        write_rows(long / name, [row | {"prompt": f"{'Once upon a time. ' * 40}{row['prompt']}"} for row in rows])
    given = {"model": base_dir, "preferences": long}
    config = PreferenceTuningConfig.model_validate(SETTINGS | {"max_length": 4096})
    result = preference_tuning(config, given, tmp_path / "out", run)
    assert result.figures["win_rate"] == 1.0 and result.figures["pairs_dropped"] == 0
    assert result.figures["prompts_cut"] == len((long / "train.jsonl").read_text().splitlines())
    assert any("truncated at the beginning" in event and "128 tokens" in event for event in journal.events())
    samples = (tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4 and all(isinstance(text, str) for text in json.loads(samples[0])["answers"].values())


def _numbers() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    chosen, rejected = (torch.randn(6, generator=random, dtype=torch.float64) for _ in range(2))
    return chosen, rejected


def test_the_losses_are_the_papers_formulas() -> None:
    """With numpy, from the equations that the docstrings name; against trl on a model in test_trl.py."""
    chosen, rejected = _numbers()
    c, r = chosen.numpy(), rejected.numpy()

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    np.testing.assert_allclose(dpo(chosen, rejected, 0.3), -np.log(sigmoid(0.3 * (c - r))))
    np.testing.assert_allclose(ipo(chosen, rejected, 0.3), (c - r - 1 / 0.6) ** 2)
    wanted = 2 * (1 - sigmoid(0.3 * (c - 0.5))) + 0.5 * (1 - sigmoid(0.3 * (0.5 - r)))
    np.testing.assert_allclose(kto(chosen, rejected, torch.tensor(0.5), 0.3, 2.0, 0.5), wanted / 2)
    c, r = -np.abs(c), -np.abs(r)
    odds = np.exp(c) / (1 - np.exp(c)) / (np.exp(r) / (1 - np.exp(r)))
    found = orpo(-chosen.abs(), -rejected.abs(), 0.3)
    np.testing.assert_allclose(found, -c - 0.3 * np.log(sigmoid(np.log(odds))), rtol=1e-6)
    assert torch.isfinite(log_odds(torch.zeros(1)))
