"""Sequences with a common beginning, computed with that beginning once: answers to one prompt, or a chosen and a
rejected one.

A group of such sequences is laid out as a tree: the shared tokens, then the rest of each sequence, at the positions
that it has in its own sequence. Tokens attend to their own sequence alone, so that outputs and gradients are those of
the separate sequences, up to rounding (Wang & Hegde 2024, "Accelerating Direct Preference Optimization with Prefix
Sharing").

Shapes: B sequences, T tokens after padding; R rows of W tokens that hold them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.config.families import windows
from training.core.hardware import Hardware
from training.model.attention import ADDED_MASKS
from training.model.documents import additive
from training.model.models import decoder

_WORTH = 0.9
"""Share of the separate sequences' time, padding included: if more than this is left, masks cost what sharing saves."""
_FAR = 1200
"""Tokens per row at which attention takes as long as all else: measured on a CPU, fp32, at a width of 256."""
_GROUP_WIDTHS = (1.0, 1.5, 2.0, 3.0, float("inf"))
"""Maximum group sizes that are tried, in multiples of the longest sequence's tokens. Where each prompt has one answer,
all begin alike for a few tokens; one group would save those tokens and pay for attention over rows that are far too
long."""
_SHARED = 0
"""The branch of the tokens that a whole group shares; its sequences are branches 1 and up."""
_PADDING = -1


@dataclass(frozen=True)
class SharedPrompts:
    """Sequences in rows that hold each shared beginning once.

    ids, positions (R, W); groups (R, W): the group that a token is of, -1 for padding; branches (R, W): the sequence of
    its group that it is of, 0 for all. places (B, T): where each token of each sequence is in the rows laid end to end.
    """

    ids: Tensor
    positions: Tensor
    groups: Tensor
    branches: Tensor
    places: Tensor

    def visible(self, window: int | None = None) -> Tensor:
        """Return the attention mask (R, 1, W, W), True from a token to itself and to the earlier ones of its sequence.

        window: maximum number of tokens that each attends to on its left, including itself.
        """
        width = self.ids.shape[1]
        keys, queries = self.branches[:, None, :], self.branches[:, :, None]
        seen = (keys == _SHARED) | (keys == queries)
        seen &= self.groups[:, None, :] == self.groups[:, :, None]
        seen &= torch.ones(width, width, dtype=torch.bool, device=self.ids.device).tril()
        if window is not None:
            seen &= self.positions[:, :, None] - self.positions[:, None, :] < window
        return seen[:, None]


def share(ids: Tensor, lengths: Tensor) -> SharedPrompts | None:
    """Lay out sequences ids (B, T) of `lengths (B,)` tokens, padded on the right, with their shared beginnings once;
    return None where that saves too little."""
    sizes = lengths.tolist()
    sequences = [row[:size] for row, size in zip(ids.tolist(), sizes, strict=True)]
    layouts = [_layout(sequences, int(min(most * max(sizes), sum(sizes)))) for most in _GROUP_WIDTHS]
    groups, rows, width = min(layouts, key=lambda one: _time(len(one[1]), one[2]))
    if _time(len(rows), width) > _WORTH * _time(*ids.shape):
        return None
    shape = len(rows), width
    laid, positions, of_group, branches = (torch.full(shape, fill) for fill in (0, 0, _PADDING, _PADDING))
    places = torch.zeros(ids.shape, dtype=torch.long)
    for row, numbers in enumerate(rows):
        at = 0
        for number in numbers:
            begun, members = groups[number]
            pieces = [(_SHARED, members[0], 0, begun)]
            pieces += [(branch, one, begun, sizes[one]) for branch, one in enumerate(members, 1)]
            for branch, one, begin, end in pieces:
                where = slice(at, at + end - begin)
                laid[row, where] = torch.tensor(sequences[one][begin:end], dtype=torch.long)
                positions[row, where] = torch.arange(begin, end)
                of_group[row, where], branches[row, where] = number, branch
                for member in members if branch == _SHARED else [one]:
                    places[member, begin:end] = torch.arange(row * width + at, row * width + at + end - begin)
                at += end - begin
    return SharedPrompts(*(one.to(ids.device) for one in (laid, positions, of_group, branches, places)))


def hidden_states(
    model: PreTrainedModel, ids: Tensor, lengths: Tensor, places: Tensor, hardware: Hardware, *, logits: bool = False
) -> Tensor:
    """Return the last hidden states (B, P, D) at `places (B, P)` of sequences ids (B, T), with shared beginnings
    computed once where `launch.share_prompts`, the model and what it saves allow.

    lengths: tokens (B,) of each sequence that matter; at later places the result is arbitrary.
    logits: return the model's own logits (B, P, V) instead of hidden states.
    """
    network, wanted = (model, "logits") if logits else (decoder(model), "last_hidden_state")
    mask = _mask_of(model, hardware)
    shared = share(ids, lengths) if mask else None
    with hardware.autocast():
        if shared is None:
            hidden: Tensor = network(input_ids=ids, use_cache=False)[wanted]
            return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        masks = {
            kind: additive(seen, hardware.compute) if mask == "added" else seen
            for kind, seen in ((kind, shared.visible(window)) for kind, window in windows(model.config).items())
        }
        hidden = network(
            input_ids=shared.ids,
            position_ids=shared.positions,
            attention_mask=masks.get("", masks),
            use_cache=False,
        )[wanted]
        return hidden.flatten(0, 1)[shared.places.gather(1, places)]


def _mask_of(model: PreTrainedModel, hardware: Hardware) -> str | None:
    """The kind of mask that the model's attention takes, None where sequences stay apart."""
    if not hardware.share_prompts or not windows(model.config):
        return None
    kernel = model.config._attn_implementation
    return "added" if kernel in ADDED_MASKS else "boolean" if kernel == "sdpa" else None


_Group = tuple[int, list[int]]
"""Number of tokens in the shared beginning, and indices of the member sequences."""


def _layout(sequences: list[list[int]], most: int) -> tuple[list[_Group], list[list[int]], int]:
    """Return groups of at most `most` tokens, the groups of each row, and the tokens of a row."""
    groups = _grouped(sequences, most)
    costs = [_cost(begun, [len(sequences[one]) for one in members]) for begun, members in groups]
    return groups, _rows(costs, max(costs)), max(costs)


def _time(rows: int, width: int) -> float:
    """Estimate the time of rows, in tokens without attention."""
    return rows * width * (1 + width / _FAR)


def _grouped(sequences: list[list[int]], most: int) -> list[_Group]:
    """Group sequences by common beginnings, to minimise the total tokens among groups of at most `most` tokens whose
    members are adjacent in the order of their tokens."""
    order = sorted(range(len(sequences)), key=lambda one: (sequences[one], one))
    alike = [_alike(sequences[one], sequences[other]) for one, other in pairwise(order)]
    ends = [0, *accumulate(len(sequences[one]) for one in order)]
    # The most that is saved up to each place, where its last group begins, and the tokens which that group shares.
    saved, begins, shares = [0], [0], [0]
    for end in range(1, len(order) + 1):
        begun = len(sequences[order[end - 1]])
        best = (saved[end - 1], end - 1, begun)
        for begin in range(end - 2, -1, -1):
            begun = min(begun, alike[begin])
            spared = (end - begin - 1) * begun
            if ends[end] - ends[begin] - spared > most:  # with more members it only grows
                break
            best = max(best, (saved[begin] + spared, begin, begun))
        for column, value in zip((saved, begins, shares), best, strict=True):
            column.append(value)
    groups: list[_Group] = []
    end = len(order)
    while end:
        groups.insert(0, (shares[end], order[begins[end] : end]))
        end = begins[end]
    return groups


def _alike(one: list[int], other: list[int]) -> int:
    """Return the number of tokens in the common beginning of two sequences."""
    for place, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return place
    return min(len(one), len(other))


def _cost(begun: int, sizes: list[int]) -> int:
    """Tokens of a group."""
    return begun + sum(size - begun for size in sizes)


def _rows(costs: list[int], width: int) -> list[list[int]]:
    """Assign groups by number to rows of at most `width` tokens: the longest first, each to the first row that has
    room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        row = next((row for row, left in enumerate(room) if left >= costs[number]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(number)
        room[row] -= costs[number]
    return rows
