"""Requests as rows of a batch: a context with its distinct continuations, where each token is computed once.

    row        context c₁ … cₙ | choice A: a₁ … aᵢ | what choice B has after its first k tokens, if those are A's too
    position           0 … n-1 |            n …    | n + k …
    sees       itself and before | the context and its own choice up to itself

Equal tokens after an equal beginning are computed once for all rows of a batch. Examples are the words that a task's
template, or the same solved examples, put before every question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Request = tuple[tuple[str, str], list[int], list[int]]
"""One request of lm-eval: (context, continuation) as text, then as tokens."""

SHORTEST_SHARED = 4
"""Minimum tokens of a context for its choices to share a row; below it they are scored one by one. An empty context is
the same for all questions."""


@dataclass
class ChoiceRow:
    """A context with its distinct continuations, and the numbers of the requests that each continuation answers."""

    context: list[int]
    choices: list[list[int]] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the row. Beginnings that choices share count once, and the last token of each choice does not."""
        return len(self.context) + sum(len(choice) - 1 - shared for _, choice, shared in self.in_order())

    def in_order(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield (number, choice, number of leading tokens that it shares with the previous choice, its last token
        excluded), sorted by tokens: no earlier choice shares more tokens than the previous one."""
        before: list[int] = []
        for number in sorted(range(len(self.choices)), key=self.choices.__getitem__):
            choice = self.choices[number]
            max_shared = max(0, min(len(before), len(choice)) - 1)
            shared = next((i for i in range(max_shared) if before[i] != choice[i]), max_shared)
            yield number, choice, shared
            before = choice


@dataclass(frozen=True)
class ChoiceBatch:
    """Rows as the model's input: N tokens to compute, B rows of T places, U of the N tokens whose logits are needed."""

    tokens: Tensor
    """(N,) ids."""
    depths: Tensor
    """(N,) positions."""
    places: Tensor
    """(B, T): index into the N tokens at each place; 0 past the end of a row."""
    first: Tensor
    """(N,): first place of each token in the flattened rows, ascending."""
    blocked: Tensor | None
    """(B, T, T): places that each place must not see; None if these are just the places behind it."""
    asked: Tensor
    """(U,): indices into the N tokens, ascending."""
    which: Tensor
    """(S,): for each token of each choice, the index into U of the token before it."""
    targets: Tensor
    """(S,): the tokens of the choices themselves."""
    lengths: list[int]
    """Number of tokens of each choice."""


class Tokens:
    """The distinct tokens of a batch, identified by the tokens before them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.depths: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def after(self, node: int, path: Sequence[int]) -> list[int]:
        """Return the numbers of the tokens of `path` that follow token number `node`; -1 is the beginning."""
        depth = self.depths[node] + 1 if node >= 0 else 0
        numbers = []
        for token in path:
            number = self._known.setdefault((node, token), len(self.ids))
            if number == len(self.ids):
                self.ids.append(token)
                self.depths.append(depth)
            numbers.append(number)
            node, depth = number, depth + 1
        return numbers

    def cut(self, size: int) -> None:
        """Forget all but the first `size` tokens; nothing may be added afterwards."""
        del self.ids[size:], self.depths[size:]


def lay(
    rows: Sequence[ChoiceRow], most_tokens: float = float("inf"), most_places: float = float("inf")
) -> tuple[ChoiceBatch, int]:
    """Return a batch of the first rows of `rows` and their number.

    The batch has at least one row, and then at most as many as need `most_tokens` distinct tokens and B x T places,
    where T is the length of the longest row.
    """
    width, tokens = max(row.length for row in rows), Tokens()
    laid: list[_Laid] = []
    for row in rows:
        before = len(tokens.ids)
        laid_row = _Laid(row, tokens)
        if laid and (len(tokens.ids) > most_tokens or width * (len(laid) + 1) > most_places):
            tokens.cut(before)
            break
        laid.append(laid_row)
    places = torch.zeros((len(laid), width), dtype=torch.long)
    # A single choice sees all places before it, and so do the tokens of the first of several choices.
    is_masked = any(len(laid_row.branches) > 1 for laid_row in laid)
    blocked = torch.ones((len(laid), width, width), dtype=torch.bool).triu(1) if is_masked else None
    for number, laid_row in enumerate(laid):
        places[number, : len(laid_row.nodes)] = torch.tensor(laid_row.nodes)
        if blocked is not None:
            for start, end, path in laid_row.branches:
                blocked[number, start:end, laid_row.context : start] = True
                blocked[number, start:end, path] = False
    flat = torch.cat([places[number, : len(laid_row.nodes)] for number, laid_row in enumerate(laid)])
    flat_positions = torch.cat(
        [torch.arange(len(laid_row.nodes)) + number * width for number, laid_row in enumerate(laid)]
    )
    first = torch.full((len(tokens.ids),), places.numel()).scatter_reduce_(0, flat, flat_positions, "amin")
    asked, which = torch.tensor([node for laid_row in laid for node in laid_row.asked]).unique(return_inverse=True)
    choices = [choice for row in rows[: len(laid)] for choice in row.choices]
    batch = ChoiceBatch(
        torch.tensor(tokens.ids), torch.tensor(tokens.depths), places, first, blocked, asked, which,
        torch.tensor([token for choice in choices for token in choice]), [len(choice) for choice in choices],
    )  # fmt: skip
    return batch, len(laid)


class _Laid:
    """Tokens of one row within a batch.

    nodes: token numbers, place by place. branches: (start, end, places of the choice's beginning before start) of each
    piece of a choice. asked: for each token of each choice, in order, the number of the token before it.
    """

    def __init__(self, row: ChoiceRow, tokens: Tokens) -> None:
        self.context = len(row.context)
        self.nodes = tokens.after(-1, row.context)
        self.branches: list[tuple[int, int, list[int]]] = []
        last = self.nodes[-1]
        path: list[int] = []
        """Places of the choice being laid out."""
        before: dict[int, list[int]] = {}
        for number, choice, shared in row.in_order():
            start = len(self.nodes)
            path = path[:shared]
            new = tokens.after(self.nodes[path[-1]] if path else last, choice[shared:-1])
            if new:
                self.branches.append((start, start + len(new), list(path)))
            self.nodes += new
            path += range(start, len(self.nodes))
            before[number] = [last, *(self.nodes[position] for position in path)]
        self.asked = [node for number in range(len(row.choices)) for node in before[number]]


def rows_of(requests: Sequence[Request], max_length: int) -> tuple[list[ChoiceRow], list[int]]:
    """Return the requests as rows, and the numbers of the requests that are scored alone.

    A request is scored alone if its context belongs to it only or is too short to be worth sharing, or if it does not
    fit and lm-eval cuts it on the left.
    """
    rows: dict[tuple[int, ...], list[ChoiceRow]] = {}
    alone = []
    for number, (_, context, continuation) in enumerate(requests):
        if len(context) < SHORTEST_SHARED or len(context) + len(continuation) > max_length:
            alone.append(number)
            continue
        same = rows.setdefault(tuple(context), [ChoiceRow(context)])
        if continuation in same[-1].choices:
            same[-1].requests[same[-1].choices.index(continuation)].append(number)
            continue
        if same[-1].choices and same[-1].length + len(continuation) > max_length:
            same.append(ChoiceRow(context))
        same[-1].choices.append(continuation)
        same[-1].requests.append([number])
    shared = []
    for row in (row for same in rows.values() for row in same):
        if len(row.choices) > 1:
            shared.append(row)
        else:
            alone += row.requests[0]
    return shared, sorted(alone)
