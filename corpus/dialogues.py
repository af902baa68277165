"""Conversations in the forms that instruction and preference files have: by turns, or as one prompt's text.

A preference's prompt of several turns is written as in Anthropic's HH-RLHF (Bai et al., 2022): turns that open with
`Human:` or `Assistant:`, a blank line between them. A single turn goes without its mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from corpus.readers.record import Unreadable

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

Role = Literal["system", "human", "assistant"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "human": "human",
    "user": "human",
    "prompter": "human",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}
"""What ShareGPT (`from`), OpenAI (`role`), OpenAssistant and others call the three."""

CHAT_ROLES: Mapping[Role, str] = {"system": "system", "human": "user", "assistant": "assistant"}
"""What chat templates of transformers call them."""

NOT_THE_SAME = "chosen and rejected are not two answers to the same dialogue"


class Turn(NamedTuple):
    """What one side said."""

    role: Role
    text: str


class Exchange(NamedTuple):
    """What the human asked last, the answer, and what was said before; the history begins with the human or the
    system."""

    history: tuple[Turn, ...]
    prompt: str
    response: str

    @property
    def first_turn(self) -> str:
        """What the human said first."""
        return next((one.text for one in self.history if one.role == "human"), self.prompt)


class DialoguePair(NamedTuple):
    """Two answers to one dialogue.

    prompt: all before the answers. first_turn: what the human said first.
    """

    prompt: str
    chosen: str
    rejected: str
    first_turn: str


def turn_of(message: Any) -> Turn:
    """A message {"from", "value"} or {"role", "content"}. Raises Unreadable for any other, or a role nobody knows."""
    if not isinstance(message, Mapping):
        raise Unreadable("expected a message with its role and text")
    role = message.get("from", message.get("role"))
    text = message.get("value", message.get("content"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise Unreadable("expected a message with from and value, or role and content")
    if role.lower() not in ROLES:
        raise Unreadable(f"unknown role: {role}")
    return Turn(ROLES[role.lower()], text.strip())


def turns_of(messages: Any) -> list[Turn]:
    """A list of messages. Raises Unreadable as `turn_of` does, and where it is no list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unreadable("expected a list of messages")
    return [turn_of(one) for one in messages]


def answer_of(value: Any) -> str:
    """The answer of a text, a message or a list with one message, which the assistant gave. Raises Unreadable."""
    if isinstance(value, str):
        return value.strip()
    turns = [turn_of(value)] if isinstance(value, Mapping) else turns_of(value)
    if len(turns) != 1 or turns[0].role != "assistant":
        raise Unreadable("expected one answer of the assistant")
    return turns[0].text


def exchange_of_turns(turns: Sequence[Turn]) -> Exchange:
    """A conversation by turns that ends with an answer.

    Raises Unreadable where it is empty, starts with the assistant, does not end with an answer, where an answer or a
    question is empty, one side speaks twice in a row, or the system speaks but at the beginning.
    """
    said = list(turns[1:] if turns and turns[0].role == "system" else turns)
    if not said:
        raise Unreadable("no prompt: nobody said anything")
    if said[0].role == "assistant":
        raise Unreadable("the conversation starts with the assistant")
    if any(one.role == "system" for one in said):
        raise Unreadable("the system speaks behind the beginning of the conversation")
    for one, after in pairwise(said):
        if one.role == after.role:
            raise Unreadable(f"the {one.role} speaks twice in a row")
    if said[-1].role != "assistant":
        raise Unreadable("no answer: the conversation does not end with the assistant")
    for one in said:
        if not one.text:
            raise Unreadable("no answer: an answer is empty" if one.role == "assistant" else "no prompt: it is empty")
    *history, asked, answer = turns
    return Exchange(tuple(history), asked.text, answer.text)


def prompt_of_turns(turns: Sequence[Turn]) -> tuple[str, str]:
    """The text of a conversation that waits for an answer, and what the human said first.

    Raises Unreadable where it is empty, starts with the assistant, or does not end with the human.
    """
    said = [one for one in turns if one.role != "system"]
    if not said:
        raise Unreadable("no prompt: nobody said anything")
    if said[0].role == "assistant":
        raise Unreadable("the conversation starts with the assistant")
    if said[-1].role != "human":
        raise Unreadable("the conversation does not end with the human, whom the answers would answer")
    if len(said) == 1:
        return "\n\n".join(one.text for one in turns), said[0].text
    names = {"system": "System", "human": "Human", "assistant": "Assistant"}
    return "\n\n".join(f"{names[one.role]}: {one.text}" for one in turns), said[0].text


def opening_of(prompt: str, history: Sequence[Mapping[str, str]] = ()) -> str:
    """The first human turn of the conversation in a line of instructions or preferences, in lower case and with single
    spaces: examples that share it are not independent.

    Args:
        prompt: as `prompt_of_turns` and `split_dialogues` write it.
        history: messages before the prompt.
    """
    asked = next((message["content"] for message in history if message["role"] == "user"), "")
    if not asked:
        before, mark, turns = f"\n\n{prompt}".partition(HUMAN)
        is_dialogue = mark and (not before.strip() or before.startswith("\n\nSystem:"))
        asked = turns.partition(ASSISTANT)[0] if is_dialogue else prompt
    return " ".join(asked.casefold().split())


def pair_of_turns(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> DialoguePair:
    """Two conversations that differ in their last turn. Raises Unreadable for any other."""
    if not chosen or not rejected or chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unreadable("no answer: expected conversations that end with the assistant")
    if list(chosen[:-1]) != list(rejected[:-1]):
        raise Unreadable(NOT_THE_SAME)
    prompt, first = prompt_of_turns(chosen[:-1])
    return DialoguePair(prompt, chosen[-1].text, rejected[-1].text, first)


def split_dialogues(chosen: str, rejected: str) -> DialoguePair:
    """Two dialogues of HH-RLHF as a prompt and two answers. Raises Unreadable where they are not that."""
    prompt, mark, good = chosen.rpartition(ASSISTANT)
    other_prompt, other_mark, bad = rejected.rpartition(ASSISTANT)
    if not mark or not other_mark:
        raise Unreadable('expected dialogues with an "Assistant:" turn')
    if prompt.partition(HUMAN)[0].strip().startswith(ASSISTANT.strip()):
        raise Unreadable("the conversation starts with the assistant")
    if HUMAN not in prompt:
        raise Unreadable('expected dialogues that open with a "Human:" turn')
    if prompt != other_prompt:
        raise Unreadable(NOT_THE_SAME)
    turns = prompt.removeprefix(HUMAN)
    first_turn = turns.partition(ASSISTANT)[0].strip()
    is_single = prompt.startswith(HUMAN) and ASSISTANT not in turns and HUMAN not in turns
    return DialoguePair((turns if is_single else prompt).strip(), good.strip(), bad.strip(), first_turn)
