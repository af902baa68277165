"""The next token of each answer of a batch, by the options of that answer alone.

An answer's draws follow from its seed and its number under that seed, so the other answers of a batch affect it only by
rounding of its logits.

Shapes: N answers, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evaluation.generation.continuations import COLDEST
from training.generation.sampling import choose


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling of an answer.

    Args:
        max_new_tokens: The answer's most tokens.
        stop_ids: Tokens that end it.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability that tokens are drawn from, the likeliest first; one token always stays.
        seed: Of the draws.
        number: Number of the answer under this seed, for several answers to one prompt.
        presence_penalty: Subtracted from the logit of each token that the answer already has.
        frequency_penalty: The same, times the number of times that the answer has the token.
        logit_bias: Added to the logits of these tokens.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True)
class Token:
    """A token of an answer. logprob: under the model, before temperature and penalties, None where not requested.
    likeliest: the most likely tokens at its position with their log-probabilities, as ids."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class TokenChooser:
    """The choices of one answer: its options, the draws to come, and the tokens so far."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self.is_drawn = options.temperature >= COLDEST
        self._random = np.random.default_rng([options.seed % 2**64, options.number])
        self._counts: Counter[int] = Counter()

    def draw(self) -> float:
        """Return the next of the answer's draws, in [0, 1)."""
        return float(self._random.random())

    def add(self, token: int) -> None:
        self._counts[token] += 1

    def change(self, logits: Tensor) -> None:
        """Apply bias and penalties to an answer's logits (V,), in place."""
        options = self.options
        if options.logit_bias:
            ids = torch.tensor(list(options.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(options.logit_bias.values()), device=logits.device)
        if self._counts and (options.presence_penalty or options.frequency_penalty):
            ids = torch.tensor(list(self._counts), device=logits.device)
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            logits[ids] -= options.presence_penalty + options.frequency_penalty * counts


def choose_tokens(logits: Tensor, choosers: Sequence[TokenChooser]) -> list[Token]:
    """The next token of each answer.

    Args:
        logits: (N, V) in float32; -inf for ids that belong to no token.
        choosers: N, which count the token as theirs.
    """
    changed = logits
    if any(one.options.changes_logits for one in choosers):
        changed = logits.clone()
        for row, chooser in enumerate(choosers):
            chooser.change(changed[row])
    chosen = changed.argmax(-1)
    drawn = [row for row, chooser in enumerate(choosers) if chooser.is_drawn]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        options = [choosers[row].options for row in drawn]
        scaled = changed[rows] / torch.tensor([one.temperature for one in options], device=logits.device)[:, None]
        if any(one.top_p < 1 for one in options):
            scaled = _nucleus(scaled, torch.tensor([one.top_p for one in options], device=logits.device))
        draws = torch.tensor([choosers[row].draw() for row in drawn], dtype=torch.double, device=logits.device)
        chosen[rows] = choose(scaled, 1.0, draws)
    ids = chosen.tolist()
    for chooser, token in zip(choosers, ids, strict=True):
        chooser.add(token)
    tokens = [Token(token) for token in ids]
    reported = [row for row, chooser in enumerate(choosers) if chooser.options.logprobs is not None]
    if reported:
        of = logprobs_of(logits[reported], chosen[reported], [choosers[row].options.logprobs or 0 for row in reported])
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


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Logits (N, V) with -inf for all but the likeliest tokens, whose probabilities sum up to `top_p` (N,) or more."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1).double()
    before = probabilities.cumsum(-1) - probabilities
    left_out = (before >= top_p[:, None]) & (top_p[:, None] < 1)  # by rounding a sum may come to 1 early
    left_out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)
