"""Messages of an answer in several channels (harmony, the format of gpt-oss), read during generation.

An answer is a series of messages, `<|channel|>CHANNEL<|message|>TEXT<|end|><|start|>assistant…`: reasoning in the
channel analysis, the answer in final. A header may name a recipient, `to=functions.NAME`: such a message is a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

START, CHANNEL, MESSAGE, END, CALL, RETURN = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
CONSTRAIN = "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
REASONING = "analysis"
_ENDS = (END, START, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_HEADER = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
"""Beginnings of a header, after the role that the prompt ends with."""


@dataclass(frozen=True)
class Reasoning:
    """Text that precedes the answer."""

    text: str


@dataclass(frozen=True)
class Addressed:
    """A message with a recipient, whole."""

    recipient: str
    text: str

    def __str__(self) -> str:
        return f"to={self.recipient} {self.text}"


def channel_marks(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens of the marks of messages, none for a model whose chat template has no channels. They are
    special tokens, which an answer's text shows only where they are requested."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if not all(mark in template for mark in (START, CHANNEL, MESSAGE, END)):
        return frozenset()
    known = tokenizer.get_vocab()
    return frozenset(known[mark] for mark in MARKS if mark in known)


class ChannelReader:
    """Messages of one answer to a prompt that ends with `<|start|>assistant`. An answer that does not begin with a
    header is text."""

    def __init__(self) -> None:
        self._pending = ""
        self._is_header = True
        self._channel = ""
        self._recipient: str | None = None

    def add(self, text: str) -> Iterator[str | Reasoning | Addressed]:
        """Yield what is final after further text of the answer, which includes the marks."""
        self._pending += text
        while self._pending:
            if self._is_header:
                if not self._read_header():
                    return
                continue
            end = min((at for mark in _ENDS if (at := self._pending.find(mark)) >= 0), default=-1)
            if end >= 0:
                body, self._pending = self._pending[:end], self._pending[end:]
                yield from self._body(body)
                for mark in (END, CALL, RETURN):
                    self._pending = self._pending.removeprefix(mark)
                self._is_header, self._channel, self._recipient = True, "", None
                continue
            if self._recipient is not None:
                return  # a call is read whole
            starts = (at for at in range(len(self._pending)) if any(m.startswith(self._pending[at:]) for m in _ENDS))
            certain = next(starts, len(self._pending))
            body, self._pending = self._pending[:certain], self._pending[certain:]
            yield from self._body(body)
            return

    def end(self) -> Iterator[str | Reasoning | Addressed]:
        """Yield the rest, once the answer has ended. A header without its message is left out."""
        rest, self._pending = self._pending, ""
        if not (self._is_header and rest.lstrip().startswith(_HEADER)):
            yield from self._body(rest)

    def _read_header(self) -> bool:
        """Read the header that the pending text begins with; return False where more text is needed."""
        unread = self._pending.lstrip()
        if not any(unread.startswith(mark) or mark.startswith(unread) for mark in _HEADER):
            self._is_header = False
            return True
        header, mark, rest = self._pending.partition(MESSAGE)
        if not mark:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else ""
        self._recipient = recipient[1] if recipient else None
        self._pending, self._is_header = rest, False
        return True

    def _body(self, text: str) -> Iterator[str | Reasoning | Addressed]:
        if self._recipient is not None:
            yield Addressed(self._recipient, text)
        elif text:
            yield Reasoning(text) if self._channel == REASONING else text
