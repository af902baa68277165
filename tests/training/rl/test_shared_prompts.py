"""Sequences that begin alike are laid out with their beginning once."""

from __future__ import annotations

import numpy as np
import torch

from training.chat.base import pad
from training.train_modules.shared_prompts import share

PROMPTS = [[5, 6, 7, 8, 9, 30, 40, 41], [20, 6, 7], [11] * 12]
ANSWERS = [[3, 4], [3, 4, 5, 6, 7], [80], [9, 9, 9, 9]]


def test_every_token_is_found_again_and_every_prompt_is_there_once() -> None:
    sequences = [prompt + answer for answer in ANSWERS for prompt in PROMPTS]
    ids, lengths = pad(sequences, 0), torch.tensor([len(one) for one in sequences])
    shared = share(ids, lengths)
    assert shared is not None
    for place, sequence in zip(shared.places, sequences, strict=True):
        where = place[: len(sequence)]
        assert shared.ids.flatten()[where].tolist() == sequence
        assert shared.positions.flatten()[where].tolist() == list(range(len(sequence)))
    assert int((shared.groups >= 0).sum()) <= sum(map(len, PROMPTS)) + 3 * sum(map(len, ANSWERS))


def test_each_token_sees_its_own_sequence() -> None:
    sequences = [PROMPTS[0] + answer for answer in ANSWERS]
    shared = share(pad(sequences, 0), torch.tensor([len(one) for one in sequences]))
    assert shared is not None
    for window in (None, 4):
        seen = shared.visible(window).flatten(0, 1)
        for place, sequence in zip(shared.places, sequences, strict=True):
            row, at = divmod(int(place[len(sequence) - 1]), shared.ids.shape[1])
            assert shared.ids[row, seen[row, at]].tolist() == sequence[-(window or 99) :]


def test_sequences_that_share_little_stay_apart() -> None:
    assert share(torch.tensor([[1, 2, 3], [1, 5, 6], [7, 8, 9]]), torch.full((3,), 3)) is None


def test_a_few_words_that_all_begin_with_make_no_rows_that_attention_is_slow_in() -> None:
    """One answer to each prompt, and all prompts begin alike: one group of all would be a single row."""
    random = np.random.default_rng(17)
    sequences = [[1, 2, 3, 4, *random.integers(5, 4000, random.integers(20, 80)).tolist()] for _ in range(64)]
    ids, lengths = pad(sequences, 0), torch.tensor([len(one) for one in sequences])
    shared = share(ids, lengths)
    assert shared is not None
    rows, width = shared.ids.shape
    assert width < 4 * ids.shape[1] and rows * width < 0.8 * ids.numel()
    assert int((shared.groups >= 0).sum()) < int(lengths.sum())
