"""Conversations in the forms that instruction and preference files have: by turns, or as one prompt's text.

A preference's prompt of several turns is written as in Anthropic's HH-RLHF (Bai et al., 2022): turns that open with
`Human:` or `Assistant:`, a blank line between them. A single turn goes without its mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from corpus.readers.record import Unreadable
from infra.io.json import BadJson, parse_json

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

Role = Literal["system", "human", "assistant"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
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
"""Names of the three roles in ShareGPT (`from`), OpenAI (`role`), OpenAssistant and others."""
CALLS = ("function_call", "tool_call", "tool_calls")
RESULTS = ("tool", "function", "observation", "tool_response", "ipython")
"""ShareGPT's name of a message in which the assistant calls functions, and ShareGPT's and OpenAI's names of results."""

CHAT_ROLES: Mapping[Role, str] = {"system": "system", "human": "user", "assistant": "assistant"}
"""Names of the roles in chat templates of transformers."""

NOT_THE_SAME = "chosen and rejected are not two answers to the same dialogue"


class Turn(NamedTuple):
    """One message of a dialogue."""

    role: Role
    text: str


class DialogueExchange(NamedTuple):
    """The human's last message, the answer, and the messages before; the history begins with the human or the
    system."""

    history: tuple[Turn, ...]
    prompt: str
    response: str

    @property
    def first_turn(self) -> str:
        """The human's first message."""
        return next((turn.text for turn in self.history if turn.role == "human"), self.prompt)


class ToolExchange(NamedTuple):
    """A conversation in which the assistant calls functions, as messages of OpenAI's chats.

    history: messages before the last question, `prompt`. steps: calls and their results between it and the answer.
    tool_calls: of the answer, whose text is `response`. tools: descriptions of the functions.
    """

    history: tuple[Mapping[str, Any], ...]
    prompt: str
    steps: tuple[Mapping[str, Any], ...]
    response: str
    tool_calls: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All messages, without the tools."""
        return [*self.history, {"role": "user", "content": self.prompt}, *self.steps, self.answer]

    @property
    def answer(self) -> dict[str, Any]:
        """The answer as a message."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": "assistant", "content": self.response, **calls}

    @property
    def answer_text(self) -> str:
        """The answer as a text: its content, and its calls as JSON."""
        calls = (json.dumps(call["function"], ensure_ascii=False) for call in self.tool_calls)
        return "\n".join(filter(None, (self.response, *calls)))

    @property
    def first_turn(self) -> str:
        """The first question."""
        return next(str(message["content"]) for message in self.messages if message["role"] == "user")


class DialoguePair(NamedTuple):
    """Two answers to one dialogue.

    prompt: all before the answers. first_turn: the human's first message.
    """

    prompt: str
    chosen: str
    rejected: str
    first_turn: str


def turn_of(message: Any) -> Turn:
    """A message {"from", "value"} or {"role", "content"}; keys that are null count as missing, and the content may be a
    list of parts. YandexGPT writes `text` for it, Cohere `message`, and OpenAI `refusal` where its model refuses.

    Raises Unreadable for any other message, for an unknown role, and for calls of functions and their results, which
    `tool_exchange_of` reads.
    """
    role, content = _role_and_content(message)
    name = role.lower()
    if name in (*CALLS, *RESULTS) or _calls_of(message):
        raise Unreadable("function calls and their results are only read in instructions")
    if name not in ROLES:
        raise Unreadable(f"unknown role: {role}")
    return Turn(ROLES[name], content_text(content, role))


def _role_and_content(message: Any) -> tuple[str, Any]:
    if not isinstance(message, Mapping):
        raise Unreadable("expected a message with its role and text")
    role = _first_given(message, ("from", "role"))
    if not isinstance(role, str):
        raise Unreadable("expected a message with from and value, or role and content")
    return role, _first_given(message, ("value", "content", "text", "message", "refusal"))


def _first_given(message: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((message[name] for name in names if message.get(name) is not None), None)


def content_text(content: Any, role: str) -> str:
    """The text of a content: a string, or a list of parts that are all text. Raises Unreadable."""
    if isinstance(content, str):
        return content.strip()
    if content is None:
        raise Unreadable(f"no text: a message of the {role} has neither content nor a call")
    if isinstance(content, Sequence):
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else None
                raise Unreadable(f"a part of the content is not text: {kind or 'of no type'}")
            texts.append(text)
        return "\n".join(texts).strip()
    if role.lower() in RESULTS:
        return json.dumps(content, ensure_ascii=False)
    raise Unreadable("expected the content of a message to be a text, or a list of parts with a text each")


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The calls of functions in a message, next to its content."""
    calls = message.get("tool_calls")
    calls = _json_of(calls, "tool_calls") if isinstance(calls, str) and calls else calls
    if isinstance(calls, list) and calls:
        return calls
    old_form = message.get("function_call")  # OpenAI, before tools
    return [old_form] if isinstance(old_form, Mapping) else []


def turns_of(messages: Any) -> list[Turn]:
    """A list of messages. Raises Unreadable as `turn_of` does, and where it is no list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unreadable("expected a list of messages")
    return [turn_of(message) for message in messages]


def trimmed(turns: Sequence[Turn], ends_with_answer: bool = True) -> list[Turn]:
    """The turns without those of the assistant at the beginning and, if they are to end with an answer, those of the
    human at the end; the system's first message stays."""
    first = [turn for turn in turns[:1] if turn.role == "system"]
    dialogue = list(turns[len(first) :])
    while dialogue and dialogue[0].role == "assistant":
        dialogue.pop(0)
    while ends_with_answer and dialogue and dialogue[-1].role == "human":
        dialogue.pop()
    return [*first, *dialogue]


def answer_of(value: Any) -> str:
    """The answer of a text, a message or a list with one message, which the assistant gave. Raises Unreadable."""
    if isinstance(value, str):
        return value.strip()
    turns = [turn_of(value)] if isinstance(value, Mapping) else turns_of(value)
    if len(turns) != 1 or turns[0].role != "assistant":
        raise Unreadable("expected one answer of the assistant")
    return turns[0].text


def exchange_of_turns(turns: Sequence[Turn]) -> DialogueExchange:
    """A conversation by turns that ends with an answer.

    Raises Unreadable where it is empty, starts with the assistant, does not end with an answer, where an answer or a
    question is empty, one side speaks twice in a row, or the system speaks but at the beginning.
    """
    dialogue = list(turns[1:] if turns and turns[0].role == "system" else turns)
    if not dialogue:
        raise Unreadable("no prompt: the dialogue is empty")
    if dialogue[0].role == "assistant":
        raise Unreadable("the conversation starts with the assistant")
    if any(turn.role == "system" for turn in dialogue):
        raise Unreadable("the system speaks after the beginning of the conversation")
    for turn, after in pairwise(dialogue):
        if turn.role == after.role:
            raise Unreadable(f"the {turn.role} speaks twice in a row")
    if dialogue[-1].role != "assistant":
        raise Unreadable("no answer: the conversation does not end with the assistant")
    for turn in dialogue:
        if not turn.text:
            raise Unreadable("no answer: an answer is empty" if turn.role == "assistant" else "no prompt: it is empty")
    *history, prompt, answer = turns
    return DialogueExchange(tuple(history), prompt.text, answer.text)


def begins_with_system(messages: Sequence[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and (first.get("role") or first.get("from")) in ("system", "developer")


def has_tools(messages: Any) -> bool:
    """Return True if a list of messages has calls of functions or their results."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping)
        and (str(_first_given(message, ("from", "role"))).lower() in (*CALLS, *RESULTS) or bool(_calls_of(message)))
        for message in messages
    )


def tools_of(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The descriptions of functions of a conversation: a list, or its JSON. Raises Unreadable for anything else."""
    if isinstance(tools, str) and tools:
        tools = _json_of(tools, "tools")
    if not isinstance(tools or [], list) or not all(isinstance(tool, Mapping) for tool in tools or []):
        raise Unreadable("expected tools to be a list of descriptions of functions")
    return tuple(_without_nulls(tool) for tool in tools or ())


def tool_exchange_of(messages: Sequence[Any], tools: Sequence[Mapping[str, Any]], trim: bool = False) -> ToolExchange:
    """Return a conversation with functions that ends with an answer, or with calls.

    Args:
        messages: those of the conversation, in OpenAI's or ShareGPT's form.
        tools: descriptions of the functions.
        trim: True to cut off a first message of the assistant and a last one of the user.

    Raises:
        Unreadable: for messages in another form, or in an order that no chat template knows: the system comes first,
            then the user, and results after their calls.
    """
    dialogue: list[dict[str, Any]] = []
    for message in map(_tool_message, messages):
        # ShareGPT has one message per call, and a separate text before it.
        if dialogue and dialogue[-1]["role"] == "assistant" and message.get("tool_calls") and not message["content"]:
            dialogue[-1] = {**dialogue[-1], "tool_calls": [*dialogue[-1].get("tool_calls", ()), *message["tool_calls"]]}
        else:
            dialogue.append(message)
    if any(message["role"] == "system" for message in dialogue[1:]):
        raise Unreadable("the system speaks after the beginning of the conversation")
    system, dialogue = (dialogue[:1], dialogue[1:]) if dialogue and dialogue[0]["role"] == "system" else ([], dialogue)
    while trim and dialogue and dialogue[0]["role"] != "user":
        dialogue.pop(0)
    while trim and dialogue and dialogue[-1]["role"] != "assistant":
        dialogue.pop()
    if not dialogue or dialogue[0]["role"] != "user":
        raise Unreadable("no prompt: expected the user to speak first")
    if dialogue[-1]["role"] != "assistant":
        raise Unreadable("no answer: the conversation does not end with the assistant")
    for current, after in pairwise(dialogue):
        calls = current["role"] == "tool" or "tool_calls" in current
        if calls != (after["role"] == "tool") and not (current["role"] == "tool" and after["role"] == "assistant"):
            raise Unreadable("expected the results of functions after their calls")
        if current["role"] == after["role"] != "tool":
            raise Unreadable(f"the {current['role']} speaks twice in a row")
    last = max(number for number, message in enumerate(dialogue) if message["role"] == "user")
    answer = dialogue[-1]
    return ToolExchange(
        tuple(system + dialogue[:last]),
        str(dialogue[last]["content"]),
        tuple(dialogue[last + 1 : -1]),
        str(answer["content"]),
        tuple(answer.get("tool_calls", ())),
        tuple(tools),
    )


def _tool_message(message: Any) -> dict[str, Any]:
    role, content = _role_and_content(message)
    name = role.lower()
    if name in CALLS:
        calls = _json_of(content, role) if isinstance(content, str) else content
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])],
        }
    if name in RESULTS:
        optional_fields = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        return {
            "role": "tool",
            "content": content if isinstance(content, str) else content_text(content, role),
            **optional_fields,
        }
    if name not in ROLES:
        raise Unreadable(f"unknown role: {role}")
    calls = _calls_of(message)
    text = "" if content is None and calls else content_text(content, role)
    chat_message: dict[str, Any] = {"role": CHAT_ROLES[ROLES[name]], "content": text}
    if calls:
        if chat_message["role"] != "assistant":
            raise Unreadable(f"the {chat_message['role']} calls functions, which only the assistant can")
        chat_message["tool_calls"] = [_tool_call(call) for call in calls]
    elif not text:
        raise Unreadable(
            "no answer: an answer is empty" if chat_message["role"] == "assistant" else "no prompt: it is empty"
        )
    return chat_message


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unreadable("expected a call with function.name and function.arguments")
    arguments = _first_given(function, ("arguments", "parameters"))
    arguments = _json_of(arguments, "arguments") if isinstance(arguments, str) else arguments or {}
    if not isinstance(arguments, Mapping):
        raise Unreadable("expected the arguments of a call as a mapping")
    optional_fields = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **optional_fields,
        "type": "function",
        "function": {"name": function["name"], "arguments": _without_nulls(arguments)},
    }


def _json_of(text: str, name: str) -> Any:
    try:
        return parse_json(text, expected="JSON")
    except BadJson as error:
        raise Unreadable(f"{name}: {error}") from None


def _without_nulls(value: Any) -> Any:
    """A value of a table, whose columns have all keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def prompt_of_turns(turns: Sequence[Turn]) -> tuple[str, str]:
    """The text of a conversation that waits for an answer, and the human's first message.

    Raises Unreadable where it is empty, starts with the assistant, or does not end with the human.
    """
    dialogue = [turn for turn in turns if turn.role != "system"]
    if not dialogue:
        raise Unreadable("no prompt: the dialogue is empty")
    if dialogue[0].role == "assistant":
        raise Unreadable("the conversation starts with the assistant")
    if dialogue[-1].role != "human":
        raise Unreadable("the conversation does not end with the human, so that there is nothing to answer")
    if len(dialogue) == 1:
        return "\n\n".join(turn.text for turn in turns), dialogue[0].text
    names = {"system": "System", "human": "Human", "assistant": "Assistant"}
    return "\n\n".join(f"{names[turn.role]}: {turn.text}" for turn in turns), dialogue[0].text


def opening_of(prompt: str, history: Sequence[Mapping[str, str]] = ()) -> str:
    """The first human turn of the conversation in a line of instructions or preferences, in lower case and with single
    spaces: examples that share it are not independent.

    Args:
        prompt: as `prompt_of_turns` and `split_dialogues` write it.
        history: messages before the prompt.
    """
    opening = next((message["content"] for message in history if message["role"] == "user"), "")
    if not opening:
        before, mark, turns = f"\n\n{prompt}".partition(HUMAN)
        is_dialogue = mark and (not before.strip() or before.startswith("\n\nSystem:"))
        opening = turns.partition(ASSISTANT)[0] if is_dialogue else prompt
    return " ".join(opening.casefold().split())


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
