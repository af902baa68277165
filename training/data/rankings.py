"""Answers to one prompt with which of them are better: two of a preference pair, or K of a ranking with all its pairs.

Shapes: B prompts, K answers to each (padded), P pairs of them (padded), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corpus.pairs.dialogues import opening_of
from evaluation.statistics.clustered import number_clusters
from infra.run import Run
from training.chat.base import Answer, Chat, Conversation, pad
from training.data.preference_pairs import TooLong, answer_of, prompts_of, tell_lengths

LENGTH_BIN = 10
"""Tokens of a bin of length differences, within which pairs are balanced (Singhal et al. 2023, section 4.1)."""


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


@dataclass(frozen=True)
class FittedRankings:
    """Rankings that fit, the row of each of their pairs, the number of truncated prompts, and the number of rankings
    left out."""

    rankings: list[Ranking]
    rows: list[Mapping[str, Any]]
    cut: int
    dropped: int

    def told(self, stage: str, side: str, max_length: int, run: Run) -> FittedRankings:
        """Log what did not fit, and return self. Raises StageError `no_room` if nothing is left."""
        tell_lengths(stage, side, max_length, run, self.cut, self.dropped, is_empty=not self.rankings)
        return self


def fitted_rankings(
    chat: Chat, rows: Sequence[Mapping[str, Any]], max_length: int, too_long: TooLong
) -> FittedRankings:
    """Rows with `prompt`, `chosen` and `rejected`, those of one `ranking` together, as answers of at most `max_length`
    tokens with their prompt.

    Answers stay whole, with their `<|end|>`. cut_prompt: a prompt that leaves no room for the longest answer loses its
    beginning, the same for all; a ranking is left out where less than one token of it would stay. drop: every ranking
    with an answer that is too long is left out.
    """
    rankings: list[Ranking] = []
    kept: list[Mapping[str, Any]] = []
    cut = dropped = 0
    groups = [list(group) for _, group in groupby(enumerate(rows), lambda one: one[1].get("ranking") or one[0])]
    texts = [list(dict.fromkeys(row[key] for _, row in group for key in ("chosen", "rejected"))) for group in groups]
    said: list[dict[str, Answer]] = [
        {row[side]: answer_of(row, side) for _, row in group for side in ("chosen", "rejected")} for group in groups
    ]
    prompts = prompts_of(chat, [group[0][1] for group in groups])
    asked_of = [prompt for prompt, those in zip(prompts, texts, strict=True) for _ in those]
    responses = iter(
        chat.respond(asked_of, [of[text] for of, those in zip(said, texts, strict=True) for text in those])
    )
    for group, those, prompt in zip(groups, texts, prompts, strict=True):
        answers = [next(responses) for _ in those]
        room = max_length - max(map(len, answers))
        is_long = len(prompt) > room
        if is_long and (too_long == "drop" or room < min(chat.least_prompt, len(prompt))):
            dropped += 1
            continue
        cut += is_long
        asked = chat.shortened(prompt, room)
        places = {text: place for place, text in enumerate(those)}
        pairs = [_preferred(row, places) for _, row in group]
        rankings.append(Ranking([Conversation(asked, answer) for answer in answers], pairs))
        kept += [row for _, row in group]
    return FittedRankings(rankings, kept, cut, dropped)


def _preferred(row: Mapping[str, Any], places: Mapping[str, int]) -> Preferred:
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
    found = [
        replace(one, pairs=[pair._replace(weight=value / mean) for pair, value in zip(one.pairs, row, strict=True)])
        for one, row in zip(rankings, weights, strict=True)
    ]
    return found, sum(value == 0 for value in flat)


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


def prompt_clusters(rows: Iterable[Mapping[str, Any]]) -> NDArray[np.int64]:
    """The number of the prompt of each row (N,): pairs of a ranking, separate pairs of one prompt, and turns of one
    dialogue share it."""
    return number_clusters(opening_of(row["prompt"], row.get("history") or ()) for row in rows)
