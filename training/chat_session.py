"""Talking with a model folder, or having it continue a text: what it says as it comes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus.pretrained import load_pretrained_tokenizer
from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from training.chat import Chat
from training.conversations import turns_of
from training.hardware import Hardware, prepare
from training.models import limit_length, load
from training.sampling import stream

KEPT = 8
"""Models that stay in memory."""
CLEANED = 8
"""Characters at the end of a text that the tokens after it may still change where the tokenizer removes spaces
(`clean_up_tokenization_spaces`): " n't" becomes "n't", and " ' " becomes "'", which may leave a space for the next."""


@dataclass(frozen=True)
class Spoken:
    """How an answer came to its end. ended: by itself, before the limit."""

    prompt_tokens: int
    tokens: int
    ended: bool


def answer(
    model_dir: Path,
    messages: Sequence[Mapping[str, str]],
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    seed: int = 17,
) -> Generator[str, None, Spoken]:
    """Yields the assistant's answer in pieces of text, one a token and some empty, until `<|end|>` or the limit;
    returns how it ended.

    messages: {"role": "system" | "user" | "assistant", "content": …}, the system first, the last from the user; the
    oldest text is dropped when it is more than the model has positions for. max_new_tokens: at most half of these
    positions. temperature: 0
    takes the likeliest token. Raises StageError for a folder that is no model of ours and for other roles.
    """
    model, tokenizer, hardware = loaded(Path(model_dir))
    chat = Chat(tokenizer)
    room, most = _room(model, max_new_tokens)
    ids = chat.dialogue(_turns(chat, messages), room)
    return (yield from _spoken(model, tokenizer, hardware, ids, chat.stops, most, temperature, seed))


def continuation(
    model_dir: Path, text: str, max_new_tokens: int = 256, temperature: float = 0.7, seed: int = 17
) -> Generator[str, None, Spoken]:
    """Yields what the model would write after `text`, as `answer` does, until the end of a text or the limit.

    The text is read as the beginning of a document; of one that is too long the end is.
    """
    model, tokenizer, hardware = loaded(Path(model_dir))
    room, most = _room(model, max_new_tokens)
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    first = [one for one in (end if start is None else start,) if one is not None]
    text_ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    ids = [*first, *text_ids[max(0, len(text_ids) - room + len(first)) :]]
    stops = set() if end is None else {end}
    return (yield from _spoken(model, tokenizer, hardware, ids, stops, most, temperature, seed))


def _room(model: PreTrainedModel, max_new_tokens: int) -> tuple[int, int]:
    """Positions for what is asked, and for the answer."""
    positions = limit_length(model, 1_000_000)
    most = min(max_new_tokens, positions // 2)
    return positions - most, most


def _spoken(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    hardware: Hardware,
    ids: Sequence[int],
    stops: set[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Generator[str, None, Spoken]:
    spoken: list[int] = []
    said, ended = "", False
    held_back = CLEANED if tokenizer.clean_up_tokenization_spaces else 0
    for token in stream(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, stops=stops, hardware=hardware, seed=seed
    ):
        if token in stops:
            ended = True
            break
        spoken.append(token)
        text = str(tokenizer.decode(spoken, skip_special_tokens=True))
        # A character may need more than one token: wait until it is whole. A caller may end the answer meanwhile.
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield ""
        else:
            piece = text[len(said) : max(0, len(text) - held_back)]
            yield piece
            said += piece
    rest = str(tokenizer.decode(spoken, skip_special_tokens=True))[len(said) :]
    if rest:
        yield rest
    return Spoken(len(ids), len(spoken), ended)


def _turns(chat: Chat, messages: Sequence[Mapping[str, str]]) -> list[tuple[int, list[int]]]:
    roles = {"user": chat.user, "assistant": chat.assistant}
    turns = turns_of(messages)
    texts = chat.encode([text for _, text in turns])
    return [(roles[role], ids) for (role, _), ids in zip(turns, texts, strict=True)]


@lru_cache(maxsize=KEPT)
def loaded(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Hardware]:
    """The model of a folder, ready to write, its tokenizer, and where it is. Raises StageError where there is none."""
    if not (model_dir / "config.json").is_file():
        raise stage_error("no_model", str(model_dir), "expected a Hugging Face model folder with config.json")
    hardware = prepare(LaunchConfig())
    return load(model_dir).eval().to(hardware.device), load_pretrained_tokenizer(model_dir), hardware
