"""Bodies of responses of OpenAI's `/chat/completions`, in the forms in which servers send them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from corpus.generation.answers import EndpointAnswer
from corpus.readers.encodings import whole_characters
from infra.errors import shortened
from infra.io.json import parse_json

_THOUGHTS = re.compile(r"\A(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)
"""The thoughts in front of an answer. Chat templates that write `<think>` themselves leave the end of it alone."""
_UNENDED_THOUGHTS = re.compile(r"\A\s*<think>.*\Z", re.DOTALL)
_STREAM = re.compile(rb"\A\s*(?:data|event|id|retry)?:")
_FINISHES = {
    "max_tokens": "length",
    "model_length": "length",
    "max_output_tokens": "length",
    "safety": "content_filter",
}
"""Other names of the same reasons."""
_TEXT_PARTS = (None, "text", "output_text")


def answer_of(body: bytes) -> EndpointAnswer:
    """Return the answer in a body: JSON, or the events of a stream, which some servers send unasked.

    Only the answer is kept of a model that thinks, whether its thoughts are in separate fields, in parts, or in
    `<think>`. Raises ValueError for anything but a complete answer.
    """
    response = _joined(body) if _STREAM.match(body) else parse_json(body, surrogates=True)
    try:
        choice = response["choices"][0]
        message = choice["message"]
        text, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError):
        raise ValueError("expected choices with a message") from None
    finish = str(choice.get("finish_reason") or "stop").lower()
    if choice.get("error") or finish in ("error", "abort"):
        raise ValueError(f"it ended with {choice.get('error') or finish}")
    text = _text_of(text)
    if not text and isinstance(refusal, str) and refusal:
        finish = "content_filter"
    usage = response.get("usage")
    counts = [usage.get(f"{kind}_tokens") if isinstance(usage, dict) else 0 for kind in ("prompt", "completion")]
    tokens = [count if isinstance(count, int) else 0 for count in counts]
    model = response.get("model")
    written = without_thoughts(whole_characters(text).replace("\0", ""))
    return EndpointAnswer(written, _FINISHES.get(finish, finish), model if isinstance(model, str) else "", *tokens)


def without_thoughts(text: str) -> str:
    """Return the part of a text after the thoughts in front of it; "" if they do not end."""
    return _UNENDED_THOUGHTS.sub("", _THOUGHTS.sub("", text, count=1))


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, in one line."""
    text = body[:4000].decode("utf8", "replace")
    with suppress(ValueError):
        content = parse_json(body)
        error = content.get("error", content) if isinstance(content, dict) else content
        text = str((error.get("message") or error.get("detail") or error) if isinstance(error, dict) else error)
    return shortened(" ".join(text.split())) or "without a word"


def is_out_of_quota(body: bytes) -> bool:
    """Return True if the body of a 429 reports an account without credit, which no pause restores."""
    return b'"insufficient_quota"' in body


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, str | Mapping) for part in content):
        raise ValueError("expected a message whose content is a text")
    parts = [
        part if isinstance(part, str) else part.get("text") if part.get("type") in _TEXT_PARTS else None
        for part in content
    ]
    return "".join(part for part in parts if isinstance(part, str))


def _joined(body: bytes) -> dict[str, Any]:
    """The one response that the events of a stream amount to."""
    texts: list[str] = []
    refusals: list[str] = []
    response: dict[str, Any] = {}
    finish, is_done = None, False
    for data in _events(body):
        if data == "[DONE]":
            is_done = True
            break
        event = parse_json(data, surrogates=True)
        if not isinstance(event, dict) or event.get("error"):
            raise ValueError("an error within a stream")
        response |= {key: event[key] for key in ("model", "usage") if event.get(key)}
        for choice in event.get("choices") or []:
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or choice.get("message") or {}
            if not isinstance(delta, dict):
                raise ValueError("expected a delta of a message")
            texts.append(_text_of(delta.get("content")))
            refusals.append(_text_of(delta.get("refusal")))
            finish = choice.get("finish_reason") or finish
    if not finish and not is_done:
        raise ValueError("a stream that ended early")
    message = {"content": "".join(texts), "refusal": "".join(refusals)}
    return {**response, "choices": [{"message": message, "finish_reason": finish}]}


def _events(body: bytes) -> Iterator[str]:
    """The data of each event, whose lines may be several."""
    lines: list[str] = []
    for line in re.split(r"\r\n|\r|\n", body.decode("utf8", "replace").removeprefix("\ufeff")):
        if line.startswith("data:"):
            lines.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)
