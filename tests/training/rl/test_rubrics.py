"""Rewards by a rubric: an endpoint's numbers and a model's verdicts, each criterion a figure, no request paid twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.services.endpoint import completion, endpoint
from training.config import RlhfConfig
from training.config.alignment.rubrics import RubricConfig
from training.core.hardware import Hardware
from training.rl.rewards import Prompt
from training.rl.rubrics import rubric_of, score_in
from training.rlhf import rlhf

CPU = Hardware(torch.device("cpu"), bf16=False)
LAUNCH = LaunchConfig(device="cpu", threads=1, precision="fp32")
CRITERIA: dict[str, Any] = {"short": {"text": "It is short.", "weight": 3.0}, "polite": {"text": "It is polite."}}
PROMPTS = [Prompt("Why?", [1], "Because.", None), Prompt("How?", [1], "", None)]


@pytest.mark.parametrize(
    ("text", "score"),
    [("7", 0.7), ("Score: 10/10.", 1.0), ("I say 3, no: 4.5", 0.45), ("0", 0.0), ("eleven", None), ("11", None)],
)
def test_the_last_number_of_a_judgement_counts(text: str, score: float | None) -> None:
    assert math.isnan(score_in(text)) if score is None else score_in(text) == pytest.approx(score)


def test_an_endpoint_judges_each_criterion_and_is_asked_once(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> Any:
        text = body["messages"][-1]["content"]
        assert ("Because." in text) == ("Why?" in text)
        if "polite" in text:
            return completion("no idea" if "How?" in text else "5")
        return completion("10" if "yes" in text else "2")

    with endpoint(reply) as (url, calls):
        judge = {"url": url, "model": "judge", "concurrency": 2}
        config = RubricConfig.model_validate({"criteria": CRITERIA, "endpoint": judge, "max_unscored_share": 0.25})
        for _ in range(2):  # again, as after a crash
            rubric = rubric_of(config, {}, CPU, Run(tmp_path, LAUNCH))
            assert rubric is not None
            scores = rubric.of(["yes", "well"], PROMPTS)
            rubric.close()
        assert len(calls.bodies) == 4 and {body["temperature"] for body in calls.bodies} == {0.0}
    torch.testing.assert_close(scores, torch.tensor([[1.0, 0.5], [0.2, math.nan]]).double(), equal_nan=True)
    torch.testing.assert_close(rubric.means(scores), torch.tensor([(3 + 0.5) / 4, 0.2]).double())
    metrics = rubric.metrics(scores)
    assert metrics["rlhf/rubric/short"] == pytest.approx(0.6) and metrics["rlhf/rubric/polite"] == pytest.approx(0.5)
    assert metrics["rlhf/rubric_unscored"] == 0.25
    with endpoint(lambda body, number: completion("no number")) as (url, _):
        strict = RubricConfig.model_validate({"criteria": CRITERIA, "endpoint": {"url": url, "model": "mute"}})
        rubric = rubric_of(strict, {}, CPU, Run(tmp_path / "other", LAUNCH))
        with pytest.raises(StageError, match="no number from 0 to 10 in 100%"):
            rubric.of(["yes"], PROMPTS[:1])  # type: ignore[union-attr]
        rubric.close()  # type: ignore[union-attr]


def test_rlhf_learns_by_a_rubric_and_shows_each_criterion(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, journal: Any
) -> None:
    """The endpoint likes answers that are long; a model of another step judges too, without one."""
    settings: dict[str, Any] = {
        "rollouts": 2, "rollout_prompts": 8, "minibatch_answers": 8, "answers_per_prompt": 4, "algorithm": "grpo",
        "answer_max_tokens": 6, "max_prompt_tokens": 40, "heldout_prompts": 4, "unfinished_penalty": 0.0,
    }  # fmt: skip
    inputs = {"model": base_dir, "prompts": instructions_dir}

    def reply(body: dict[str, Any], number: int) -> Any:
        answer = body["messages"][-1]["content"].partition("The answer to judge:\n")[2].partition("\n\nThe crit")[0]
        return completion(str(min(10, len(answer))))

    with endpoint(reply) as (url, _):
        rubric = {"criteria": CRITERIA, "endpoint": {"url": url, "model": "judge"}}
        config = RlhfConfig.model_validate(settings | {"rubric": rubric})
        run = Run(tmp_path / "work", LAUNCH, journal=journal)
        figures = rlhf(config, inputs, tmp_path / "out", run).figures
    assert len(journal.metric("rlhf/rubric/short")) == len(journal.metric("rlhf/rubric/polite")) == 2
    for key in ("rubric", "rubric_short", "rubric_polite"):
        assert 0 <= figures[f"{key}_sft"] <= 1
        assert figures[f"{key}_gain"] == pytest.approx(figures[f"{key}_rlhf"] - figures[f"{key}_sft"])
    config = RlhfConfig.model_validate(settings | {"rubric": {"criteria": CRITERIA}, "rollouts": 1})
    with pytest.raises(StageError, match="rubric_judge"):
        rlhf(config, inputs, tmp_path / "none", Run(tmp_path / "none.work", LAUNCH))
    judged = rlhf(config, inputs | {"rubric_judge": base_dir}, tmp_path / "own", Run(tmp_path / "own.work", LAUNCH))
    assert 0.3 < judged.figures["rubric_sft"] < 0.7, "an untrained judge cannot tell"
