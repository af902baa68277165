"""Preferences: pairs of answers to one prompt, or K of a ranking with all its pairs, and which of them are better.

Shapes: B prompts, K answers to each (padded), P pairs of them (padded), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.chat.base import Answer, Chat, Conversation, pad
from training.data.rows import Fitted, LengthLimit, Row, TooLong, answer_of, prompts_of

LENGTH_BIN = 10
"""Tokens of a bin of length differences, within which pairs are balanced (Singhal et al. 2023, section 4.1)."""


@dataclass(frozen=True)
class PreferencePair:
    """Two conversations with the same prompt."""

    chosen: Conversation
    rejected: Conversation


class Preferred(NamedTuple):
    """A pair of a prompt's answers, by their places.

    share: share of the votes for `better`, 0.5 in a tie. margin: margin of the preference, 0 if unknown.
    weight: weight of its loss.
    """

    better: int
    worse: int
    share: float = 1.0
    margin: float = 0.0
    weight: float = 1.0

    @property
    def is_tie(self) -> bool:
        return self.share == 0.5


@dataclass(frozen=True)
class Ranking:
    """Answers to one prompt, and pairs of them."""

    answers: list[Conversation]
    pairs: list[Preferred]

    @property
    def is_plain(self) -> bool:
        """True if it is a single pair with the default share, margin and weight."""
        return self.pairs == [Preferred(0, 1)]

    def longer(self, pair: Preferred) -> int:
        """Tokens by which the better answer of a pair is longer."""
        return len(self.answers[pair.better].response) - len(self.answers[pair.worse].response)


def fitted_pairs(chat: Chat, rows: Sequence[Row], max_length: int, too_long: TooLong) -> Fitted[PreferencePair]:
    """Rows with `prompt`, `chosen` and `rejected` as pairs of at most `max_length` tokens each; see
    `training.data.rows.LengthLimit`."""
    room = LengthLimit(chat, max_length, too_long)
    pairs, kept = [], []
    prompts = prompts_of(chat, rows)
    chosen = chat.respond(prompts, [answer_of(row, "chosen") for row in rows])
    rejected = chat.respond(prompts, [answer_of(row, "rejected") for row in rows])
    for row, prompt, better, worse in zip(rows, prompts, chosen, rejected, strict=True):
        if (shortened := room.fit(prompt, [better, worse])) is not None:
            pairs.append(PreferencePair(Conversation(shortened, better), Conversation(shortened, worse)))
            kept.append(row)
    return Fitted(pairs, kept, room.cut, room.dropped, "pairs")


def fitted_rankings(chat: Chat, rows: Sequence[Row], max_length: int, too_long: TooLong) -> Fitted[Ranking]:
    """The same rows as rankings, those of one `ranking` together; a ranking is left out if one of its answers does not
    fit. `rows` of the result has the row of each pair of a ranking that is kept."""
    room = LengthLimit(chat, max_length, too_long)
    rankings: list[Ranking] = []
    kept: list[Row] = []
    # The rows of each prompt, and its answers: each once, in the order of the rows.
    groups = [
        [row for _, row in group]
        for _, group in groupby(enumerate(rows), lambda numbered: numbered[1].get("ranking") or numbered[0])
    ]
    answers: list[dict[str, Answer]] = [
        {row[side]: answer_of(row, side) for row in group for side in ("chosen", "rejected")} for group in groups
    ]
    prompts = prompts_of(chat, [group[0] for group in groups])
    responses = iter(
        chat.respond(
            [prompt for prompt, texts in zip(prompts, answers, strict=True) for _ in texts],
            [answer for texts in answers for answer in texts.values()],
        )
    )
    for group, texts, prompt in zip(groups, answers, prompts, strict=True):
        encoded = [next(responses) for _ in texts]
        if (shortened := room.fit(prompt, encoded)) is not None:
            places = {text: place for place, text in enumerate(texts)}
            pairs = [_preferred(row, places) for row in group]
            rankings.append(Ranking([Conversation(shortened, answer) for answer in encoded], pairs))
            kept += group
    return Fitted(rankings, kept, room.cut, room.dropped, "pairs")


def _preferred(row: Row, places: Mapping[str, int]) -> Preferred:
    won, lost = row.get("votes") or (1.0, 0.0)
    share = won / (won + lost)
    margin = 0.0 if share == 0.5 else row.get("margin") or 0.0
    return Preferred(places[row["chosen"]], places[row["rejected"]], share, margin)


def balanced(rankings: Sequence[Ranking]) -> tuple[list[Ranking], int]:
    """Weight the pairs of rankings so that in each bin of length differences the better answer is equally often the
    longer and the shorter one, and length does not predict the preference. Return the rankings, and the number of pairs
    with weight 0, because the better answer in their bin is always the longer one or always the shorter one.

    Within a bin of differences (LENGTH_BIN) each direction has a total weight equal to the number of pairs of the rarer
    one, which equals dropping pairs of the other on average (Singhal et al. 2023). Pairs of equal length and ties keep
    their weight; the mean weight is 1.
    """
    counts: dict[tuple[int, bool], int] = {}
    for one in rankings:
        for pair in one.pairs:
            if (longer := one.longer(pair)) and not pair.is_tie:
                key = abs(longer) // LENGTH_BIN, longer > 0
                counts[key] = counts.get(key, 0) + 1

    def weight(one: Ranking, pair: Preferred) -> float:
        longer = one.longer(pair)
        if not longer or pair.is_tie:
            return 1.0
        bin_, is_longer = abs(longer) // LENGTH_BIN, longer > 0
        return min(1.0, counts.get((bin_, not is_longer), 0) / counts[bin_, is_longer])

    weights = [[weight(one, pair) for pair in one.pairs] for one in rankings]
    flat = [value for row in weights for value in row]
    mean = float(np.mean(flat)) if flat else 0.0
    if not mean:
        return [], len(flat)
    weighted = [
        replace(one, pairs=[pair._replace(weight=value / mean) for pair, value in zip(one.pairs, row, strict=True)])
        for one, row in zip(rankings, weights, strict=True)
    ]
    return weighted, sum(value == 0 for value in flat)


def ranking_batch(rankings: Sequence[Ranking], fill: int) -> dict[str, Tensor]:
    """Answers as `input_ids (B, K, T)`, padded on the right, and `last (B, K)`, -1 where a prompt has fewer answers.

    Where there is more than plain pairs: `better`, `worse`, `share`, `margin` and `weight`, each (B, P); a prompt's
    pairs weigh together as much as their mean does, and what is padding nothing.
    """
    width, count = max(len(one.answers) for one in rankings), max(len(one.pairs) for one in rankings)
    rows = [one.ids for ranking in rankings for one in ranking.answers]
    real = torch.tensor([[place < len(one.answers) for place in range(width)] for one in rankings])
    packed = pad(rows, fill)
    ids = torch.full((len(rankings), width, packed.shape[1]), fill)
    ids[real] = packed
    last = torch.full((len(rankings), width), -1)
    last[real] = torch.tensor([len(row) - 1 for row in rows])
    batch = {"input_ids": ids, "last": last}
    if all(one.is_plain for one in rankings):
        return batch
    for name, kind in (("better", torch.long), ("worse", torch.long), ("share", torch.float), ("margin", torch.float)):
        batch[name] = torch.tensor(
            [_padded([getattr(p, name) for p in one.pairs], count) for one in rankings], dtype=kind
        )
    weights = [_padded([pair.weight / len(one.pairs) for pair in one.pairs], count) for one in rankings]
    return {**batch, "weight": torch.tensor(weights, dtype=torch.float)}


def _padded(values: list[float], count: int) -> list[float]:
    return [*values, *[0] * (count - len(values))]


def each_pair(rankings: Sequence[Ranking]) -> Iterator[tuple[Ranking, Preferred]]:
    """Every pair with its ranking, in the order of the rows."""
    return ((one, pair) for one in rankings for pair in one.pairs)
