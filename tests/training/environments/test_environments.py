"""Environments that ship, and the processes that environments run in."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.errors import StageError
from training.config.alignment.environment import EnvironmentConfig
from training.rl.environments.calculator import Calculator, evaluate
from training.rl.environments.maze import Maze
from training.rl.environments.pool import EnvironmentPool, Failure
from training.rl.environments.protocol import Reply, ToolCall
from training.rl.environments.search import Search
from training.sandbox.runner import find

UNRULY = f"{Path(__file__).with_name('unruly.py')}:Unruly"
TESTED = {"prompt": "Write double.", "response": "assert double(2) == 4\nassert double(5) == 10"}


@contextmanager
def pool(use: str, **settings: Any) -> Iterator[EnvironmentPool]:
    try:
        find("auto")
    except StageError as error:
        pytest.skip(str(error))
    opened = EnvironmentPool(EnvironmentConfig.model_validate({"use": use, "instances": 1, **settings}))
    try:
        yield opened
    finally:
        opened.close()


def step(text: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"do": "step", "text": text, "calls": [{"name": name, "arguments": given} for name, given in calls]}


def test_the_calculator_computes_and_judges() -> None:
    assert [evaluate(text) for text in ("2*(3-5)", "7//2", "-8")] == [-4, 3, -8]
    for wrong in ("2**9", "__import__('os')", "True", "9" * 40, "1" * 201):
        with pytest.raises(ValueError):
            evaluate(wrong)
    task = {"prompt": "3 bags of 4 apples?", "response": "3 * 4 = 12"}
    calculator = Calculator()
    assert calculator.reset(task, 0) == task["prompt"]
    assert [tool["function"]["name"] for tool in calculator.tools] == ["calculator"]
    reply = calculator.step("", [ToolCall("calculator", {"expression": "3*4"}), ToolCall("calculator", {"x": 1})])
    assert reply.messages[0]["content"] == "12" and "error" in reply.messages[1]["content"] and not reply.done
    assert calculator.step("It is 12.", []) == Reply(done=True)
    assert calculator.reward() == 1 and calculator.accepts()
    guessing = Calculator()
    guessing.reset(task, 0)
    guessing.step("12", [])
    assert guessing.reward() == 1 and not guessing.accepts(), "right without the calculator"


def test_the_maze_rewards_the_shortest_path() -> None:
    for seed in range(20):
        maze = Maze(size=4)
        maze.reset({"number": seed}, seed)
        path = maze.shortest_path()
        assert len(path) == maze.optimum
        replies = [maze.step(f"I go {move}.", []) for move in path]
        assert [reply.done for reply in replies] == [False] * (len(path) - 1) + [True] and maze.reward() == 1
        maze.reset({"number": seed}, seed)
        assert "Name a direction" in maze.step("up", []).messages[0]["content"]
        for move in path[:-1]:
            maze.step(move, [])
        assert maze.reward() == 0
        maze.step(path[-1], [])
        assert maze.reward() == maze.optimum / (maze.optimum + 1)


def test_search_asks_for_a_word_that_a_search_finds(tmp_path: Path) -> None:
    for name, thing in (("north", "a lighthouse of granite"), ("south", "a bakery with seven ovens")):
        (tmp_path / f"{name}.md").write_text(f"In the {name} of the island there is {thing}, and everyone knows it.\n")
    search = Search(str(tmp_path))
    question = search.reset({"number": 0, "split": "train"}, 3)
    hidden = "____"
    assert hidden in question
    reply = search.step("", [ToolCall("search", {"query": question})])
    (passage,) = [message["content"] for message in reply.messages]
    word = next(word for word in passage.lower().replace(",", "").split() if word not in question.lower())
    assert search.step(f"It is {word}", []).done and search.reward() == 1 and search.accepts()


def test_code_reads_which_tests_fail_and_corrects_itself() -> None:
    with pool("code") as opened:
        opened.ask([(0, {"do": "open", "task": TESTED, "seed": 0})], 0)
        (failed,) = opened.ask([(0, step("def double(x): return 4"))], 0)
        assert not isinstance(failed, Failure) and "Hidden tests fail" in failed["messages"][0]["content"]
        (failed,) = opened.ask([(0, step("```python\ndef double(x): return 3\n```"))], 0)
        assert not isinstance(failed, Failure) and "assert double(2) == 4" in failed["messages"][0]["content"]
        (done,) = opened.ask([(0, step("def double(x): return 2 * x"))], 0)
        assert not isinstance(done, Failure) and done["reward"] == 1 and done["accepted"]


def test_an_environment_is_held_to_its_limits_and_replaced(tmp_path: Path) -> None:
    """One process with three episodes: what the first does costs the others nothing."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for option, text, expected in ((str(secret), "read", "nothing"), (port, "connect", "refused")):
            with pool(UNRULY, options={"secret": option}) as opened:
                opened.ask([(0, {"do": "open", "task": {"number": 7}, "seed": 0})], 0)
                (reply,) = opened.ask([(0, step(text))], 0)
                assert not isinstance(reply, Failure) and reply["messages"][0]["content"] == f"7: {expected}"
    with pool(UNRULY, files=[str(secret)], options={"secret": str(secret)}, timeout_s=5, memory_mb=256) as opened:
        opened.ask([(n, {"do": "open", "task": {"number": n}, "seed": 0}) for n in range(6)], 0)
        opened.ask([(n, step("first")) for n in range(6)], 0)
        texts = ["read", "raise", "exit", "memory", "sleep", "last"]
        replies = opened.ask([(n, step(text)) for n, text in enumerate(texts)], 9)
        kinds = [reply.kind if isinstance(reply, Failure) else reply["messages"][0]["content"] for reply in replies]
        assert kinds[0] == "0: first mine" and kinds[5] == "5: first last", "others go on where they were"
        assert kinds[1] == "error" and "out of order" in str(replies[1])
        assert kinds[2] == "died" and kinds[3] in ("died", "error") and kinds[4] == "timeout"
        assert opened.replaced >= 2
        (ended,) = opened.ask([(0, {"do": "end"})], 0)
        assert ended == {"reward": 2.0, "accepted": None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use": "json:Missing"}, "Missing"),
        ({"use": "calculator", "options": {"digit": 3}}, "digit"),
        ({"use": "verifiers", "options": {"id": "x"}}, "pip install"),
        ({"use": "openenv", "options": {"base_url": "http://localhost:1"}}, "openenv-core"),
    ],
    ids=["class", "option", "verifiers", "openenv"],
)
def test_what_cannot_be_made_is_named(settings: dict[str, Any], message: str) -> None:
    with pool(**settings) as opened, pytest.raises(StageError, match=message) as raised:
        opened.ask([(0, {"do": "open", "task": {"number": 0}, "seed": 0})], 0)
    assert raised.value.problems[0].code == "environment_failed"


def test_a_user_s_class_and_files_are_looked_for_before_anything_runs(tmp_path: Path) -> None:
    config = EnvironmentConfig(use=UNRULY, files=(str(tmp_path / "none"),))
    assert [problem.path for problem in config.missing()] == ["rlhf.environment.files"]
    assert [source.paths[0].name for source in config.sources()] == ["unruly.py"]
    missing = EnvironmentConfig(use="folder/none.py:Game")
    assert [problem.path for problem in missing.missing()] == ["rlhf.environment.use"]
    with pytest.raises(ValueError, match="expected calculator, code"):
        EnvironmentConfig(use="chess")
    assert json.loads(config.model_dump_json())["use"] == UNRULY
