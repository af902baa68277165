"""Environments of verifiers and OpenEnv through our interface: with the packages where they are installed, and with
stand-ins for them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.environments import stand_ins
from training.rl.environments import adapters
from training.rl.environments.adapters import OpenEnv, Verifiers
from training.rl.environments.protocol import ToolCall

GUESSING = """
import verifiers as vf
from datasets import Dataset

TOOL = {"name": "hint", "description": "Give a hint.", "parameters": {"type": "object", "properties": {}}}


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["hints"] = 0

    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]
        if last.tool_calls:
            state["hints"] += 1
            call = last.tool_calls[0]
            return [{"role": "tool", "content": f"even, says {call.name} {call.arguments}", "tool_call_id": call.id}]
        if last.content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "No."}]


async def is_right(completion, state, **kwargs):
    answers = [message.content for message in completion if message.role == "assistant"]
    return float(answers[-1] == state["answer"]) - state["hints"] / 10


def rows(answers):
    prompt = [{"role": "system", "content": "A game."}, {"role": "user", "content": "Guess."}]
    return Dataset.from_list([{"prompt": prompt, "answer": answer} for answer in answers])


def load_environment(turns):
    rubric = vf.Rubric(funcs=[is_right])
    return Guess(
        dataset=rows("24"), eval_dataset=rows("8"), rubric=rubric, max_turns=turns, tool_defs=[TOOL]
    )
"""


@pytest.fixture(params=["stand-in", "installed"])
def guessing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of an environment of verifiers."""
    if request.param == "installed" and importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed")
    if request.param == "stand-in":
        for name, module in stand_ins.verifiers().items():
            monkeypatch.setitem(sys.modules, name, module)
    id = f"guess-{request.param.replace('-', '')}"
    (tmp_path / f"{id.replace('-', '_')}.py").write_text(GUESSING)
    monkeypatch.syspath_prepend(tmp_path)
    adapters._loaded.cache_clear()
    yield id
    adapters._loaded.cache_clear()
    sys.modules.pop(id.replace("-", "_"), None)


def test_an_environment_of_verifiers_replies_ends_and_rewards(guessing: str) -> None:
    environment = Verifiers(guessing, turns=3)
    opening = environment.reset({"number": 1, "split": "train"}, 0)
    assert [(message["role"], message["content"]) for message in opening] == [("system", "A game."), ("user", "Guess.")]
    assert [tool["function"]["name"] for tool in environment.tools] == ["hint"]
    reply = environment.step("", [ToolCall("hint", {"loud": True})])
    assert [message["role"] for message in reply.messages] == ["tool"] and not reply.done
    assert reply.messages[0]["content"] == 'even, says hint {"loud": true}'
    reply = environment.step("3", [])
    assert [dict(message) for message in reply.messages] == [{"role": "user", "content": "No."}] and not reply.done
    assert environment.step("4", []).done and environment.reward() == pytest.approx(0.9)
    environment.reset({"number": 0, "split": "heldout"}, 0)
    assert environment.step("8", []).done and environment.reward() == 1, "held-out tasks are of the evaluation data set"
    environment.reset({"number": 0, "split": "train"}, 0)
    replies = [environment.step(text, []) for text in ("0", "1", "3")]
    assert [reply.done for reply in replies] == [False, False, True] and environment.reward() == 0


def test_an_environment_of_openenv_gets_actions_and_sums_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_ins.openenv().items():
        monkeypatch.setitem(sys.modules, name, module)
    environment = OpenEnv("http://localhost:1", action="guess", observation="text", opening="A game.")
    assert environment.reset({"number": 0}, 13) == "A game.\nGuess."
    reply = environment.step("4", [])
    assert [dict(message) for message in reply.messages] == [{"role": "user", "content": "No."}] and not reply.done
    assert environment.step("3", []).done and environment.reward() == 1
    environment.reset({"number": 0}, 14)
    assert [environment.step(text, []).done for text in "012"] == [False, False, True] and environment.reward() == 0


def test_a_version_that_does_not_reply_to_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stand_ins.verifiers()
    del modules["verifiers"].load_environment
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match=r"expected verifiers 0\.1"):
        Verifiers("any", turns=3)
