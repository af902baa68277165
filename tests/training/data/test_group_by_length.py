"""Batches of examples of about one length."""

from __future__ import annotations

import numpy as np
import torch

from training.data.examples import example_loader


def _batches(lengths: list[int], *, grouped: bool, read: int = 0, epochs: int = 1) -> list[list[list[int]]]:
    """Each epoch's batches of examples (number, length)."""
    loader, _ = example_loader(
        list(zip(range(len(lengths)), lengths, strict=True)),
        batch_size=8,
        seed=5,
        collate=lambda rows: {"rows": torch.tensor(rows)},
        count=lambda batch: None,  # type: ignore[arg-type, return-value]
        lengths=lengths if grouped else None,
    )
    if read:
        loader.dataloader.dataset.load_state_dict({"epoch": 0, "sample_in_epoch": read})  # type: ignore[attr-defined]
    return [[batch["rows"].tolist() for batch in loader.dataloader] for _ in range(epochs)]


def test_batches_are_of_one_length_hold_all_once_and_go_on_where_they_were() -> None:
    lengths = np.random.default_rng(1).integers(10, 120, 301).tolist()
    first, second = _batches(lengths, grouped=True, epochs=2)

    def padding(batches: list[list[list[int]]]) -> float:
        kept = sum(length for batch in batches for _, length in batch)
        return 1 - kept / sum(max(length for _, length in batch) * len(batch) for batch in batches)

    assert padding(first) < 0.1 < 0.3 < padding(_batches(lengths, grouped=False)[0])
    for epoch in (first, second):
        assert len({number for batch in epoch for number, _ in batch}) == 37 * 8
    assert first != second
    # Lengths do not rise or fall through an epoch: a batch's length says nothing about that of the next.
    means = [np.mean([length for _, length in batch]) for batch in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    assert _batches(lengths, grouped=True, read=80)[0] == first[10:]
