"""Several answers to one prompt in an order, as all of their pairs; and judgements of several people, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from corpus.documents.quarantine import Rejected
from corpus.pairs.dialogues import answer_of
from corpus.pairs.files import Pair
from corpus.readers.config import PreferenceOptions
from corpus.readers.record import Record, Unreadable, is_given

ANSWERS = ("answers", "completions", "responses")
"""Fields of the answers of a ranking, as in Nectar, UltraFeedback and others."""
_TEXTS = ("answer", "text", "response", "completion", "content", "value")
_SCORES = ("score", "overall_score", "rating", "pm_score")
TIE = (0.5, 0.5)
"""The votes for two answers that are on a par: one vote, shared."""


class Ranked(NamedTuple):
    """An answer, and where it stands: the higher `standing`, the better. scored: whether that is a score, of which
    differences say something, and no rank."""

    text: str
    standing: float
    scored: bool


def answers_field(record: Record, source: PreferenceOptions) -> str | None:
    """The field of a ranking's answers; None where the record has chosen and rejected answers or no list of two."""
    if is_given(record.value, source.chosen_field) or is_given(record.value, source.rejected_field):
        return None
    candidates = ((name, record.value.get(name)) for name in ANSWERS)
    return next((name for name, answers in candidates if isinstance(answers, list) and len(answers) > 1), None)


def is_scored(value: Mapping[str, Any], field: str) -> bool:
    """Return True if the answers of a record have a rank or score, or the record has lists of them."""
    objects = [item for item in value[field] if isinstance(item, Mapping)]
    by_item = any(is_given(item, name) for item in objects for name in ("rank", *_SCORES))
    return by_item or any(isinstance(value.get(name), list) for name in ("ranks", "scores"))


def ranked_answers(value: Mapping[str, Any], field: str) -> list[Ranked]:
    """The answers of a record from the best to the worst, equal ones in their original order.

    By each one's rank (1 is best) or score, or by the lists `ranks` or `scores` next to them; without either
    they lie from the best to the worst. Raises Unreadable where some have none, an answer is empty, or two are equal.
    """
    items = value[field]
    list_field = next((name for name in ("ranks", "scores") if isinstance(value.get(name), list)), None)
    texts = [_text(item) for item in items]
    if any(not text for text in texts):
        raise Unreadable("no answer: an answer of the ranking is empty")
    if len(set(texts)) < len(texts):
        raise Unreadable("equal answers: the ranking has the same answer twice")
    if list_field:
        standings, is_rank = list(value[list_field]), list_field == "ranks"
        if len(standings) != len(items):
            raise Unreadable(f"expected as many {list_field} as answers, {len(items)}, found {len(standings)}")
    else:
        objects = [item for item in items if isinstance(item, Mapping)]
        key = next((name for name in ("rank", *_SCORES) if any(is_given(item, name) for item in objects)), None)
        is_rank = key in (None, "rank")
        standings = (
            [item.get(key) if isinstance(item, Mapping) else None for item in items] if key else [*range(len(items))]
        )
    for standing in standings:
        if not is_number(standing):
            raise Unreadable(f"expected a rank or a score of every answer, found {standing!r}")
    ranked = [
        Ranked(text, -standing if is_rank else standing, not is_rank)
        for text, standing in zip(texts, standings, strict=True)
    ]
    return sorted(ranked, key=lambda answer: -answer.standing)


def is_number(value: object) -> bool:
    """Return True if a value is a number that a float holds: JSON as Python writes it also has infinities and NaN."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _text(item: Any) -> str:
    if isinstance(item, Mapping) and not is_given(item, "from") and not is_given(item, "role"):
        text = next((item[name] for name in _TEXTS if isinstance(item.get(name), str)), None)
        if text is None:
            raise Unreadable(f"expected an answer with its text under one of {', '.join(_TEXTS)}")
        return str(text).strip()
    return answer_of(item)


def pairs_of_ranking(answers: Sequence[Ranked], prompt: str, group: str, file: str) -> list[Pair]:
    """All pairs of a ranking, the better answer as the chosen one, each with the ranking's id; of two on a par each has
    half a vote. Of scored answers the difference is the pair's margin."""
    pairs = []
    for better, worse in combinations(answers, 2):
        fields = {"prompt": prompt, "chosen": better.text, "rejected": worse.text}
        ahead = better.standing - worse.standing
        pairs.append(
            Pair(
                fields,
                file,
                group,
                votes=None if ahead else TIE,
                margin=float(ahead) if better.scored and ahead else None,
            )
        )
    # The id of the first pair names the ranking: it is of the prompt and its two best answers.
    return [pair._replace(ranking=pairs[0].id) for pair in pairs] if len(answers) > 2 else pairs


class RankingTally:
    """Counts of the origins of pairs, besides single judgements: rankings, ties, and several people."""

    def __init__(self) -> None:
        self._rankings: set[str] = set()
        self._ties = 0
        self._twice, self._same = 0, 0

    def __call__(self, item: Pair | Rejected) -> Pair | Rejected:
        """The item, counted."""
        if isinstance(item, Pair):
            self._rankings |= {item.ranking} - {""}
            chosen_votes, rejected_votes = item.votes or (1.0, 0.0)
            self._ties += chosen_votes == rejected_votes
            if chosen_votes + rejected_votes >= 2:
                self._twice += math.comb(round(chosen_votes + rejected_votes), 2)
                self._same += math.comb(round(chosen_votes), 2) + math.comb(round(rejected_votes), 2)
        return item

    def figures(self) -> dict[str, float]:
        """Return rankings, ties, and annotator_agreement, the share of equal judgements of a pair; each where
        there are any."""
        counts = {"rankings": float(len(self._rankings)), "ties": float(self._ties)}
        figures = {name: value for name, value in counts.items() if value}
        return {**figures, "annotator_agreement": self._same / self._twice} if self._twice else figures


class Judged(NamedTuple):
    """A pair as one person judged it, with the record of the judgement."""

    pair: Pair
    annotator: str
    record: Record


def by_annotators(judged: Iterable[Judged]) -> Iterator[Pair | tuple[Record, str]]:
    """Each pair once, with the votes of all who judged it; the answer with more votes is the chosen one. Who found the
    two on a par has half a vote for either.

    A judgement is given back with a reason where the same person judged the pair before.
    """
    votes: dict[tuple[str, ...], dict[str, Pair]] = {}
    for pair, annotator, record in judged:
        texts = pair.fields
        key = (texts["prompt"], *sorted((texts["chosen"], texts["rejected"])))
        if annotator in votes.setdefault(key, {}):
            yield record, f"a second judgement of a pair by {annotator}"
            continue
        votes[key][annotator] = pair
    for judgements in votes.values():
        vote_shares: dict[str, float] = {}
        for pair in judgements.values():
            shares = TIE if _is_tie(pair) else (1.0, 0.0)
            for side, share in zip(("chosen", "rejected"), shares, strict=True):
                vote_shares[pair.fields[side]] = vote_shares.get(pair.fields[side], 0.0) + share
        best = max(vote_shares, key=vote_shares.__getitem__)
        # From those who prefer it, where there are any: their other fields of the pair then fit this order.
        pair = min(
            (judged_pair for judged_pair in judgements.values() if judged_pair.fields["chosen"] == best), key=_is_tie
        )
        yield pair._replace(votes=(vote_shares[best], len(judgements) - vote_shares[best]))


def _is_tie(pair: Pair) -> bool:
    return pair.votes is not None and pair.votes[0] == pair.votes[1]
