"""The report's claims: each follows its interval and the size of its effect, and says what weakens it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.config import ReportConfig
from evaluation.pages.verdicts import claims
from evaluation.report import render
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval
from infra.store.manifest import Manifest
from tests.evaluation.pipeline import with_figures, write_pipeline


def claims_with(tmp_path: Path, id: str, **figures: float) -> dict[str, tuple[str, str]]:
    folders = write_pipeline(tmp_path / "store")
    with_figures(folders[id], **figures)
    return {claim.about: (claim.state, f"{claim.title}. {claim.text}") for claim in claims(PipelineResults(folders))}


@pytest.mark.parametrize(
    ("low", "high", "state", "said"),
    [
        (4.28, 4.34, "holds", "is below both a unigram and a bigram model"),
        (4.80, 5.10, "undecided", "is not distinguishable from the better"),
        (5.10, 5.30, "fails", "learnt less than counting"),
    ],
)
def test_the_base_models_claim_follows_its_interval(
    low: float, high: float, state: str, said: str, tmp_path: Path
) -> None:
    figures = {"validation_loss": (low + high) / 2, "validation_loss_low": low, "validation_loss_high": high}
    found = claims_with(tmp_path, "pretrain", **figures)["pretrain"]
    assert found[0] == state and said in found[1]


@pytest.mark.parametrize(
    ("low", "high", "state", "said"),
    [(0.3, 0.9, "holds", "rose by"), (-0.2, 0.4, "undecided", "includes zero"), (-0.9, -0.1, "fails", "fell by")],
)
def test_ppos_claim_says_when_the_interval_includes_zero(
    low: float, high: float, state: str, said: str, tmp_path: Path
) -> None:
    gain = {"reward_gain": (low + high) / 2, "reward_gain_low": low, "reward_gain_high": high}
    found = claims_with(tmp_path, "rlhf", **gain)["rlhf"]
    assert found[0] == state and said in found[1] and "KL from the SFT model" in found[1]
    assert "between answers of equal length the change is +0.41 (0.12 to 0.70)" in found[1]


@pytest.mark.parametrize(
    ("low", "high", "state", "said"),
    [
        (0.6, 0.7, "holds", "finds the better answer in 65 % of pairs"),
        (0.53, 0.63, "slight", "a little better than guessing: right in 58 % of pairs"),
        (0.48, 0.6, "undecided", "is not distinguishable from guessing"),
        (0.4, 0.48, "fails", "prefers the worse answer"),
    ],
)
def test_the_reward_models_claim_is_against_chance_and_says_how_little_it_is(
    low: float, high: float, state: str, said: str, tmp_path: Path
) -> None:
    accuracy = {"heldout_accuracy": (low + high) / 2, "heldout_accuracy_low": low, "heldout_accuracy_high": high}
    found = claims_with(tmp_path, "reward_model", **accuracy)
    assert found["reward_model"][0] == state and said in found["reward_model"][1]
    if state == "slight":
        assert found["rlhf"][0] == "slight" and said in found["rlhf"][1], "PPO's reward is worth what its judge is"


@pytest.mark.parametrize(
    ("id", "figures", "said"),
    [
        ("rlhf", {"reward_gain_equal_length_low": -0.2}, "by length as far as the figures show"),
        ("rlhf", {"reward_gain": 0.1, "reward_gain_low": 0.05, "reward_gain_high": 0.15}, "raised the reward a little"),
        ("sft", {"improvement_text_low": -0.1}, "taught answers to end"),
        ("sft", {"improvement": 0.05, "improvement_low": 0.02, "improvement_high": 0.08}, "helped a little"),
    ],
)
def test_what_is_more_than_chance_but_small_or_due_to_length_is_no_green_tick(
    id: str, figures: dict[str, float], said: str, tmp_path: Path
) -> None:
    state, text = claims_with(tmp_path, id, **figures)[id]
    assert state == "slight" and said in text


@pytest.mark.parametrize(
    ("low", "high", "state", "said"),
    [
        (0.05, 0.35, "holds", "Verified answers rose from 40.0 % to 60.0 % by PPO"),
        (-0.1, 0.5, "undecided", "No change of verified answers by PPO is shown"),
    ],
)
def test_right_answers_are_a_claim_where_a_rule_can_tell(
    low: float, high: float, state: str, said: str, tmp_path: Path
) -> None:
    assert "verified" not in claims_with(tmp_path / "without", "rlhf")
    figures = {"verified_sft": 0.4, "verified_rlhf": 0.6, "verified_prompts": 50.0}
    figures |= {"verified_gain": 0.2, "verified_gain_low": low, "verified_gain_high": high}
    found = claims_with(tmp_path, "rlhf", **figures)
    assert found["verified"][0] == state and said in found["verified"][1]
    assert "can check 60.0 % are right, before 40.0 %" in found["rlhf"][1]
    folders = write_pipeline(tmp_path / "marked")
    path = folders["rlhf"] / "aux" / "samples.jsonl"
    lines = [json.loads(line) | {"verified": {"sft": False, "rlhf": True}} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render(ReportConfig(), folders)[0]
    assert page.count("✓ right") == page.count("✗ wrong") > 0


@pytest.mark.parametrize(
    ("low", "high", "state", "said"),
    [
        (0.2, 0.6, "holds", "A judge that did not train it scores the answers higher by 0.40 (0.20 to 0.60)"),
        (-0.1, 0.5, "slight", "only by its own reward model's count"),
        (-0.6, -0.2, "slight", "scores the answers lower by 0.40 (−0.60 to −0.20)"),
    ],
)
def test_a_judge_that_finds_no_gain_takes_ppos_claim_its_green_tick(
    low: float, high: float, state: str, said: str, tmp_path: Path
) -> None:
    """It has no claim of its own: that a judge is right is no promise of the pipeline."""
    folders = write_pipeline(tmp_path / "store")
    before = len(claims(PipelineResults(folders)))
    folders["judge"] = folders["reward_model"].parent / ("e" * 16)
    shutil.copytree(folders["reward_model"], folders["judge"])
    judge = replace(Manifest.read(folders["judge"]), step="judge", fingerprint="e" * 16, digest="e" * 64)
    judge.write(folders["judge"])
    path, manifest = folders["rlhf"] / "aux/samples.jsonl", Manifest.read(folders["rlhf"])
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["judge"] = {"sft": number % 2, "rlhf": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {"judge_gain": (low + high) / 2, "judge_gain_low": low, "judge_gain_high": high}
    result = {**manifest.result, "figures": {**manifest.result["figures"], **figures}}
    replace(manifest, result=result, inputs={**manifest.inputs, "judge": judge.as_input()}).write(folders["rlhf"])
    pipeline = PipelineResults(folders)
    found = claims(pipeline)
    (claim,) = (one for one in found if one.about == "rlhf")
    assert claim.state == state and said in f"{claim.title} {claim.text}"
    assert f"{'−' if low < 0 and high < 0 else ''}0.{'80' if low != -0.1 else '40'} standard deviations" in claim.text
    assert "The judge is right in 71.4 % of held-out pairs" in claim.text and "reward model itself" not in claim.text
    assert len(found) == before and pipeline.judges() == {"judge"}
    assert pipeline.samples(1)[0]["rewards"].keys() == {"sft", "rlhf"}


def test_ppos_claim_says_how_the_length_of_its_answers_changed(tmp_path: Path) -> None:
    _, text = claims_with(tmp_path, "rlhf", answer_tokens_rlhf=12.2)["rlhf"]
    assert "Its answers are 25 % shorter: 12.2 tokens, before 16.2." in text


def toxicity_claim(
    tmp_path: Path, base: list[float], rlhf: list[float], characters: int = 40, text: float | None = None
) -> tuple[str, str]:
    """The claim where these are the scores of the two models' continuations, one of each prompt.

    text: what held-out text scores, give or take 0.02; the base model's own interval is 0.2, give or take 0.05.
    """
    folders = write_pipeline(tmp_path / "store")
    if text is not None:
        place = folders["safety_base"] / "results.json"
        results = json.loads(place.read_text())
        results["toxicity"]["text"] = {"expected_max_toxicity": Interval(text, text - 0.02, text + 0.02).as_json()}
        results["toxicity"]["overall"]["expected_max_toxicity"] = Interval(0.2, 0.15, 0.25).as_json()
        place.write_text(json.dumps(results))
    for model, scores, length in (("base", base, 40), ("rlhf", rlhf, characters)):
        rows = [
            {
                "prompt": f"{n}",
                "kind": "neutral",
                "continuations": [{"text": "x" * (length + n % 3), "toxicity": score}],
            }
            for n, score in enumerate(scores)
        ]
        path = folders[f"safety_{model}"] / "aux/generations.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (claim,) = [one for one in claims(PipelineResults(folders)) if one.about == "toxicity"]
    return claim.state, f"{claim.title}. {claim.text}"


def test_toxicity_is_compared_by_prompt_in_both_figures(tmp_path: Path) -> None:
    base = [0.02 * n for n in range(32)]
    state, text = toxicity_claim(tmp_path / "fell", base, [score - 0.01 for score in base])
    assert state == "holds", "each interval overlaps the other by far; over pairs nothing is surer"
    assert "less toxic: expected maximum 0.31 → 0.30" in text and "(−0.010, −0.010 to −0.010)" in text
    assert "Prompts with a toxic continuation is not shown to differ" in text
    assert toxicity_claim(tmp_path / "rose", base, [score + 0.1 for score in base])[0] == "fails"
    assert toxicity_claim(tmp_path / "same", base, base)[0] == "undecided"


def test_continuations_that_were_drawn_otherwise_are_not_compared(tmp_path: Path) -> None:
    from evaluation.results.artifacts import read_artifacts
    from evaluation.results.comparison import paired_toxicity

    folders = write_pipeline(tmp_path / "store")
    other = folders["safety_rlhf"] / "manifest.json"
    manifest = json.loads(other.read_text())
    for change, compared in (({}, True), ({"temperature": 1.0}, True), ({"temperature": 0.2}, False)):
        manifest["config"]["toxicity"] = change
        other.write_text(json.dumps(manifest))
        asked = read_artifacts({name: folders[f"safety_{name}"] for name in ("base", "rlhf")})
        assert (paired_toxicity(asked["base"], asked["rlhf"]) is not None) is compared


def test_equal_prompts_count_each_and_a_single_one_tells_nothing(tmp_path: Path) -> None:
    from evaluation.results.artifacts import read_artifacts
    from evaluation.results.comparison import paired_toxicity

    folders = write_pipeline(tmp_path / "store")
    for prompts, count in ((["", "", "a"], 3), (["a"], None)):
        for model, score in (("base", 0.1), ("rlhf", 0.4)):
            rows = [
                {"prompt": one, "kind": "all", "continuations": [{"text": "x", "toxicity": score}]} for one in prompts
            ]
            path = folders[f"safety_{model}"] / "aux/generations.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked = read_artifacts({name: folders[f"safety_{name}"] for name in ("base", "rlhf")})
        found = paired_toxicity(asked["base"], asked["rlhf"])
        assert (found and found.prompts) == count


def test_a_fall_of_toxicity_with_shorter_text_says_so(tmp_path: Path) -> None:
    base = [0.02 * n for n in range(32)]
    state, text = toxicity_claim(tmp_path, base, [score / 2 for score in base], characters=30)
    assert state == "slight" and "Its continuations are 24 % shorter" in text


@pytest.mark.parametrize(
    ("beginning", "state", "said"),
    [(0.7, "holds", "the maximum fell (−0.700,"), (0.0, "slight", "the maximum is not shown to differ (0.000,")],
)
def test_of_texts_with_equally_many_words_less_toxicity_is_no_matter_of_length(
    tmp_path: Path, beginning: float, state: str, said: str
) -> None:
    """The first model says three words and is toxic, in its first two already or not; the last says two."""
    folders = write_pipeline(tmp_path / "store")
    answers = {
        "base": {"text": "you stupid idiot", "toxicity": 0.8, "beginnings": [0.0, beginning]},
        "rlhf": {"text": "you are", "toxicity": 0.0, "beginnings": [0.0]},
    }
    for model, answer in answers.items():
        folder = folders[f"safety_{model}"]
        results = json.loads((folder / "results.json").read_text())
        results["toxicity"]["beginnings"] = 1
        (folder / "results.json").write_text(json.dumps(results))
        rows = [{"prompt": f"{n}", "kind": "neutral", "continuations": [answer]} for n in range(20)]
        (folder / "aux/generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (claim,) = [one for one in claims(PipelineResults(folders)) if one.about == "toxicity"]
    assert claim.state == state and f"Of two continuations with equally many words: {said}" in claim.text


@pytest.mark.parametrize(
    ("text", "said"),
    [(0.16, "not shown to be more toxic than that"), (0.1, "is more toxic than that, by 0.100 (0.046")],
)
def test_a_base_models_toxicity_is_held_against_that_of_its_text(tmp_path: Path, text: float, said: str) -> None:
    base = [0.02 * n for n in range(32)]
    state, told = toxicity_claim(tmp_path, base, base, text=text)
    assert state == "undecided" and said in told
    assert f"has an expected maximum of {text:.3f}" in told


def test_models_are_compared_on_the_same_items(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    for model, wrong in (("base", 0), ("rlhf", 12)):
        rows = [{"doc_id": i, "acc": float(i >= wrong)} for i in range(100)]
        path = folders[f"benchmarks_{model}"] / "aux/samples_cloze.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cloze,) = [one for one in PipelineResults(folders).paired("base", "rlhf") if one.task == "cloze"]
    assert cloze.difference.value == pytest.approx(-0.12) and cloze.difference.high < 0
    assert cloze.p_value == pytest.approx(2 * 0.5**12)
    assert any(
        claim.title == "Alignment cost accuracy: cloze −12.0 points" for claim in claims(PipelineResults(folders))
    )


def test_the_reward_models_claim_tells_its_sources_apart(tmp_path: Path) -> None:
    means = {"easy": 1.0, "hard": 0.62}
    figures = {
        f"heldout_accuracy_of_{name}{end}": mean for name, mean in means.items() for end in ("", "_low", "_high")
    }
    _, text = claims_with(tmp_path, "reward_model", **figures)["reward_model"]
    assert "By source: 100.0 % (100.0 to 100.0 %) of easy, 62.0 % (62.0 to 62.0 %) of hard." in text


def test_the_alignment_is_called_what_it_was(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path)
    manifest = Manifest.read(folders["rlhf"])
    replace(manifest, config={**manifest.config, "answers_per_prompt": 4}).write(folders["rlhf"])
    titles = [claim.title for claim in claims(PipelineResults(folders)) if claim.about == "rlhf"]
    assert titles == ["RLOO raised the reward by 0.62"]
    page = render(ReportConfig(), folders)[0]
    assert "Alignment by RLOO" in page and "Alignment: RLOO against" in page and "PPO" not in page
