"""Prompts, conversations and dialogues of any length, cut to any length: the text is cut, never the template."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infra.errors import StageError
from training.chat.base import Chat, read_rows
from training.config import RlhfConfig, SftConfig

WORDS = ["Return", "the", "sum", "of", "the", "array", "file", "list", "token", "model"]


@pytest.fixture(scope="module")
def chat(tokenizer_dir: Path) -> Chat:
    return Chat.load(tokenizer_dir)


def _texts(count: int) -> list[str]:
    drawn = random.Random(3)
    return ["", "a", *(" ".join(drawn.choices(WORDS, k=drawn.randrange(30))) for _ in range(count))]


def test_a_prompt_of_any_length_keeps_its_roles_and_its_end(chat: Chat) -> None:
    texts = _texts(20)
    whole = chat.prompts(texts, 1_000_000)
    for limit in range(80):
        for ids, full in zip(chat.prompts(texts, limit), whole, strict=True):
            text = full[1:-2]
            kept = max(0, min(len(text), limit - 3))
            assert ids == [chat.user, *text[len(text) - kept :], chat.end, chat.assistant]
            assert chat.shortened(full, limit) == ids


def test_a_dialogue_of_any_length_loses_its_oldest_text_first(chat: Chat) -> None:
    texts = chat.encode(_texts(5))
    messages = [((chat.user, chat.assistant)[place % 2], ids) for place, ids in enumerate(texts)]
    assert len(messages) == 7, "the last is the user's"
    whole = chat.dialogue(messages, 1_000_000)
    assert whole == [n for role, ids in messages for n in (role, *ids, chat.end)] + [chat.assistant]
    for limit in range(len(whole) + 5):
        ids = chat.dialogue(messages, limit)
        assert len(ids) <= max(limit, 4) and (len(ids) == len(whole)) == (limit >= len(whole))
        assert ids[0] == chat.user and ids[-2:] == [chat.end, chat.assistant]
        # Roles take turns, each after the end of the other; what is between is the end of what was said.
        roles = [number for number in ids if number in (chat.user, chat.assistant)]
        assert roles == [(chat.user, chat.assistant)[place % 2] for place in range(len(roles))]
        told = ids[1:]
        assert whole[len(whole) - len(told) :] == told
        assert ids.count(chat.end) == len(roles) - 1


def test_answers_that_leave_no_room_for_a_prompt_are_refused() -> None:
    for length in range(8, 40):
        for answer in range(1, 50):
            section = SftConfig(max_length=length, answer_max_tokens=answer)
            assert bool(section.problems()) == (answer > length - 4)
            assert bool(section.problems(positions=20)) == (answer > min(length, 20) - 4)
            policy = RlhfConfig(max_prompt_tokens=length, answer_max_tokens=answer)
            assert not policy.problems() and bool(policy.problems(positions=20)) == (answer > 16)


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"prompt": 5}'])
def test_a_line_of_prompts_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n')
    assert [row["prompt"] for row in read_rows(path, ("prompt",))] == ["one"]
    path.write_text(f'{{"prompt": "one"}}\n{line}\n')
    with pytest.raises(StageError) as wrong:
        read_rows(path, ("prompt",))
    assert wrong.value.problems[0].path == f"{path}:2"
