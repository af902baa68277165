"""Talking with a model folder: answers as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedModel

from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from training.chat import Chat
from training.hardware import Hardware, prepare
from training.models import limit_length, load
from training.sampling import stream


def answer(
    model_dir: Path,
    messages: Sequence[Mapping[str, str]],
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    seed: int = 17,
) -> Iterator[str]:
    """Yields the assistant's answer in pieces of text, until `<|end|>` or the limit.

    messages: {"role": "user" | "assistant", "content": …}, the last from the user; the oldest text is dropped when
    it is more than the model has positions for. max_new_tokens: at most half of these positions. temperature: 0
    takes the likeliest token. Raises StageError for a folder that is no model of ours and for other roles.
    """
    model, chat, hardware = _loaded(Path(model_dir))
    positions = limit_length(model, 1_000_000)
    max_new_tokens = min(max_new_tokens, positions // 2)
    room = positions - max_new_tokens
    ids = chat.dialogue(_turns(chat, messages), room)
    spoken: list[int] = []
    said = ""
    for token in stream(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stops=chat.stops,
        hardware=hardware,
        seed=seed,
    ):
        if token in chat.stops:
            break
        spoken.append(token)
        text = str(chat.tokenizer.decode(spoken, skip_special_tokens=True))
        # A character may need more than one token: wait until it is whole.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(said) :]
            said = text
    rest = str(chat.tokenizer.decode(spoken, skip_special_tokens=True))[len(said) :]
    if rest:
        yield rest


def _turns(chat: Chat, messages: Sequence[Mapping[str, str]]) -> list[tuple[int, list[int]]]:
    roles = {"user": chat.user, "assistant": chat.assistant}
    for message in messages:
        if message["role"] not in roles:
            raise stage_error("bad_role", "messages", f"expected the roles user and assistant, not {message['role']!r}")
    texts = chat.encode([message["content"] for message in messages])
    return [(roles[message["role"]], ids) for message, ids in zip(messages, texts, strict=True)]


@lru_cache(maxsize=1)
def _loaded(model_dir: Path) -> tuple[PreTrainedModel, Chat, Hardware]:
    if not (model_dir / "config.json").is_file():
        raise stage_error("no_model", str(model_dir), "expected a Hugging Face model folder with config.json")
    hardware = prepare(LaunchConfig())
    return load(model_dir).eval().to(hardware.device), Chat.load(model_dir), hardware
