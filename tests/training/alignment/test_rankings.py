"""The reward model on rankings: InstructGPT's loss, ties, margins, length, calibration; through the stage."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from infra.errors import StageError
from infra.run import Run
from tests.support.chat_templates import tokenizer_in
from tests.support.open_models import save_model
from tests.training.conftest import NOUNS, VERBS, write_rows
from training.adopt import import_model
from training.chat.base import Chat, pad
from training.config import BaseModelConfig, RewardModelConfig
from training.core.hardware import Hardware
from training.core.train_state import split_batch
from training.data.preferences import balanced, fitted_rankings, ranking_batch
from training.reward_model import reward_model
from training.train_modules.scorer import RewardModel, load_scorer, score_pairs
from training.validation.reward_figures import calibration_figures, length_figures

CPU = Hardware(torch.device("cpu"), bf16=False)
FAST = {"learning_rate": 3.0e-3, "weight_decay": 0.0}


def _row(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"id": f"{prompt}{chosen}{rejected}", "prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def _ranked(prompt: str, answers: list[str]) -> list[dict[str, Any]]:
    return [_row(prompt, *both, ranking=prompt) for both in itertools.combinations(answers, 2)]


def test_the_loss_is_the_mean_over_a_prompts_pairs_whatever_the_microbatch(base_dir: Path) -> None:
    """Against one pair at a time with numpy: shares of votes, ties, margins, and padding beside a plain pair."""
    chat, model = Chat.load(base_dir), RewardModel(load_scorer(base_dir, CPU, seed=3), margin_coef=0.5)
    rows = [
        *_ranked("What?", ["Sort the list.", "Copy the file, and the array.", "No.", "Load."]),
        _row("Why?", "Yes.", "No.", votes=[3.0, 1.0], margin=2.0),
        _row("How?", "Sort.", "Load the string.", votes=[0.5, 0.5], margin=2.0),
        _row("And?", "So.", "Write the tensor."),
    ]
    rankings = fitted_rankings(chat, rows, 100, "drop").examples
    assert [len(one.answers) for one in rankings] == [4, 2, 2, 2], "no answer is computed twice"
    scores = score_pairs(model, rankings, chat.pad)
    alone = [score_pairs(model, fitted_rankings(chat, [row], 100, "drop").examples, chat.pad)[0] for row in rows]
    np.testing.assert_allclose(scores, np.array(alone), atol=1e-5)
    d = scores[:, 0] - scores[:, 1]

    def cost(margin: float) -> float:
        return float(np.log1p(np.exp(-margin)))

    expected = [
        np.mean([cost(one) for one in d[:6]]),
        0.75 * cost(d[6] - 1) + 0.25 * cost(-d[6] - 1),
        0.5 * cost(d[7]) + 0.5 * cost(-d[7]),
        cost(d[8]),
    ]
    batch = ranking_batch(rankings, chat.pad)
    outputs = model(batch)
    assert float(model.loss(outputs, batch)) == pytest.approx(np.mean(expected), abs=1e-5)
    assert model.example_losses(outputs, batch)[0].tolist() == pytest.approx(expected, abs=1e-5)
    model.loss(outputs, batch).backward()
    whole = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    for part in split_batch(batch, 1):
        (model.loss(model(part), part) / 4).backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, whole[name], rtol=1e-4, atol=1e-6)


def test_margins_are_trl_s(base_dir: Path) -> None:
    from trl import RewardTrainer

    chat, model = Chat.load(base_dir), RewardModel(load_scorer(base_dir, CPU, seed=3).eval(), margin_coef=1.0)
    rows = [_row("What?", "Sort the list.", "No.", margin=0.7), _row("Why?", "Copy the file.", "Load.", margin=0.2)]
    batch = ranking_batch(fitted_rankings(chat, rows, 100, "drop").examples, chat.pad)
    ids = torch.cat([batch["input_ids"][:, 0], batch["input_ids"][:, 1]])
    names = ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")
    itself: Any = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=None),
        accelerator=SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value),
        _metrics={"eval": {name: [] for name in names}},
        _total_train_tokens=0,
    )
    inputs = {"input_ids": ids, "attention_mask": (ids != chat.pad).long(), "margin": batch["margin"][:, 0]}
    theirs = RewardTrainer.compute_loss(itself, model.scorer.model, inputs)
    assert float(model.loss(model(batch), batch)) == pytest.approx(float(theirs), abs=1e-5)


def test_answers_of_a_ranking_stay_whole_and_have_one_prompt(base_dir: Path) -> None:
    chat = Chat.load(base_dir)
    rows = _ranked("q" * 60, ["z" * 20, "Yes.", "No."]) + _ranked("Why?", ["z" * 80, "Yes.", "No."])
    rows.append(_row("a", "b", "c"))
    found = fitted_rankings(chat, rows, 48, "cut_prompt")
    assert (found.cut, found.dropped, found.rows) == (1, 1, [*rows[:3], rows[6]])
    first = found.examples[0].answers
    assert max(len(one.ids) for one in first) == 48 and len({tuple(one.prompt) for one in first}) == 1
    assert first[0].response == [*chat.encode(["z" * 20])[0], chat.end]
    assert fitted_rankings(chat, rows, 48, "drop").rows == [rows[6]]


def test_balanced_pairs_say_nothing_by_their_lengths(base_dir: Path) -> None:
    """Six pairs whose better answer is the longer by a little, two the other way round, one by far longer."""
    chat = Chat.load(base_dir)
    rows = [_row(f"l{n}", "Sort the list. x", "No.") for n in range(6)]
    rows += [_row(f"s{n}", "No.", "Sort the list. x") for n in range(2)]
    rows += [_row("far", "z" * 60, "No."), _row("equal", "b", "c"), _row("tie", "Sort.", "c", votes=[1.0, 1.0])]
    rankings = fitted_rankings(chat, rows, 200, "drop").examples
    found, nothing = balanced(rankings)
    weights = {row["prompt"]: one.pairs[0].weight for row, one in zip(rows, found, strict=True)}
    assert nothing == 1 and weights["far"] == 0
    assert sum(weights[f"l{n}"] for n in range(6)) == pytest.approx(sum(weights[f"s{n}"] for n in range(2)))
    assert weights["equal"] == weights["tie"] == weights["s0"] > weights["l0"] > 0
    assert np.mean([*weights.values()]) == pytest.approx(1)
    assert balanced(rankings[:6]) == ([], 6)


def test_figures_tell_length_from_quality_and_confidence_from_truth(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    longer = random.integers(-20, 21, 400).astype(float)
    by_length = length_figures(longer / 10, longer, np.arange(400))
    assert by_length["heldout_accuracy_chosen_longer"] == 1 and by_length["heldout_accuracy_chosen_shorter"] == 0
    assert by_length["reward_per_token"] == pytest.approx(0.1) and by_length["margin_equal_length"] == pytest.approx(0)
    assert by_length["chosen_longer"] == pytest.approx((longer > 0).sum() / (longer != 0).sum())
    # Margins from a model that knows how sure it may be, and from one that claims twice that.
    size = np.abs(random.normal(0, 1.5, 20_000))
    margins = np.where(random.random(20_000) < 1 / (1 + np.exp(-size)), size, -size)
    honest, boasting = (
        calibration_figures(times * margins, tmp_path / f"{times}.json", np.arange(20_000)) for times in (1, 2)
    )
    assert honest["calibration_error"] < 0.02 < 0.05 < boasting["calibration_error"]
    assert honest["brier"] < boasting["brier"] and boasting["mean_confidence"] > honest["mean_confidence"]
    assert len(json.loads((tmp_path / "1.json").read_text())) == 10


def test_the_stage_learns_rankings_with_ties_and_says_what_length_has_to_do_with_it(
    base_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    rows = []
    for verb, start in VERBS.items():
        for noun in NOUNS:
            said = f"{start} {noun}."
            ranked = _ranked(f"What does {verb}_{noun} do?", [said, "Peel the banana.", f"Eat the {noun} for lunch."])
            rows.append([*ranked[:2], {**ranked[2], "votes": [0.5, 0.5]}])
    folder = tmp_path / "preferences"
    folder.mkdir()
    write_rows(folder / "train.jsonl", [row for those in rows[8:] for row in those])
    write_rows(folder / "heldout.jsonl", [row for those in rows[:8] for row in those])
    settings = {"duration": "16 epochs", "global_batch_pairs": 8, "max_length": 64, "optimizer": FAST}
    inputs = {"model": base_dir, "preferences": folder}
    config = RewardModelConfig.model_validate(settings)
    figures = reward_model(config, inputs, tmp_path / "out", run).figures
    assert (figures["heldout_pairs"], figures["heldout_ties"], figures["heldout_rankings"]) == (16, 8, 8)
    assert figures["heldout_accuracy"] > 0.9 and figures["margin_low"] > 0
    assert figures["p_value"] >= 0.5**8, "the pairs of a ranking hang together"
    assert {"chosen_longer", "margin_equal_length", "calibration_error", "brier_high"} <= figures.keys()
    assert (tmp_path / "out" / "aux" / "calibration.json").exists()
    write_rows(folder / "train.jsonl", [_row(f"{n}", "The longer answer.", "No.") for n in range(8)])
    with pytest.raises(StageError, match=r"reward_model\.balance_lengths.*always the longer or always the shorter"):
        config = RewardModelConfig.model_validate(settings | {"balance_lengths": True})
        reward_model(config, inputs, tmp_path / "none", Run(tmp_path / "other", run.launch))


@pytest.mark.parametrize("family", ["llama3", "deepseek"])
def test_transformers_reads_the_scores_that_were_learnt(
    family: str, preferences_dir: Path, tmp_path: Path, run: Run
) -> None:
    """Padded on either side, by the exported tokenizer; DeepSeek pads with the token that ends its answers."""
    tokenizer = tokenizer_in(family)
    if family == "deepseek":
        tokenizer.pad_token = tokenizer.eos_token
    save_model(tmp_path / "model", tokenizer)
    (tmp_path / "base").mkdir()
    import_model(BaseModelConfig(path=str(tmp_path / "model")), {}, tmp_path / "base", run)
    config = RewardModelConfig.model_validate({"duration": "1 batch", "global_batch_pairs": 4, "heldout_limit": 2})
    inputs = {"model": tmp_path / "base", "preferences": preferences_dir}
    reward_model(config, inputs, tmp_path / "out", Run(tmp_path / "reward.work", run.launch))
    chat, scorer = Chat.load(tmp_path / "base"), load_scorer(tmp_path / "out", CPU).eval()
    ids = [one.ids for one in chat.conversations(["Why is it so, and what of it?", "b"], ["Sort it all.", "No."])]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.pad_token_id == model.config.pad_token_id and theirs.get_vocab() == chat.tokenizer.get_vocab()
    with torch.no_grad():
        expected = scorer(pad(ids, chat.pad), torch.tensor([len(one) - 1 for one in ids]))
        for side in ("right", "left"):
            theirs.padding_side = side
            scores = model(**theirs.pad({"input_ids": ids}, return_tensors="pt")).logits[:, 0]
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
