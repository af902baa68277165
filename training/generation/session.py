"""Answers of a model folder, streamed: prompts as token ids, tokens as text."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from evaluation.generation.decoding import Decoder
from evaluation.generation.language_model import LoadedModel
from evaluation.generation.token_choice import SamplingOptions
from infra.errors import stage_error
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from training.chat.base import Chat, chat_of
from training.chat.channels import Addressed, ChannelReader, Reasoning, channel_marks
from training.core.hardware import prepare
from training.generation.answer_text import AnswerRequest, Spoken, Writing
from training.model.models import load

KEPT = 8
"""Models that stay in memory."""


def answer(
    model_dir: Path,
    messages: Sequence[Mapping[str, str]],
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    seed: int = 17,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Generator[str | Reasoning, None, Spoken]:
    """Yields the assistant's answer in pieces of text, one per token and some empty, until `<|end|>` or the limit, and
    the reasoning before it where a model has channels; returns the end of the answer.

    messages: {"role": "system" | "user" | "assistant", "content": …}, the system first, the last from the user; the
    oldest text is dropped when it is more than the model has positions for. max_new_tokens: at most half of these
    positions. temperature: 0 takes the likeliest token. chat_template_kwargs: values of the model's chat template, such
    as enable_thinking. Raises StageError for a folder that is no model of ours and for other roles.
    """
    lm = loaded(Path(model_dir))
    chat = _chat(lm.tokenizer, _as_key(chat_template_kwargs))
    most = min(max_new_tokens, lm.positions // 2)
    ids = chat.dialogue_of(messages, lm.positions - most)
    options = SamplingOptions(most, frozenset(chat.stops), temperature, seed=seed)
    marks = channel_marks(lm.tokenizer)
    reader = ChannelReader() if marks else None
    writing = Writing(AnswerRequest(ids, options, shown=marks), lm.tokenizer)
    decoder = _decoder(Path(model_dir))
    decoder.add(writing)
    try:
        while not writing.is_over:
            decoder.step()
            for piece in writing.pieces:
                yield from map(_shown, reader.add(piece.text)) if reader else (piece.text,)
            writing.pieces.clear()
        if reader:
            yield from map(_shown, reader.end())
    finally:
        decoder.remove(writing)
    if writing.error is not None:
        raise writing.error
    assert writing.spoken is not None
    return writing.spoken


def _shown(part: str | Reasoning | Addressed) -> str | Reasoning:
    return str(part) if isinstance(part, Addressed) else part


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], frozenset[int]]:
    """Return the token ids that ask for the assistant's next message, of any length, and those that end it.

    Args:
        tokenizer: Of the model.
        messages: As in OpenAI's protocol, each with a role and its content as text.
        tools: Descriptions of functions, for the chat template.
        chat_template_kwargs: Values of variables of the chat template.

    Raises:
        StageError: `no_tools` for a chat template that shows no tools, `bad_role` for roles and places that it refuses,
            `unknown_template_value` for a value that it does not read.
    """
    chat = _chat(tokenizer, _as_key(chat_template_kwargs))
    return chat.ask([messages], [tools])[0], frozenset(chat.stops)


@lru_cache(maxsize=4 * KEPT)
def _chat(tokenizer: PreTrainedTokenizerBase, values: str) -> Chat:
    """Conversations for the tokenizer of a model's folder; the text that a template writes after answers is determined
    once.

    values: of the chat template, as JSON.
    """
    return chat_of(tokenizer, Path(tokenizer.name_or_path), parse_own_json(values))


def _as_key(values: Mapping[str, Any] | None) -> str:
    return json.dumps(values or {}, sort_keys=True)


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], frozenset[int]]:
    """Return the token ids of a text that begins a document, of any length, and those that end its continuation."""
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    first = [one for one in (end if start is None else start,) if one is not None]
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    return [*first, *ids], frozenset(() if end is None else (end,))


@lru_cache(maxsize=KEPT)
def _decoder(model_dir: Path) -> Decoder:
    return Decoder(loaded(model_dir).model, at_once=1)


@lru_cache(maxsize=KEPT)
def loaded(model_dir: Path) -> LoadedModel:
    """Return the model of a folder, ready to generate. Raises StageError where there is none."""
    if not (model_dir / "config.json").is_file():
        raise stage_error("no_model", str(model_dir), "expected a Hugging Face model folder with config.json")
    device = prepare(LaunchConfig()).device
    return LoadedModel(load(model_dir).eval().to(device), load_pretrained_tokenizer(model_dir), device)
