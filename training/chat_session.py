"""Answers of a model folder as they are written: prompts as token ids, tokens as text."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus.pretrained import load_pretrained_tokenizer
from evaluation.generation import Sampling, generate
from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from training.answer_text import AnswerText
from training.chat import Chat, chat_of
from training.families import FAMILIES
from training.hardware import Hardware, prepare
from training.models import limit_length, load
from training.sampling import stream
from training.token_choice import SamplingOptions, Token, TokenChooser, choose_tokens, logprobs_of

KEPT = 8
"""Models that stay in memory."""


@dataclass(frozen=True)
class Piece:
    """Further text of an answer, with the tokens that came with it; both may be empty. of_prompt: the tokens are those
    of the prompt, without their places."""

    text: str
    tokens: tuple[PlacedToken, ...] = ()
    of_prompt: bool = False


@dataclass(frozen=True)
class PlacedToken:
    """A token and the place of its text in that of the answer."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Spoken:
    """How an answer came to its end. ended: by itself or by a stop string, before the limit."""

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
    model, tokenizer, _ = loaded(Path(model_dir))
    chat = _chat(tokenizer)
    positions = positions_of(model)
    most = min(max_new_tokens, positions // 2)
    ids = chat.dialogue_of(messages, positions - most)
    options = SamplingOptions(most, frozenset(chat.stops), temperature, seed=seed)
    writing = write(model_dir, AnswerRequest(ids, options))
    while True:
        try:
            yield next(writing).text
        except StopIteration as end:
            spoken: Spoken = end.value
            return spoken


@dataclass(frozen=True)
class AnswerRequest:
    """An answer that is wanted.

    Args:
        ids: Token ids of the prompt, at least one.
        options: How tokens are chosen.
        stops: Texts before which the answer ends.
        prompt_logprobs: Number of the likeliest tokens that are reported for each token of the prompt; None for no
            report of the prompt.
    """

    ids: Sequence[int]
    options: SamplingOptions
    stops: Sequence[str] = ()
    prompt_logprobs: int | None = None


def write(model_dir: Path, request: AnswerRequest) -> Generator[Piece, None, Spoken]:
    """Yield what the model writes after a prompt, a piece for each token; return how it ended.

    Where the prompt is reported, the first piece has its tokens.
    """
    model, tokenizer, hardware = loaded(Path(model_dir))
    options, text = request.options, AnswerText(tokenizer, request.stops)
    if request.prompt_logprobs is not None:
        tokens = prompt_tokens(model, request.ids, request.prompt_logprobs, hardware)
        yield Piece("", tuple(PlacedToken(token, 0) for token in tokens), of_prompt=True)
    waiting: list[PlacedToken] = []
    count, ended = 0, False
    for token in _tokens(model, request.ids, options, hardware):
        if token.id in options.stop_ids:
            ended = True
            break
        count += 1
        if token.logprob is not None:
            waiting.append(PlacedToken(token, text.length))
        yield _piece(text.add(token.id), waiting, text)
        if text.is_stopped:
            return Spoken(len(request.ids), count, True)
    yield _piece(text.end(), waiting, text, is_last=True)
    return Spoken(len(request.ids), count, ended or text.is_stopped)


def _piece(text: str, waiting: list[PlacedToken], answer: AnswerText, *, is_last: bool = False) -> Piece:
    """Text with the tokens that wait for it, all but those behind a stop string."""
    if not (text or answer.is_stopped or is_last):
        return Piece("")
    tokens = tuple(one for one in waiting if not answer.is_stopped or one.offset < answer.length)
    waiting.clear()
    return Piece(text, tokens)


def prompt_tokens(model: PreTrainedModel, ids: Sequence[int], likeliest: int, hardware: Hardware) -> list[Token]:
    """The tokens of a prompt with their log-probabilities, all but the first, which nothing precedes."""
    with torch.no_grad(), hardware.autocast():
        logits = model(input_ids=torch.tensor([list(ids)], device=hardware.device), use_cache=False).logits[0, :-1]
    following = torch.tensor(ids[1:], device=hardware.device)
    return [Token(ids[0]), *(logprobs_of(logits.float(), following, [likeliest] * (len(ids) - 1)) if ids[1:] else ())]


def _tokens(
    model: PreTrainedModel, ids: Sequence[int], options: SamplingOptions, hardware: Hardware
) -> Iterator[Token]:
    """The tokens of one answer as they come; all at the end for a family that is not proven.

    Raises StageError `not_supported` for options that such a family does not take.
    """
    if model.config.model_type not in FAMILIES:
        if options.changes_logits or options.logprobs is not None:
            wanted = "logprobs" if options.logprobs is not None else "penalties and logit_bias"
            message = f"expected a request without {wanted}: {model.config.model_type} is written with by transformers"
            raise stage_error("not_supported", wanted, f"{message}, which does not report or change logits here")
        seed = (options.seed + options.number) % 2**63
        sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, seed)
        with hardware.autocast():
            (whole,) = generate(model, [ids], sampling, options.stop_ids)
        yield from map(Token, whole)
        return
    chooser = TokenChooser(options)
    chosen: list[Token] = []

    def pick(logits: Tensor, rows: Tensor, step: int) -> Tensor:
        chosen[:] = choose_tokens(logits, [chooser])
        return torch.tensor([chosen[0].id])

    for _ in stream([ids], model, options.max_new_tokens, options.stop_ids, hardware, pick):
        yield chosen[0]


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], frozenset[int]]:
    """The token ids that ask for the assistant's next message, of any length, and those that end it.

    Args:
        tokenizer: Of the model.
        messages: As in OpenAI's protocol, each with a role and its content as text.
        tools: Descriptions of functions, for the chat template.

    Raises:
        StageError: `no_tools` for a chat template that shows no tools, `bad_role` for roles and places that it refuses.
    """
    if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        template = tokenizer.chat_template
        if not isinstance(template, str) or "tools" not in template:
            message = "expected a conversation without tools: the model's chat template shows it none"
            raise stage_error("no_tools", "tools" if tools else "messages", message)
        chat = chat_of(tokenizer, Path(tokenizer.name_or_path), tools)
    else:
        chat = _chat(tokenizer)
    return chat.ask([messages])[0], frozenset(chat.stops)


@lru_cache(maxsize=KEPT)
def _chat(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Conversations for the tokenizer of a model's folder; what a template writes behind answers is found once."""
    return chat_of(tokenizer, Path(tokenizer.name_or_path))


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], frozenset[int]]:
    """The token ids of a text that begins a document, of any length, and those that end what follows."""
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    first = [one for one in (end if start is None else start,) if one is not None]
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    return [*first, *ids], frozenset(() if end is None else (end,))


def positions_of(model: PreTrainedModel) -> int:
    """The most tokens of a prompt and its answer together."""
    return limit_length(model, 1_000_000)


@lru_cache(maxsize=KEPT)
def loaded(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Hardware]:
    """The model of a folder, ready to write, its tokenizer, and where it is. Raises StageError where there is none."""
    if not (model_dir / "config.json").is_file():
        raise stage_error("no_model", str(model_dir), "expected a Hugging Face model folder with config.json")
    hardware = prepare(LaunchConfig())
    return load(model_dir).eval().to(hardware.device), load_pretrained_tokenizer(model_dir), hardware
