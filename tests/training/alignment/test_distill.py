"""Distillation on models of two layers: what the student learns, from given answers and from its own, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled, StageError
from infra.run import Run
from infra.store.measurements import TRAINED
from tests.evaluation.conftest import make_model
from tests.support.programs.ranked import train_in_ranks
from tests.support.services.endpoint import completion, endpoint
from training.chat.base import Chat
from training.checkpoint.export import export
from training.config import DistillConfig
from training.distill import distill, measure_trained
from training.model.models import load
from training.rl.own_answers import prompts_in

SETTINGS: dict[str, Any] = {
    "duration": "8 batches",
    "global_batch_examples": 8,
    "max_length": 64,
    "answer_max_tokens": 8,
    "heldout_prompts": 4,
    "evaluate_pairs": 4,
    "optimizer": {"learning_rate": 3.0e-3, "weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def inputs(base_dir: Path, instructions_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The student's own weights, moved far enough that there is something to learn."""
    teacher = load(base_dir)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    folder = tmp_path_factory.mktemp("teacher")
    export(teacher, base_dir, folder)
    return {"model": base_dir, "teacher": folder, "instructions": instructions_dir}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"top_k": 8},
        {"beta": 1.0, "on_policy_share": 1.0},
        {"beta": 0.5, "on_policy_share": 0.5, "loss_temperature": 2.0},
    ],
    ids=["forward KL", "top k", "on-policy reverse KL", "GKD"],
)
def test_the_student_comes_closer_to_its_teacher_on_held_out_answers(
    keys: dict[str, Any], inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    result = distill(DistillConfig.model_validate(SETTINGS | keys), inputs, tmp_path / "out", run)
    figures = result.figures
    before, after = (figures[f"heldout_divergence_{name}"] for name in ("student", "distilled"))
    assert 0 < figures["divergence_fall_low"] < figures["divergence_fall"] == pytest.approx(before - after)
    assert all(0 <= figures[f"agreement_{name}"] <= 1 for name in ("student", "distilled"))
    assert figures["answers_kl_distilled"] < figures["answers_kl_student"]
    assert figures["batches"] == 8 and len(journal.metric("validation/sample_loss")) == 8
    own_answers = len(journal.metric("distill/answer_tokens"))
    share = keys.get("on_policy_share", 0)
    assert own_answers == 8 * share if share in (0, 1) else 0 < own_answers < 8
    lines = [json.loads(line) for line in (tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and lines[0]["answers"].keys() == {"student", "distilled"}


def test_a_stopped_training_continues_with_the_same_answers_and_weights(
    inputs: dict[str, Path], tmp_path: Path, run: Run, weights: Any
) -> None:
    keys = {"on_policy_share": 0.7, "checkpoint_every": "1 batches"}
    config = DistillConfig.model_validate(SETTINGS | keys)

    class Stopped(Run):
        done = 0

        def metrics(self, values: Any, step: int | None = None) -> None:
            self.done = step or 0

        @property
        def cancelled(self) -> bool:
            return self.done >= 3

    distill(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch))
    with pytest.raises(Cancelled):
        distill(config, inputs, tmp_path / "stopped", Stopped(run.work_dir, run.launch))
    distill(config, inputs, tmp_path / "continued", run)
    first, second = weights(tmp_path / "unbroken"), weights(tmp_path / "continued")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_sample_and_learn_what_one_process_does(
    sharding: str, inputs: dict[str, Path], tmp_path: Path, weights: Any
) -> None:
    keys = SETTINGS | {"duration": "3 batches", "on_policy_share": 1.0, "beta": 1.0}
    for count in (1, 2):
        launch = {"sharding": sharding, "threads": 1, "device": "cpu"}
        train_in_ranks("distill", count, keys, inputs, tmp_path / f"of_{count}", launch=launch)
    alone, together = (weights(tmp_path / f"of_{count}") for count in (1, 2))
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_what_precedes_the_labels(base_dir: Path) -> None:
    chat = Chat.load(base_dir)
    talks = chat.conversations(["What does a do?", "b"], ["Sort the list.", "No."])
    assert prompts_in(chat.response_batch(talks)) == [talk.prompt for talk in talks]


def test_a_teacher_of_another_vocabulary_is_refused_before_training(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    other = inputs | {"teacher": make_model(tmp_path / "teacher", seed=1)}
    with pytest.raises(StageError, match=r"expected a vocabulary of 320.*, not 400"):
        distill(DistillConfig.model_validate(SETTINGS), other, tmp_path / "out", run)
    assert not journal.metric("train/loss")


def test_an_endpoint_teaches_by_its_answers_and_none_is_asked_for_twice(
    inputs: dict[str, Path], tmp_path: Path, run: Run, weights: Any
) -> None:
    """A run that was stopped in the middle of the answers asks for those that are missing."""
    student = {name: folder for name, folder in inputs.items() if name != "teacher"}
    learnt = [json.loads(line) for line in (inputs["instructions"] / "train.jsonl").read_text().splitlines()]

    def reply(body: dict[str, Any], number: int) -> Any:
        question = body["messages"][-1]["content"]
        return completion(f"About {question.split()[2].split('_')[-1]}.")

    with endpoint(reply) as (url, calls):
        keys = {name: value for name, value in SETTINGS.items() if name not in ("beta", "on_policy_share")}
        teacher = {"url": url, "model": "large", "concurrency": 2}
        config = DistillConfig.model_validate(keys | {"endpoint": teacher, "duration": "12 batches"})
        stopped = Run(tmp_path / "work", run.launch, is_cancelled=lambda: len(calls.bodies) >= 6)
        with pytest.raises(Cancelled):
            distill(config, student, tmp_path / "out", stopped)
        assert 6 <= len(calls.bodies) < len(learnt)
        result = distill(config, student, tmp_path / "out", Run(tmp_path / "work", run.launch))
        prompts = set(calls.prompts)
        assert len(calls.bodies) == len(prompts), "none twice"
        once_more = Run(tmp_path / "more", run.launch, answers_dir=tmp_path / "work" / "answers")
        given = student | {TRAINED: tmp_path / "out"}
        again = measure_trained(config, given, tmp_path / "again", once_more)
        assert len(calls.bodies) == len(prompts)
    figures = result.figures
    assert figures["loss_fall_low"] > 0 and figures["heldout_loss_distilled"] < figures["heldout_loss_student"]
    assert again.figures["loss_fall"] == pytest.approx(figures["loss_fall"], rel=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "out" / "aux" / "teacher_answers.jsonl").read_text().splitlines()]
    assert len(rows) == len(learnt) and all(row["response"].startswith("About ") for row in rows)
    with endpoint(lambda body, number: completion("", "stop")) as (url, _):
        config = DistillConfig.model_validate(keys | {"endpoint": {"url": url, "model": "mute"}})
        with pytest.raises(StageError, match=r"answers of the teacher are empty; 5% are allowed"):
            distill(config, student, tmp_path / "none", Run(tmp_path / "mute", run.launch))
