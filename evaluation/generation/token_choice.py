"""The next token of each answer of a batch, by the options of that answer alone.

An answer's draws follow from its seed and its number under that seed, so the other answers of a batch, and the ranks
among which prompts are divided, affect it only by rounding of its logits.

Shapes: N answers, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infra.errors import StemmaError, stage_error

COLDEST = 1e-9
"""Lowest temperature that samples; a lower one takes the likeliest token, since float32 logits divided by it are all
equal or infinite."""
NUCLEUS_TRIES = 6
"""Draws from the whole distribution before a row's nucleus is determined by a sort, which takes ten times as long as
the rest."""


class TokenBias:
    """Values added to the logits of tokens: always, or where a token would complete a sequence of ids.

    Args:
        values: For sequences of ids, each with the value added to the logit of its last id where the other ids precede
            it, in the prompt or in the answer.
    """

    def __init__(self, values: Mapping[tuple[int, ...], float]) -> None:
        always = {sequence[0]: value for sequence, value in values.items() if len(sequence) == 1}
        self._ids, self._values = torch.tensor(list(always), dtype=torch.long), torch.tensor(list(always.values()))
        self._after: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        for (*before, last), value in values.items():
            if before:
                self._after.setdefault(tuple(before), []).append((last, value))
        self._lengths = sorted({len(before) for before in self._after})

    def add(self, logits: Tensor, answer: ChosenAnswer) -> None:
        """Add the values to the logits (V,) of an answer's next token, in place."""
        if len(self._ids):
            logits[self._ids.to(logits.device)] += self._values.to(logits.device)
        for length in self._lengths:
            for token, value in self._after.get(answer.last(length), ()):
                logits[token] += value


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling of an answer.

    Args:
        max_new_tokens: The answer's most tokens.
        stop_ids: Tokens that end it.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability that tokens are drawn from, the likeliest first; one token always stays.
        seed: Of the draws.
        number: Number of the answer under this seed.
        presence_penalty: Subtracted from the logit of each token that the answer already has.
        frequency_penalty: The same, times the number of times that the answer has the token.
        bias: Added to logits.
        logprobs: Number of the likeliest tokens whose log-probabilities are reported in addition to that of the token
            itself; None reports none.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 17
    number: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: TokenBias | None = None
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer. logprob: under the model, before temperature and penalties, None where not requested.
    likeliest: the most likely tokens at its position with their log-probabilities, as ids."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class ChosenAnswer:
    """An answer in progress: its options, its prompt, its tokens so far and the draws to come.

    Attributes:
        prompt: Token ids, at least one.
        new: Token ids of the answer, with the stop id by which it ended.
        prompt_logprobs: Number of the likeliest tokens that `report` gets for each token of the prompt; None if the
            prompt is not to be reported, or has been.
        error: The reason why there is no answer.
    """

    def __init__(self, prompt: Sequence[int], options: SamplingOptions, prompt_logprobs: int | None = None) -> None:
        self.prompt, self.options, self.prompt_logprobs = prompt, options, prompt_logprobs
        self.new: list[int] = []
        self.is_over = False
        self.error: StemmaError | None = None
        self.is_drawn = options.temperature >= COLDEST
        self._random: np.random.Generator | None = None

    @property
    def ids(self) -> list[int]:
        """Ids of the prompt and of the answer so far."""
        return [*self.prompt, *self.new]

    def last(self, count: int) -> tuple[int, ...]:
        """Return the last `count` ids, fewer if there are no more."""
        missing = count - len(self.new)
        return tuple(self.new[-count:]) if missing <= 0 else (*self.prompt[-missing:], *self.new)

    def draw(self) -> float:
        """Return the next of the answer's draws, in [0, 1)."""
        if self._random is None:
            self._random = np.random.default_rng([self.options.seed % 2**64, self.options.number])
        return self._random.random()

    @property
    def changes_logits(self) -> bool:
        """True if `change` does anything."""
        return self.options.has_penalties or self.options.bias is not None

    def change(self, logits: Tensor) -> None:
        """Apply bias and penalties to the logits (V,) of the next token, in place."""
        options = self.options
        if options.bias is not None:
            options.bias.add(logits, self)
        if self.new and options.has_penalties:
            counts = Counter(self.new)
            ids = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[ids] -= options.presence_penalty + options.frequency_penalty * times

    def take(self, token: Token) -> None:
        """Add the next token."""
        self.new.append(token.id)
        if len(self.new) >= self.options.max_new_tokens or self.has_ended():
            self.is_over = True

    def has_ended(self) -> bool:
        """Return True if the last token completes the answer."""
        return self.new[-1] in self.options.stop_ids

    def finish(self) -> None:
        """End the answer with the tokens that it has."""
        self.is_over = True

    def report(self, tokens: Sequence[Token]) -> None:
        """Receive the tokens of the prompt with their log-probabilities."""
        self.prompt_logprobs = None


def choose_tokens(logits: Tensor, answers: Sequence[ChosenAnswer]) -> list[Token]:
    """Return the next token of each answer; the answers do not take them yet.

    Args:
        logits: (N, V) in float32; -inf for ids that belong to no token.
        answers: N.

    Raises:
        StageError: `not_finite` for a draw from NaN.
    """
    changed = logits
    if any(answer.changes_logits for answer in answers):
        changed = logits.clone()
        for row, answer in enumerate(answers):
            answer.change(changed[row])
    drawn = [row for row, answer in enumerate(answers) if answer.is_drawn]
    if len(drawn) < len(answers):
        chosen = changed.argmax(-1)
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            chosen[rows] = _drawn(changed[rows], [answers[row] for row in drawn])
    else:
        chosen = _drawn(changed, answers)
    tokens = [Token(token) for token in chosen.tolist()]
    reported = [row for row, answer in enumerate(answers) if answer.options.logprobs is not None]
    if reported:
        of = logprobs_of(logits[reported], chosen[reported], [answers[row].options.logprobs or 0 for row in reported])
        for row, token in zip(reported, of, strict=True):
            tokens[row] = token
    return tokens


def logprobs_of(logits: Tensor, chosen: Tensor, counts: Sequence[int]) -> list[Token]:
    """Return the chosen tokens (N,) with their log-probabilities, and with those of the `counts` likeliest, from logits
    (N, V)."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    likeliest = logprobs.topk(max(counts), dim=-1) if max(counts) else None
    tokens = []
    for row, (token, logprob, count) in enumerate(zip(chosen.tolist(), own, counts, strict=True)):
        pairs: list[tuple[int, float]] = []
        if likeliest is not None:
            pairs = list(zip(likeliest.indices[row, :count].tolist(), likeliest.values[row, :count].tolist()))  # noqa: B905
        tokens.append(Token(token, logprob, tuple(pairs)))
    return tokens


def _drawn(logits: Tensor, answers: Sequence[ChosenAnswer]) -> Tensor:
    """Return a token (N,) of each answer, drawn from logits (N, V) at the answer's temperature and within its nucleus.

    Tokens are drawn from the whole distribution until one is in the nucleus, which draws from the nucleus. Whether a
    token is in it needs only the sum of larger probabilities, no sort. Rows without such a token after some tries are
    sorted.
    """
    temperatures = [answer.options.temperature for answer in answers]
    if len(set(temperatures)) == 1:
        probabilities = (logits / temperatures[0]).softmax(-1)
    else:
        probabilities = (logits / torch.tensor(temperatures, device=logits.device)[:, None]).softmax(-1)
    sums = probabilities.double().cumsum(-1)
    if sums[:, -1].isnan().any():  # a draw from these would be a token id that does not exist
        raise stage_error(
            "not_finite",
            "",
            "expected finite logits, but those of the answering model contain NaN",
            "find where its training diverged, and lower optimizer.learning_rate",
        )
    tokens = _at(sums, answers)
    remaining = [row for row, answer in enumerate(answers) if answer.options.top_p < 1]
    for _ in range(NUCLEUS_TRIES):
        if not remaining:
            return tokens
        rows = torch.tensor(remaining, device=logits.device)
        top_p = torch.tensor([answers[row].options.top_p for row in remaining], device=logits.device)
        row_probabilities, row_tokens = probabilities[rows], tokens[rows, None]
        own = row_probabilities.gather(1, row_tokens)
        # Of equally likely tokens, those with a smaller id come first.
        before = row_probabilities > own
        before |= (row_probabilities == own) & (torch.arange(logits.shape[1], device=logits.device) < row_tokens)
        larger = torch.where(before, row_probabilities, 0).sum(-1, dtype=torch.double)
        is_outside = ((larger >= top_p) & before.any(-1)).tolist()
        remaining = [row for row, outside in zip(remaining, is_outside, strict=True) if outside]
        if remaining:
            rows = torch.tensor(remaining, device=logits.device)
            tokens[rows] = _at(sums[rows], [answers[row] for row in remaining])
    if remaining:
        rows = torch.tensor(remaining, device=logits.device)
        top_p = torch.tensor([answers[row].options.top_p for row in remaining], device=logits.device)
        kept = _nucleus(probabilities[rows].double(), top_p)
        tokens[rows] = _at(kept.cumsum(-1), [answers[row] for row in remaining])
    return tokens


def _at(sums: Tensor, answers: Sequence[ChosenAnswer]) -> Tensor:
    """Return the tokens (N,) at the answers' next draws. sums (N, V): of the probabilities up to each token."""
    draws = torch.tensor([answer.draw() for answer in answers], dtype=torch.double, device=sums.device)
    total = sums[:, -1]
    # Never exactly the last sum, after which there is no token.
    places = torch.minimum(draws * total, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(sums, places[:, None], right=True)[:, 0]


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return probabilities (N, V) with 0 for all but the likeliest tokens that have `top_p` (N,) together."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    left_out = ordered.cumsum(-1) - ordered >= top_p[:, None]
    left_out[:, 0] = False
    return probabilities.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), 0)
