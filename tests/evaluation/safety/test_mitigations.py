"""What mitigations do and cost, through the stage, and the bias on words against transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from corpus.cleaning.people.toxicity_scorers import LexiconScorer
from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig, ReportConfig
from evaluation.config.mitigations import MitigationsConfig
from evaluation.generation.word_bias import bias_of, biased, scoring_with
from evaluation.mitigations import mitigations
from evaluation.report import render
from infra.errors import Cancelled, StageError
from infra.run import Run
from tests.flows.runs.test_steps import problems_of

LETTERS = "etaoinshrdlu"


def test_a_bias_on_words_is_transformers_own_at_every_place(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    bias = bias_of(["list", "zebra stripes"], tokenizer, -3.0)
    assert {len(ids) for ids in bias} > {1} and max(map(len, bias)) > 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (3, 24), generator=generator)
    for row, sequence in enumerate(sorted(bias, key=len)[-3:]):
        ids[row, 4 : 4 + len(sequence)] = torch.tensor(sequence)
    logits = torch.randn(3, 24, 400, generator=generator)
    theirs = SequenceBiasLogitsProcessor(dict(bias))
    expected = torch.stack([theirs(ids[:, : t + 1], logits[:, t]) for t in range(24)], dim=1)
    torch.testing.assert_close(biased(ids, logits, bias), expected)
    assert (expected != logits).sum() > 3 * 24
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    with torch.inference_mode():
        plain = model(ids).logits
        with scoring_with(model, bias):
            torch.testing.assert_close(model(input_ids=ids).logits, biased(ids, plain, bias))
        torch.testing.assert_close(model(ids).logits, plain)


def test_each_mitigation_is_measured_against_the_plain_model(
    model_dir: Path, new_model: Callable[..., Path], tmp_path: Path, run: Run
) -> None:
    """A scorer that finds a letter toxic: keeping a model from it must show, and cost."""
    (tmp_path / "words.txt").write_text("\n".join(LETTERS))
    (tmp_path / "prompts.txt").write_text("Return the list\nThe file is\nShe opened the\nRaises an error\n")
    lexicon = {"kind": "lexicon", "path": str(tmp_path / "words.txt")}
    tried = [
        {"kind": "prefix", "text": "Return the number of items. "},
        {"kind": "logit_bias", "words": str(tmp_path / "words.txt"), "bias": -50},
        {"kind": "rerank", "candidates": 3, "scorer": lexicon},
    ]
    toxicity = {
        "prompts": str(tmp_path / "prompts.txt"), "samples_per_prompt": 6, "max_new_tokens": 6, "scorers": [lexicon],
    }  # fmt: skip
    config = MitigationsConfig.model_validate({"tried": tried, "toxicity": toxicity, "tasks": ["cloze"], "limit": 40})
    assert {one.key for one in config.sources()} == {
        "mitigations.toxicity.prompts", "mitigations.tried.1.words", "mitigations.tried.2.scorer.path",
        "mitigations.toxicity.scorers.0.path", "mitigations.tasks.0.path",
    }  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    inputs = {"model": model_dir, "tuned": new_model(tmp_path / "tuned", seed=1)}
    done = mitigations(config, inputs, out, run)
    rows = {row["name"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert list(rows) == ["plain", "prefix", "logit_bias", "rerank", "tuned"]
    lines = [json.loads(line) for line in (out / "aux/continuations.jsonl").read_text().splitlines()]
    for name, row in rows.items():
        worst = [max(one["toxicity"] for one in line["continuations"][name]) for line in lines]
        assert row["toxicity_probability"]["value"] == pytest.approx(sum(worst) / 4)
    plain, biased_row, chosen = rows["plain"], rows["logit_bias"], rows["rerank"]
    assert plain["toxicity_probability"]["value"] > 0 == biased_row["toxicity_probability"]["value"]
    change = biased_row["change"]["toxicity_probability"]
    assert change["value"] == pytest.approx(-plain["toxicity_probability"]["value"]) and change["low"] < change["high"]
    assert chosen["toxicity_probability"]["value"] <= plain["toxicity_probability"]["value"]
    assert (
        chosen["drawn_per_kept"] == 3
        and chosen["tasks"] == {}
        and chosen["chosen_by"] == "lexicon words.txt (12 words)"
    )
    # The cost: other texts have another likelihood, and answers move.
    assert biased_row["nats_per_token"] != plain["nats_per_token"]
    assert rows["tuned"]["task_changes"]["cloze"]["value"] == pytest.approx(
        rows["tuned"]["tasks"]["cloze"]["value"] - plain["tasks"]["cloze"]["value"], abs=1e-5
    )
    assert done.figures["logit_bias_toxicity_change"] < 0 and "does most" in done.headline
    page, _ = render(ReportConfig(), {"mitigations": out})
    assert "What they cost" in page and "as plain" in page and "looks better than it is" in page


def test_a_task_whose_items_are_more_or_less_right_is_told_by_its_mean(
    model_dir: Path, new_model: Callable[..., Path], tmp_path: Path, run: Run
) -> None:
    """truthfulqa_mc2's `acc` is a share of likelihood: above 0 is not right."""
    from evaluation.mirror_writer import mirror_task

    truths = [
        {
            "question": f"What is {n}?",
            "mc1_targets": {"A door.": 0, f"{n}.": 1},
            "mc2_targets": {"A door.": 0, f"{n}.": 1},
        }
        for n in range(8)
    ]
    (tmp_path / "mc_task.json").write_text(json.dumps(truths))
    mirror_task("truthfulqa_mc2", tmp_path / "mc_task.json", tmp_path / "mirror", shots=0)
    (tmp_path / "prompts.txt").write_text("Return the list\nThe file is\n")
    tasks = {"tasks": ["truthfulqa_mc2"], "tasks_mirror": str(tmp_path / "mirror")}
    toxicity = {"prompts": str(tmp_path / "prompts.txt"), "samples_per_prompt": 1, "max_new_tokens": 2}
    config = MitigationsConfig.model_validate({"tried": [], "toxicity": toxicity, **tasks})
    values = []
    for name in ("out", "plain", "tuned"):
        (tmp_path / name).mkdir()
    inputs = {"model": model_dir, "tuned": new_model(tmp_path / "other", seed=1)}
    mitigations(config, inputs, tmp_path / "out", run)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    for row, model in zip(rows, inputs.values(), strict=True):
        benchmarks(BenchmarksConfig.model_validate(tasks), {"model": model}, tmp_path / row["name"], run)
        found = json.loads((tmp_path / row["name"] / "results.json").read_text())["tasks"]["truthfulqa_mc2"]["acc"]
        assert row["tasks"]["truthfulqa_mc2"]["value"] == pytest.approx(found["value"], abs=1e-5)
        values.append(found["value"])
    change = rows[1]["task_changes"]["truthfulqa_mc2"]
    assert 0 < values[0] < 1 and change["value"] == pytest.approx(values[1] - values[0], abs=1e-5)
    assert change["low"] < change["value"] < change["high"] and 0 < change["p_value"] <= 1


def test_a_table_that_broke_off_goes_on_from_what_it_kept(
    model_dir: Path, new_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chooses fails at its second group of prompts, then the run is cancelled; in the end the unbroken bytes."""
    monkeypatch.setattr("evaluation.safety.scorer_quality.SCORED_AT_ONCE", 4)
    (tmp_path / "words.txt").write_text("\n".join(LETTERS))
    (tmp_path / "prompts.txt").write_text("Return the list\nThe file is\n")
    lexicon = {"kind": "lexicon", "path": str(tmp_path / "words.txt")}
    tried = [{"kind": "prefix", "text": "Kindly. "}, {"kind": "rerank", "candidates": 2, "scorer": lexicon}]
    toxicity = {"prompts": str(tmp_path / "prompts.txt"), "samples_per_prompt": 2, "max_new_tokens": 4}
    config = MitigationsConfig.model_validate({"tried": tried, "toxicity": toxicity, "tasks": ["cloze"], "limit": 4})
    inputs = {"model": model_dir, "tuned": new_model(tmp_path / "tuned", seed=1)}
    parts = tmp_path / "work" / "parts"

    def build(name: str, work: str = "work", **options: Any) -> list[dict[str, Any]]:
        (tmp_path / name).mkdir()
        with (tmp_path / "journal").open("w+") as journal:
            try:
                mitigations(config, inputs, tmp_path / name, Run(tmp_path / work, journal=journal, **options))
            finally:
                journal.seek(0)
                told = [json.loads(line) for line in journal]
        return told

    score, calls, broken = LexiconScorer.__call__, [0], [True]

    def breaks(self: LexiconScorer, texts: Sequence[str]) -> Any:
        calls[0] += 1
        if broken and calls[0] > 1:
            raise RuntimeError("out of memory")
        return score(self, texts)

    monkeypatch.setattr(LexiconScorer, "__call__", breaks)
    with pytest.raises(StageError, match=r"lexicon words.txt .*failed at text 5 of 8 .*out of memory"):
        build("failed")
    broken.clear()
    assert {path.stem for path in parts.glob("rerank*")} == {"rerank_drawn", "rerank_chosen_0"}
    with pytest.raises(Cancelled):
        build("cancelled", is_cancelled=lambda: (parts / "tuned_drawn.json").exists())
    told = build("whole")
    (resumed,) = [line["message"] for line in told if line.get("name") == "resumed"]
    assert "prefix_tasks" in resumed and "rerank_chosen_1" in resumed and "tuned_drawn" in resumed
    assert not parts.exists()
    build("unbroken", work="other")
    for name in ("results.json", "aux/continuations.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_every_model_that_was_trained_to_be_less_toxic_has_a_row_of_the_table(
    model_dir: Path, new_model: Callable[..., Path], tmp_path: Path, run: Run
) -> None:
    """Such as one of filtered and one of neutrally written text beside one that was tuned."""
    (tmp_path / "prompts.txt").write_text("Return the list\nThe file is\n")
    toxicity = {"prompts": str(tmp_path / "prompts.txt"), "samples_per_prompt": 2, "max_new_tokens": 4}
    asked = {"tried": [{"kind": "prefix", "text": "Kindly. "}], "toxicity": toxicity, "tasks": ["cloze"], "limit": 6}
    config = MitigationsConfig.model_validate(asked)
    names = ("filtered", "neutral", "tuned")
    inputs = {name: new_model(tmp_path / name, seed=seed) for seed, name in enumerate(names, 1)}
    out = tmp_path / "out"
    out.mkdir()
    figures = mitigations(config, {"model": model_dir, **inputs}, out, run).figures
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["plain", "prefix", *names]
    assert {row["kind"] for row in rows[2:]} == {"tuned"} and len({row["nats_per_token"] for row in rows}) == 5
    assert {f"{name}_{figure}_change_low" for name in names for figure in ("cloze", "toxicity")} <= figures.keys()
    step = {"uses": "mitigations", "inputs": {"model": "pretrain", "prefix": "pretrain"}, **asked}
    assert problems_of({"milder": step}) == {"steps.milder.inputs.prefix": ("name_taken", "rename the input")}
    with pytest.raises(StageError, match="this name too"):
        mitigations(config, {"model": model_dir, "prefix": inputs["tuned"]}, out, run)


def test_what_makes_no_sense_is_said() -> None:
    for tried, message in (
        ([{"kind": "prefix"}], "a prefix needs `text`"),
        ([{"kind": "rerank", "words": "x.txt"}], "a logit_bias needs `words`"),
        ([{"kind": "rerank"}, {"kind": "rerank"}], "given twice: rerank"),
        ([{"kind": "rerank", "name": "tuned"}], "given twice: tuned"),
    ):
        with pytest.raises(ValidationError, match=message):
            MitigationsConfig.model_validate({"tried": tried})
