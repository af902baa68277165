"""Processes that grade answers: the same rewards as without them, and a named stop for what fails or hangs there."""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from infra.errors import StageError
from infra.fingerprint import canonical_json
from training.config import RlhfConfig
from training.rl.grading import Graders
from training.rl.reward_functions import Answered

HERE = "tests.training.rl.test_grading"


def lengths(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function, which the tests name by its import path."""
    sys.stdout.write("what a function prints is no reward\n")
    return [len(answer) + len(prompt) / 10 + len(response) / 100 for prompt, answer, response in
            zip(prompts, answers, responses, strict=True)]  # fmt: skip


def brevity(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """What is short is good."""
    assert all(responses)
    return [-len(answer) / 10 for answer in answers]


def few_letters(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Two rewards alone, so that the answers of some groups have the same."""
    return [float(len(answer) < 12) for answer in answers]


def hangs(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """At one answer; it leaves its process's number, and that of one which it started, in the file of the prompt."""
    if answers == ["wait"]:
        if (child := os.fork()) != 0:
            Path(prompts[0]).write_text(f"{os.getpid()} {child}")
        while True:
            time.sleep(60)
    return [0.0]


def ends(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return [0.0]


def killed_at_first(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Its process is killed at the first try of each answer, as from outside."""
    tried = Path(prompts[0]) / answers[0]
    if not tried.exists():
        tried.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(answers[0]))]


def broken(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    raise KeyError("no such unit test")


def abstains(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float | None]:
    return [None for _ in answers]


def exits(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    sys.exit(0)


def unknown(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [math.nan]


@pytest.fixture
def graders() -> Iterator[Graders]:
    found = Graders(2, timeout_s=5.0)
    yield found
    found.close()


def answered(*answers: str, prompt: str = "Why?") -> list[Answered]:
    return [Answered(prompt, answer, "so") for answer in answers]


def test_answers_are_graded_in_processes_as_without_them(graders: Graders) -> None:
    asked = answered(*("word " * count + "\n" for count in range(30)))
    path = f"{HERE}:lengths"
    assert graders.functions(path, asked) == Graders().functions(path, asked)
    assert graders.functions(path, asked[:1]) == pytest.approx([1.42])
    assert [math.isnan(reward) for reward in graders.functions(f"{HERE}:abstains", asked[:2])] == [True, True]
    codes = ["def f(): return 1", "def f(): return 2", "import time\ntime.sleep(99)", "def f(): return True"]
    assert graders.tests(codes, ["assert f() == 1"] * 4) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("broken", "reward_function_failed", "it raised KeyError: 'no such unit test'"),
        ("unknown", "reward_not_finite", "it gave nan for the answer 'No.'"),
        ("exits", "reward_function_failed", "it raised SystemExit: 0"),
        ("ends", "reward_function_failed", "the process that graded the answer 'No.' ended with SIGKILL"),
        ("nobody", "no_such_function", "expected a function"),
    ],
)
def test_what_fails_in_a_process_is_a_named_stop(graders: Graders, name: str, code: str, said: str) -> None:
    with pytest.raises(StageError) as caught:
        graders.functions(f"{HERE}:{name}", answered("No."))
    (problem,) = caught.value.problems
    assert problem.code == code and problem.path == f"rlhf.reward_functions.{HERE}:{name}" and said in problem.message


def test_an_answer_whose_process_was_killed_is_graded_again(graders: Graders, tmp_path: Path) -> None:
    rewards = graders.functions(f"{HERE}:killed_at_first", answered("a", "bb", "ccc", prompt=str(tmp_path)))
    assert rewards == [1.0, 2.0, 3.0]


def test_a_function_that_hangs_is_named_with_its_answer_and_leaves_no_process(graders: Graders, tmp_path: Path) -> None:
    path = tmp_path / "processes"
    with pytest.raises(StageError, match="gave no reward for the answer 'wait' within 5 s") as caught:
        graders.functions(f"{HERE}:hangs", answered("go", "wait", "go", "go", prompt=str(path)))
    assert [problem.code for problem in caught.value.problems] == ["reward_function_hangs"]
    left = [psutil.Process(int(one)) for one in path.read_text().split() if psutil.pid_exists(int(one))]
    # The second may be a moment older than its end: nobody waits for it but the machine's first process.
    assert not psutil.wait_procs(left, timeout=20)[1]
    assert graders.functions(f"{HERE}:lengths", answered("")) == pytest.approx([0.42])


def test_a_function_that_hangs_in_the_training_s_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no time limit there, and nothing said what the stage waits for."""
    monkeypatch.setattr("training.rl.grading.SLOW_S", 0.01)
    reported: queue.Queue[tuple[str, str]] = queue.Queue()
    graders = Graders(on_slow=lambda *event: reported.put(event))
    graders._functions["rewards:f"] = lambda *_: [float(bool(reported.get(timeout=60)[1].index("rewards:f")))]
    assert graders.functions("rewards:f", answered("No.")) == [1.0]
    assert graders.functions(f"{HERE}:lengths", answered("")) == pytest.approx([0.42])


def test_how_many_processes_grade_does_not_change_what_a_model_is() -> None:
    assert len({canonical_json(RlhfConfig(reward_processes=count)) for count in (0, 3)}) == 1
