"""Conversations as token ids: `<|user|>{prompt}<|end|><|assistant|>{response}<|end|>`, and so on in turns, or by the
chat template that a model brings along (training/chat/model_template.py).

Text is encoded with special tokens split, so a prompt that spells out `<|end|>` cannot end its turn. For all other
text the ids equal those of the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from corpus.tokens.chat_template import ASSISTANT, CHAT_TEMPLATE, EARLIER_TEMPLATES, END, USER, check_values
from infra.errors import StageError, stage_error
from infra.io.bounded import file_lines
from infra.io.json import BadJson, parse_json, read_json
from training.model.loss import IGNORE

ROLE_TOKENS = 3
"""Number of role tokens in a prompt: `<|user|>`, `<|end|>` and `<|assistant|>`."""

Message = Mapping[str, Any]
"""A message of OpenAI's chats: `role`, `content`, and `tool_calls` or `tool_call_id` where functions are called."""
Answer = str | Message
"""Text of the assistant, or its message where it calls functions."""


@dataclass(frozen=True)
class Conversation:
    """A prompt with its roles, up to and with the last `<|assistant|>`, and the response with its `<|end|>`, as ids."""

    prompt: list[int]
    response: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response


def calls_functions(messages: Sequence[Message]) -> bool:
    """Return True if messages contain calls of functions, or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def no_tools(path: str) -> StageError:
    """Error for tools with a model whose chat template does not support them.

    Args:
        path: tools or messages.
    """
    message = "expected a conversation without tools: the model's chat template does not support tools"
    return stage_error("no_tools", path, message, "use a model whose template supports tools, or leave them out")


def as_user(message: Message) -> Message:
    """A message, the result of a function as one of the user, for formats without functions; in the words of Qwen's
    templates."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def turns_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Convert messages {"role", "content"} to (role, text) of user and assistant only: an initial system message is
    prepended to the first question, as in the chat template.

    Raises StageError `bad_role` for any other role or place, and where no user follows the system; `no_tools` for
    calls of functions.
    """
    if calls_functions(messages):
        raise no_tools("messages")
    system = messages[0]["content"] + "\n\n" if messages and messages[0]["role"] == "system" else ""
    turns = []
    for message in messages[1:] if system else messages:
        if message["role"] not in ("user", "assistant"):
            problem = f"expected the roles user and assistant, and system first, not {message['role']!r}"
            raise stage_error("bad_role", "messages", problem)
        text = message["content"]
        if message["role"] == "user":
            text, system = system + text, ""
        turns.append((message["role"], text))
    if system:
        raise stage_error("bad_role", "messages", "expected a user message after the system message")
    return turns


class Chat:
    """A tokenizer with the chat tokens."""

    least_prompt = ROLE_TOKENS + 1
    """Tokens of the shortest prompt: its roles and one token of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.user, self.assistant, self.end = (self._id(token) for token in (USER, ASSISTANT, END))
        pad = tokenizer.pad_token_id
        self.pad: int = self.end if pad is None else pad
        end_of_text = tokenizer.eos_token_id
        self.stops = {self.end} if end_of_text is None else {self.end, end_of_text}

    @classmethod
    def load(cls, folder: Path, values: Mapping[str, Any] | None = None, where: str = "") -> Chat:
        """The tokenizer of a model folder; raises StageError if it has no chat tokens or brings code along.

        Args:
            values, where: as of `chat_of`.
        """
        return chat_of(load_pretrained_tokenizer(folder), folder, values, where)

    def _id(self, token: str) -> int:
        number = self.tokenizer.get_vocab().get(token)
        if number is None:
            raise stage_error(
                "no_chat_tokens",
                "tokenizer",
                f"expected the chat token {token} in the tokenizer, but it is missing",
                "train the tokenizer with the tokenizer stage, or import the model with base_model, which adds it",
            )
        return int(number)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Plain text as ids; special tokens that it spells out are read as text."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
        ).input_ids
        return ids

    def prompts(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Prompts that ask for an answer, each at most `max_tokens` long: longer ones keep their roles and the end of
        their text."""
        return [self.asking(ids, max_tokens) for ids in self.encode(texts)]

    def shortened(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Shorten a prompt of `prompts` or `turns` to at most `max_tokens`: its oldest exchanges are dropped first, and
        the end of the last question is kept, with its roles."""
        begins = [index for index, number in enumerate(prompt) if number == self.user]
        for begin in begins:
            if len(prompt) - begin <= max_tokens:
                return list(prompt[begin:])
        return self.asking(prompt[begins[-1] + 1 : -2], max_tokens)

    def turns(self, messages: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Messages (role's token, text) and the role that answers."""
        return [*(number for role, text in messages for number in (role, *text, self.end)), self.assistant]

    def dialogue(self, messages: Sequence[tuple[int, Sequence[int]]], max_tokens: int) -> list[int]:
        """Messages (role's token, text) and the role that answers, at most `max_tokens` long in all.

        The oldest messages go first, and what is left begins with the user. Of a message that fits in part the end
        stays; the last one stays with its role, however little room there is.
        """
        room = max_tokens - 1
        kept: list[list[int]] = []
        for number, (role, text) in enumerate(reversed(messages)):
            if number and room < 2 + min(1, len(text)):
                break
            cut = _end(text, room - 2)
            kept.insert(0, [role, *cut, self.end])
            room -= len(kept[0])
            if len(cut) < len(text):
                break
        while len(kept) > 1 and kept[0][0] != self.user:
            kept.pop(0)
        return [*(number for message in kept for number in message), self.assistant]

    def asking(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """A prompt's text with its roles, as `prompts` gives it."""
        return [self.user, *_end(text, max_tokens - ROLE_TOKENS), self.end, self.assistant]

    def ask(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any]] | None = None
    ) -> list[list[int]]:
        """Messages {"role", "content"} as prompts that ask for the assistant's answer, of any length.

        Args:
            tools: descriptions of the functions of each conversation.

        Raises StageError `no_tools` where the chat format has no place for them.
        """
        if any(tools or ()):
            raise no_tools("tools")
        turns = [turns_of(messages) for messages in conversations]
        texts = iter(self.encode([text for those in turns for _, text in those]))
        roles = {"user": self.user, "assistant": self.assistant}
        return [self.turns([(roles[role], next(texts)) for role, _ in those]) for those in turns]

    @property
    def shows_tools(self) -> bool:
        """True if the format has a place for descriptions of functions and for their results."""
        return False

    @property
    def turn_ends(self) -> set[int]:
        """Tokens after one of which a conversation goes on."""
        return {self.end}

    def follow_up(self, messages: Sequence[Message], calls: Sequence[str] = (), tools: Sequence[Any] = ()) -> list[int]:
        """Return the tokens that follow a sampled answer with its end: messages to it, and the role that answers.

        The answer's own tokens are not needed: nothing that was sampled is encoded again.

        Args:
            messages: of the user, or results of functions (role `tool`).
            calls: names of the functions that the answer called.
            tools: descriptions of the conversation's functions.

        Raises StageError `bad_messages` where the chat template refuses them.
        """
        texts = self.encode([as_user(message)["content"] for message in messages])
        return self.turns([(self.user, text) for text in texts])

    def respond(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[list[int]]:
        """Answers to prompts of `ask`, each with its end."""
        texts = [answer if isinstance(answer, str) else turns_of([answer])[0][1] for answer in answers]
        return [[*answer, self.end] for answer in self.encode(texts)]

    def dialogue_of(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        """Messages {"role", "content"} as `dialogue` has them."""
        turns = turns_of(messages)
        roles = {"user": self.user, "assistant": self.assistant}
        texts = self.encode([text for _, text in turns])
        return self.dialogue([(roles[role], ids) for (role, _), ids in zip(turns, texts, strict=True)], max_tokens)

    def has_ended(self, answer: Sequence[int]) -> bool:
        """Return True if a sampled answer ends with its end token."""
        return list(answer[-1:]) == [self.end]

    def conversations(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Conversation]:
        """Prompts with responses, of any length."""
        pairs = zip(self.encode(prompts), self.encode(responses), strict=True)
        return [Conversation(self.turns([(self.user, prompt)]), [*answer, self.end]) for prompt, answer in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        """An answer as text, up to its end."""
        until = next((index for index, number in enumerate(ids) if number in self.stops), len(ids))
        return str(self.tokenizer.decode(list(ids[:until]), skip_special_tokens=True)).strip()

    def response_batch(self, conversations: Sequence[Conversation], *, every_answer: bool = False) -> dict[str, Tensor]:
        """Return `input_ids (B, T)` padded on the right, and `labels (B, T)`: the next token where it is of the
        response.

        Args:
            every_answer: or of an answer of the assistant within the prompt, each with its `<|end|>`.
        """
        ids = pad([conversation.ids for conversation in conversations], self.pad)
        labels = torch.full_like(ids, IGNORE)
        for row, conversation in enumerate(conversations):
            answers = [
                (len(conversation.prompt), len(conversation.ids)),
                *(self._answers_in(conversation.prompt) if every_answer else ()),
            ]
            for start, stop in answers:
                labels[row, start - 1 : stop - 1] = ids[row, start:stop]
        return {"input_ids": ids, "labels": labels}

    def _answers_in(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of answers: start follows the role, and stop includes `<|end|>`."""
        for index, number in enumerate(prompt[:-1]):
            if number == self.assistant:
                yield index + 1, prompt.index(self.end, index) + 1


def chat_of(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None = None,
    values: Mapping[str, Any] | None = None,
    where: str = "",
) -> Chat:
    """Conversations for a tokenizer: by its own chat template, or by ours where it has ours or none.

    Args:
        folder: of the model, whose generation_config.json names further tokens that end an answer.
        values: of variables of the template, such as enable_thinking.
        where: the dotted section or key before `chat_template_kwargs`, for messages.

    Raises StageError for one that has neither a template nor our chat tokens, and `unknown_template_value` for values
    that the template does not read.
    """
    check_values(tokenizer, values or {}, f"{where}.chat_template_kwargs".removeprefix("."))
    if not tokenizer.chat_template or tokenizer.chat_template in (CHAT_TEMPLATE, *EARLIER_TEMPLATES):
        return Chat(tokenizer)
    from training.chat.model_template import TemplateChat  # it builds on this module

    ends: Any = None
    if folder is not None and (path := folder / "generation_config.json").is_file():
        ends = read_json(path).get("eos_token_id")
    return TemplateChat(tokenizer, [ends] if isinstance(ends, int) else ends or [], **(values or {}))


def _end(ids: Sequence[int], count: int) -> list[int]:
    """The last `count` ids, none for 0 or less."""
    return list(ids[len(ids) - min(len(ids), max(0, count)) :])


def pad(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Ids of different lengths as (B, T), filled on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def read_rows(
    path: Path, keys: Sequence[str], limit: int | None = None, *, surrogates: bool = False
) -> list[dict[str, Any]]:
    """Return the JSON lines of a pairs file.

    Args:
        path: JSON lines.
        keys: keys that each line must have, with texts.
        limit: maximum number of lines.
        surrogates: accept halves of surrogate pairs, for a caller that repairs them.

    Raises:
        StageError: for a line that is not a JSON object, a missing key or an empty file.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        raise stage_error(
            "missing_file", str(path), "expected JSON lines, but the file does not exist", "rebuild its stage"
        )
    for number, line in file_lines(path):
        if len(rows) == limit:
            break
        if not line.strip():
            continue
        try:
            row = parse_json(line, expected="a JSON object on each line", surrogates=surrogates)
        except BadJson as error:
            raise stage_error("corrupt_line", f"{path}:{number}", str(error)) from None
        if not isinstance(row, dict):
            raise stage_error("corrupt_line", f"{path}:{number}", "expected a JSON object on each line")
        if missing := [key for key in keys if not isinstance(row.get(key), str)]:
            raise stage_error("bad_row", f"{path}:{number}", f"expected text under {', '.join(missing)}")
        rows.append(row)
    if not rows:
        raise stage_error("no_rows", str(path), "expected at least one pair, but the file is empty", "provide pairs")
    return rows
