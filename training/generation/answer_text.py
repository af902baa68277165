"""The text of an answer during generation: characters that no later token changes, up to a stop string.

`Writing` is an answer of the decoder (`evaluation/generation/decoding.py`) with its text, for chat and serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from evaluation.generation.token_choice import ChosenAnswer, SamplingOptions, Token
from training.generation.constraint import ConstrainedText, Constraint

CLEANED = 8
"""Characters at the end of a text that later tokens may still change where the tokenizer removes spaces
(`clean_up_tokenization_spaces`): " n't" becomes "n't", and " ' " becomes "'", which may leave a space for the next."""
WINDOW, KEPT = 48, 16
"""Tokens that are decoded at once, and the number of them that stay when the window moves on: decoding an answer from
its beginning for each token takes time that grows with the square of its length."""
MOST_UNFINISHED = 8
"""Maximum number of tokens of one unfinished character; more are bytes that are not text."""


class AnswerText:
    """Text of an answer's tokens.

    Args:
        tokenizer: Of the model.
        stops: Texts before whose first occurrence the answer ends.
        shown: Special tokens that are part of the text; others are not.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        added = tokenizer.added_tokens_decoder.items() if shown else ()
        self._hidden = {number for number, token in added if token.special and number not in shown}
        self._skips_special = not shown
        self._held_back = CLEANED if tokenizer.clean_up_tokenization_spaces else 0
        self._window: list[int] = []
        self._final = 0
        """Characters of the window's text that no later token changes."""
        self._unfinished = 0
        self._pending = ""
        """Final text that may be the beginning of a stop string."""
        self._emitted = 0
        self.length = 0
        """Characters of all tokens so far."""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Return the further text that is final now, often one token's, sometimes none."""
        self._window.append(token)
        text = self._decoded()
        # A character may need more than one token: wait until it is whole.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and self._unfinished < MOST_UNFINISHED:
            self._unfinished += 1
            return ""
        self._unfinished = 0
        final = max(self._final, len(text) - self._held_back)
        piece, self._final = text[self._final : final], final
        self.length = self._emitted + len(self._pending) + len(piece) + len(text) - final
        if len(self._window) > WINDOW:
            self._move(text)
        certain = self._before_stop(piece)
        if self.is_stopped:
            self.length = self._emitted
        return certain

    def end(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.is_stopped:
            return ""
        rest = self._before_stop(self._decoded()[self._final :])
        if not self.is_stopped:
            rest += self._pending
            self._emitted += len(self._pending)
        self.length = self._emitted
        return rest

    def _decoded(self) -> str:
        return self._text_of(self._window)

    def _text_of(self, ids: Sequence[int]) -> str:
        ids = [number for number in ids if number not in self._hidden]
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special))

    def _move(self, text: str) -> None:
        """Drop the oldest tokens, where that does not change the text that is not final yet."""
        shorter = self._text_of(self._window[-KEPT:])
        if self._final >= CLEANED and shorter.endswith(text[self._final - CLEANED :]):
            self._final = len(shorter) - (len(text) - self._final)
            self._window = self._window[-KEPT:]

    def _before_stop(self, piece: str) -> str:
        """Return the text that is certain to be before the first stop string."""
        pending = self._pending + piece
        found = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._pending = ""
            certain = pending[: min(found)]
        else:
            begun = next((n for n in range(len(pending)) if any(s.startswith(pending[n:]) for s in self._stops)), None)
            certain = pending if begun is None else pending[:begun]
            self._pending = pending[len(certain) :]
        self._emitted += len(certain)
        return certain


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
        constraint: Grammar of the answer.
    """

    ids: Sequence[int]
    options: SamplingOptions
    stops: Sequence[str] = ()
    prompt_logprobs: int | None = None
    shown: frozenset[int] = frozenset()
    constraint: Constraint | None = None


class Writing(ChosenAnswer):
    """An answer in progress with its text.

    pieces: new text since they were last taken. spoken: the end of the answer, None before.
    """

    def __init__(self, request: AnswerRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(request.ids, request.options, request.prompt_logprobs)
        self.request = request
        self.pieces: list[TextPiece] = []
        self.spoken: Spoken | None = None
        self._text = AnswerText(tokenizer, request.stops, request.shown)
        self._unplaced: list[PlacedToken] = []
        self._constrained = None if request.constraint is None else ConstrainedText(request.constraint)

    @property
    def changes_logits(self) -> bool:
        return super().changes_logits or self._constrained is not None

    def change(self, logits: Tensor) -> None:
        super().change(logits)
        if self._constrained is not None:
            self._constrained.restrict(logits, self.options.stop_ids)

    def report(self, tokens: Sequence[Token]) -> None:
        super().report(tokens)
        self.pieces.append(TextPiece("", tuple(PlacedToken(token, 0) for token in tokens), of_prompt=True))

    def take(self, token: Token) -> None:
        if token.id in self.options.stop_ids:
            self._end(by_itself=True)
            return
        self.new.append(token.id)
        if token.logprob is not None:
            self._unplaced.append(PlacedToken(token, self._text.length))
        self._add_piece(self._text.add(token.id))
        if self._constrained is not None:
            self._constrained.take(token.id)
            if self._constrained.is_complete:
                self._end(by_itself=True)
                return
            if self._constrained.is_stuck:
                self.finish()
                return
        if self._text.is_stopped or len(self.new) >= self.options.max_new_tokens:
            self.finish()

    def finish(self) -> None:
        self._end(by_itself=False)

    def _end(self, *, by_itself: bool) -> None:
        self._add_piece(self._text.end(), is_last=True)
        self.spoken = Spoken(len(self.prompt), len(self.new), by_itself or self._text.is_stopped)
        self.is_over = True

    def _add_piece(self, text: str, *, is_last: bool = False) -> None:
        """Add text with the tokens that wait for it, except those behind a stop string."""
        if not (text or is_last or self._text.is_stopped):
            return
        is_stopped, length = self._text.is_stopped, self._text.length
        tokens = tuple(one for one in self._unplaced if not is_stopped or one.offset < length)
        self._unplaced.clear()
        if text or tokens:
            self.pieces.append(TextPiece(text, tokens))
