"""Token in, token out: what a policy samples in a dialogue with an environment is what it is trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from corpus.tokens.chat_template import CHAT_TEMPLATE, SPECIAL_TOKENS
from infra.launch.config import LaunchConfig
from tests.support.chat_templates import FAMILIES, tokenizer_in
from tests.support.open_models import tokenizer_with
from training.chat.base import Chat, chat_of
from training.config import RlhfConfig
from training.core.hardware import prepare
from training.generation.completions import AnswerBatch
from training.rl.environments import episodes as playing
from training.rl.environments.episodes import Episodes, Task, own_tasks
from training.rl.environments.pool import EpisodeFailure

STEMMA = "stemma"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALLS = (
    '<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call>',
    '{"name": "look_up", "parameters": {"word": "x"}}',
    '[TOOL_CALLS]look_up{"word": "x"}',
)
REWRITTEN = ("qwen3", "harmony")
"""Templates that write an earlier answer otherwise than the answer was sampled."""


def chat_in(family: str) -> Chat:
    if family != STEMMA:
        return chat_of(tokenizer_in(family))
    tokenizer = tokenizer_with(list(SPECIAL_TOKENS), bos=SPECIAL_TOKENS[0], eos=SPECIAL_TOKENS[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    return chat_of(tokenizer)


def words(draw: random.Random, chat: Chat) -> str:
    """Text with special tokens spelt out, parts of characters and white space."""
    special = chat.tokenizer.all_special_tokens
    pieces = ["a", "the sum", " ", "\n", "42", "é", "你好", "🙂", "</think>", "{", '"', *special]
    return "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 8)))


class Talkative:
    """An environment in this process with random replies, the first of which fails, for the interface of a pool."""

    def __init__(self, chat: Chat, draw: random.Random) -> None:
        self._chat, self._draw = chat, draw
        self._steps = 0

    def drop(self, episode: int) -> None:
        pass

    def ask(self, requests: Sequence[tuple[int, Any]], allowed: int) -> list[Any]:
        return [self._reply(request) for _, request in requests]

    def _reply(self, request: Any) -> Any:
        draw = self._draw
        match request["do"]:
            case "open":
                tools = [TOOL] if draw.random() < 0.7 else []
                return {"messages": [{"role": "user", "content": words(draw, self._chat)}], "tools": tools}
            case "step":
                self._steps += 1
                if (chance := draw.random()) < 0.1 or self._steps == 1:
                    return EpisodeFailure("died", "its process ended")
                role = "tool" if request["calls"] else "user"
                messages = [{"role": role, "content": words(draw, self._chat)} for _ in request["calls"] or "1"]
                return {"messages": messages, "done": chance < 0.2, "reward": 1.0, "accepted": None}
            case _:
                return {"reward": 0.0, "accepted": None}


@pytest.mark.parametrize("family", [STEMMA, *FAMILIES])
@pytest.mark.parametrize(
    "dialogues", [24, pytest.param(800, marks=[pytest.mark.long, pytest.mark.timeout(1200)])], ids=["some", "10,000"]
)
def test_sampled_ids_are_the_ones_that_are_trained_on(
    family: str, dialogues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random answers, most of them no text that encodes to themselves, in every chat template that is supported."""
    chat, draw = chat_in(family), random.Random(family)
    config = RlhfConfig.model_validate(
        {
            "environment": {"use": "maze", "tasks": dialogues, "max_turns": 4, "max_tokens": 400, "max_dropped": 0.9},
            "answer_max_tokens": 40, "max_prompt_tokens": 4000, "rollout_prompts": 64,
        }
    )  # fmt: skip
    assert config.environment is not None
    sampled: dict[tuple[int, int], list[int]] = {}
    contexts: dict[tuple[int, int], list[int]] = {}
    attempt = [0]
    vocabulary, calls = len(chat.tokenizer), [chat.encode([call])[0] for call in CALLS]
    marks = [number for token, number in chat.tokenizer.get_vocab().items() if token == "[TOOL_CALLS]"]

    def generate(model: Any, prompts: Any, options: Any, *, numbers: Sequence[int], **_: Any) -> list[list[int]]:
        answers = []
        for number, prompt in zip(numbers, prompts, strict=True):
            ids = [draw.randrange(vocabulary) for _ in range(draw.randrange(1, 12))]
            if draw.random() < 0.6:
                ids = [*marks, *draw.choice(calls)] if marks and draw.random() < 0.5 else draw.choice(calls)
            ids = [number for number in ids if number not in chat.stops][: options.max_new_tokens]
            end = draw.choice(sorted(chat.turn_ends if draw.random() < 0.95 else chat.stops))
            if len(ids) < options.max_new_tokens and draw.random() < 0.95:
                ids = [*ids, end]
            turn = sum(key[0] == number for key in sampled)
            sampled[number, turn], contexts[number, turn] = list(ids), list(prompt)
            answers.append(ids or [end])
            sampled[number, turn] = list(answers[-1])
        return answers

    class Player(Episodes):
        def _played(self, policy: Any, rows: Any, *rest: Any) -> Any:
            for key in [key for key in sampled if key[0] in rows]:  # played again from the beginning
                del sampled[key], contexts[key]
            attempt[0] += 1
            return super()._played(policy, rows, *rest)

    monkeypatch.setattr(playing, "generate", generate)
    player = Player(config, chat, prepare(LaunchConfig(device="cpu", threads=1)), Talkative(chat, draw))  # type: ignore[arg-type]
    tasks = list(map(Task.of, own_tasks(config.environment, "train", 2)))
    completions = player.play(torch.nn.Linear(1, 1), tasks, 3)  # type: ignore[arg-type]
    batch = AnswerBatch.of(completions, chat.pad)
    assert completions.episodes is not None and attempt[0] > 1
    several = 0
    for row, episode in enumerate(completions.episodes):
        if episode.is_copy:
            continue
        turns = [sampled[row, turn] for turn in range(episode.turns)]
        ids = completions.ids[row]
        flat = [number for turn in turns for number in turn]
        kept = [number for number, is_sampled in zip(ids, episode.sampled, strict=True) if is_sampled]
        # An answer may be cut where the episode's tokens run out, and is then its last one.
        assert kept == flat[: len(kept)] and (len(kept) == len(flat) or episode.ended == "tokens")
        real = batch.mask[row].bool()
        assert batch.tokens[row][real].tolist() == kept
        assert batch.ids[row][batch.places[row][real] + 1].tolist() == kept
        # Each turn was sampled after exactly the tokens that precede it in training.
        all_ids = [*completions.prompts[row], *ids]
        starts = [at for at, mark in enumerate(episode.sampled) if mark and (at == 0 or not episode.sampled[at - 1])]
        assert len(starts) == episode.turns
        for turn, start in enumerate(starts):
            assert contexts[row, turn] == all_ids[: len(completions.prompts[row]) + start]
        several += episode.turns > 1
    assert several > dialogues / 5, "dialogues have several turns"


@pytest.mark.parametrize("family", [STEMMA, *FAMILIES])
def test_replies_are_what_the_chat_template_writes(family: str) -> None:
    chat = chat_in(family)
    question, answer = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A stone."}
    again = {"role": "user", "content": "Why? <|end|> of\n it"}
    (prompt,), (full_ids,) = chat.ask([[question]]), chat.ask([[question, answer, again]])
    reply = chat.follow_up([again])
    assert full_ids[-len(reply) :] == reply
    if family not in REWRITTEN:
        (response,) = chat.respond([prompt], [answer["content"]])
        assert [*prompt, *response, *reply] == full_ids
    if chat.shows_tools:
        call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}
        result = {"role": "tool", "content": "3 stones", "tool_call_id": "call00000", "name": "look_up"}
        talk = [question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
        (full_ids,) = chat.ask([talk], [[TOOL]])
        reply = chat.follow_up([result], ["look_up"], [TOOL])
        assert full_ids[-len(reply) :] == reply and full_ids[-len(reply) - 1] in chat.turn_ends
        assert "3 stones" in chat.tokenizer.decode(reply) and "look_up{" not in chat.tokenizer.decode(reply)
