"""Continuous batching: answers of one model that are generated together, token by token.

An answer joins the batch before any token and leaves it with its last one, or when it is cancelled. Keys and values are
in slots (`evaluation/generation/decoding.py`), which grow with the longest answer. If memory no longer holds all of
them, the newest answers wait and are read again later, with the tokens that they have. Each answer depends on its
request alone, except for the rounding of logits.

Models that slots do not support, and prompts that are longer than a sliding window, are answered outside of the batch,
one token of each such answer after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.generation.continuations import Sampling, generate
from evaluation.generation.decoding import PREFILL_TOKENS, Decoder, slots_in_memory
from evaluation.generation.slots import Slots
from infra.errors import StemmaError, stage_error
from training.config.families import FAMILIES
from training.core.hardware import Hardware
from training.generation.answer_text import AnswerText
from training.generation.sampling import stream
from training.generation.token_choice import SamplingOptions, Token, TokenChooser, choose_tokens, logprobs_of
from training.model.models import limit_length
from training.model.new_tokens import unused_ids

AT_ONCE = 16
"""Answers that are generated together."""
LEAST_WIDTH = 256
"""Initial number of places of a slot."""


@dataclass(frozen=True)
class PlacedToken:
    """A token and the place of its text in that of the answer."""

    token: Token
    offset: int


@dataclass(frozen=True)
class TextPiece:
    """Further text of an answer, with the tokens that came with it; both may be empty. of_prompt: the tokens are the
    prompt's, without their places."""

    text: str
    tokens: tuple[PlacedToken, ...] = ()
    of_prompt: bool = False


@dataclass(frozen=True)
class Spoken:
    """The end of an answer. ended: by itself or by a stop string, before the limit."""

    prompt_tokens: int
    tokens: int
    ended: bool


@dataclass(frozen=True)
class AnswerRequest:
    """An answer that is wanted.

    Args:
        ids: Token ids of the prompt, at least one.
        options: How tokens are chosen.
        stops: Texts before which the answer ends.
        shown: Special tokens that are part of the text.
        prompt_logprobs: Number of the likeliest tokens that are reported for each token of the prompt; None for no
            report of the prompt.
    """

    ids: Sequence[int]
    options: SamplingOptions
    stops: Sequence[str] = ()
    prompt_logprobs: int | None = None
    shown: frozenset[int] = frozenset()


class Writing:
    """An answer in progress.

    pieces: new text since they were last taken. spoken: the end of the answer, None before. error: why it failed.
    """

    def __init__(self, request: AnswerRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.request = request
        self.ids = list(request.ids)
        self.chooser = TokenChooser(request.options)
        self.is_reported = request.prompt_logprobs is None
        self.pieces: list[TextPiece] = []
        self.spoken: Spoken | None = None
        self.error: StemmaError | None = None
        self._text = AnswerText(tokenizer, request.stops, request.shown)
        self._unplaced: list[PlacedToken] = []

    def report(self, tokens: Sequence[Token]) -> None:
        """Add the tokens of the prompt."""
        self.is_reported = True
        self.pieces.append(TextPiece("", tuple(PlacedToken(token, 0) for token in tokens), of_prompt=True))

    def take(self, token: Token) -> None:
        """Add the next token."""
        if token.id in self.request.options.stop_ids:
            self.end(by_itself=True)
            return
        self.ids.append(token.id)
        if token.logprob is not None:
            self._unplaced.append(PlacedToken(token, self._text.length))
        self._add_piece(self._text.add(token.id))
        if self._text.is_stopped or self.count >= self.request.options.max_new_tokens:
            self.end(by_itself=False)

    def end(self, *, by_itself: bool) -> None:
        self._add_piece(self._text.end(), is_last=True)
        self.spoken = Spoken(len(self.request.ids), self.count, by_itself or self._text.is_stopped)

    @property
    def is_over(self) -> bool:
        return self.spoken is not None or self.error is not None

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - len(self.request.ids)

    def _add_piece(self, text: str, *, is_last: bool = False) -> None:
        """Add text with the tokens that wait for it, except those behind a stop string."""
        if not (text or is_last or self._text.is_stopped):
            return
        is_stopped, length = self._text.is_stopped, self._text.length
        tokens = tuple(one for one in self._unplaced if not is_stopped or one.offset < length)
        self._unplaced.clear()
        if text or tokens:
            self.pieces.append(TextPiece(text, tokens))


class BatchedAnswers:
    """The answers of one model that are in progress. Used by one thread.

    Args:
        model: In evaluation mode.
        hardware: Where it is.
        at_once: Most answers in the batch.
    """

    def __init__(self, model: PreTrainedModel, hardware: Hardware, at_once: int = AT_ONCE) -> None:
        self._model, self._hardware, self._at_once = model, hardware, at_once
        self._decoder = Decoder(model, at_once)
        self._unused = torch.tensor(unused_ids(model), dtype=torch.long, device=model.device)
        self._positions = limit_length(model, 1_000_000)
        self._kept: Slots | None = None
        self._capacity = self._width = 0
        self._waiting: deque[Writing] = deque()
        self._rows: list[Writing] = []
        """The answer of each of the first slots, which hold all of its tokens but the last."""
        self._alone: list[tuple[Writing, Iterator[Token]]] = []

    def add(self, writing: Writing) -> None:
        self._waiting.append(writing)

    @torch.inference_mode()
    def remove(self, writing: Writing) -> None:
        """Stop an answer."""
        if writing in self._rows:
            self._leave(self._rows.index(writing))
        elif writing in self._waiting:
            self._waiting.remove(writing)
        self._alone = [pair for pair in self._alone if pair[0] is not writing]

    @torch.inference_mode()
    def step(self) -> None:
        """Read the prompts that fit, and generate a token of each answer in progress; complete answers leave."""
        if begun := self._admitted():
            first = len(self._rows)
            self._rows += begun
            assert self._kept is not None
            self._take(self._decoder.read(self._kept, [writing.ids for writing in begun], first), begun)
        if self._rows:
            self._make_room()
            assert self._kept is not None
            tokens, lengths = [one.ids[-1] for one in self._rows], [len(one.ids) - 1 for one in self._rows]
            self._take(self._decoder.step(self._kept, tokens, lengths), self._rows)
        for writing, tokens_alone in self._alone:
            try:
                token = next(tokens_alone, None)
            except StemmaError as error:
                writing.error = error
                continue
            if token is None:
                writing.end(by_itself=False)
            else:
                writing.take(token)
        self._alone = [pair for pair in self._alone if not pair[0].is_over]
        if not self._rows and self._width > LEAST_WIDTH:
            self._resize(LEAST_WIDTH)  # one long answer keeps no memory allocated

    def _take(self, logits: Tensor, writings: Sequence[Writing]) -> None:
        """Choose the next tokens of answers (N) from logits (N, V); complete answers leave."""
        tokens = choose_tokens(logits.index_fill(1, self._unused, -torch.inf), [one.chooser for one in writings])
        for writing, token in zip(writings, tokens, strict=True):
            writing.take(token)
        for row in range(len(self._rows) - 1, -1, -1):
            if self._rows[row].spoken is not None:
                self._leave(row)

    def _leave(self, row: int) -> None:
        """Free an answer's slot; the last answer moves there, so that those in progress are in the first slots."""
        last = self._rows.pop()
        if row < len(self._rows):
            assert self._kept is not None
            self._kept.move(len(self._rows), row, len(last.ids) - 1)
            self._rows[row] = last

    def _admitted(self) -> list[Writing]:
        """Return the answers that join the batch now, the longest first; also start those that are generated alone."""
        begun: list[Writing] = []
        longest = total = 0
        while self._waiting:
            writing = self._waiting[0]
            if not writing.is_reported:
                writing.report(_prompt_tokens(self._model, writing.request))
            if writing.request.options.max_new_tokens == 0:
                writing.end(by_itself=False)
            elif not self._decoder.usable([writing.ids], writing.request.options.max_new_tokens - writing.count):
                self._alone.append((writing, _tokens_alone(self._model, writing, self._hardware)))
            else:
                longest = max(longest, len(writing.ids))
                total += len(writing.ids)
                width = max(self._width, self._width_for(longest + 1))
                is_full = len(self._rows) + len(begun) >= self._capacity_of(width)
                if is_full or (begun and total > PREFILL_TOKENS):
                    break
                if width > self._width:
                    self._resize(width)
                begun.append(writing)
            self._waiting.popleft()
        return sorted(begun, key=lambda writing: -len(writing.ids))

    def _make_room(self) -> None:
        """Widen the slots for the next tokens; if memory does not hold all answers then, the newest wait."""
        width = self._width_for(max(len(writing.ids) for writing in self._rows))
        if width <= self._width:
            return
        # Rows move when one leaves: the newest is the one with the fewest tokens.
        while len(self._rows) > self._capacity_of(width):
            newest = min(range(len(self._rows)), key=lambda row: self._rows[row].count)
            self._waiting.appendleft(self._rows[newest])
            self._leave(newest)
        self._resize(width)

    def _width_for(self, tokens: int) -> int:
        """Return the places of slots that hold at least this number of tokens, and some more, so that they seldom
        grow."""
        width = LEAST_WIDTH
        while width < tokens:
            width *= 2
        return min(width, max(tokens, self._positions))

    def _capacity_of(self, width: int) -> int:
        return min(self._at_once, slots_in_memory(self._model, width))

    def _resize(self, width: int) -> None:
        if self._kept is None:
            self._kept = self._decoder.slots(self._capacity_of(width), width)
        else:
            self._kept.resize(self._capacity_of(width), width)
        self._width = width


def _prompt_tokens(model: PreTrainedModel, request: AnswerRequest) -> list[Token]:
    """Return the tokens of a prompt with their log-probabilities, except for the first, which nothing precedes."""
    ids, likeliest = request.ids, request.prompt_logprobs or 0
    logits = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0, :-1]
    following = torch.tensor(ids[1:], device=model.device)
    return [Token(ids[0]), *(logprobs_of(logits.float(), following, [likeliest] * (len(ids) - 1)) if ids[1:] else ())]


def _tokens_alone(model: PreTrainedModel, writing: Writing, hardware: Hardware) -> Iterator[Token]:
    """Yield the tokens of one answer during generation; all at the end for a family that is not proven.

    Raises StageError `not_supported` for options that such a family does not support.
    """
    options = writing.request.options
    if model.config.model_type not in FAMILIES:
        if options.changes_logits or options.logprobs is not None:
            wanted = "logprobs" if options.logprobs is not None else "logit_bias"
            kind = model.config.model_type
            message = (
                f"expected a request without log-probabilities, penalties and bias: transformers writes with a {kind}"
            )
            raise stage_error("not_supported", wanted, message)
        seed = (options.seed + options.number) % 2**63
        sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, seed)
        with hardware.autocast():
            (whole,) = generate(model, [writing.ids], sampling, options.stop_ids)
        yield from map(Token, whole)
        return
    chosen: list[Token] = []

    def pick(logits: Tensor, rows: Tensor, step: int) -> Tensor:
        chosen[:] = choose_tokens(logits, [writing.chooser])
        return torch.tensor([chosen[0].id])

    most = options.max_new_tokens - writing.count
    for _ in stream([list(writing.ids)], model, most, options.stop_ids, hardware, pick):
        yield chosen[0]
