"""The held-out loss of a finished training and its baselines: of a bounded part of the text, shared by the ranks, as a
stream.

Each rank scores its part of every step and keeps one sum per sequence, so that memory grows neither with the held-out
text nor with the training's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from infra.run import Run
from training.core import ranks
from training.core.measuring import measuring
from training.data.packed_batches import batches_of
from training.data.packed_shards import PackedShards
from training.model.documents import Packed
from training.model.loss import IGNORE
from training.model.ngram import Bigram, Unigram
from training.objectives.base import Objective
from training.objectives.causal import Causal
from training.train_modules.language_model import LanguageModel
from training.validation.evaluate import Side

_SEQUENCES_AT_ONCE = 16
_TOKENS_AT_ONCE = 16_384
_COUNTED_AT_ONCE = 256


class Baselines(Protocol):
    """Models of counts, by name."""

    def losses(self, packed: Packed, labels: NDArray[np.int64]) -> Mapping[str, float]:
        """Return the summed cross-entropy in nats of the labels of sequences, for each baseline."""


class NextTokenBaselines:
    """Unigram and bigram of the sequences themselves.

    read: returns the text to count, from its beginning at each call.
    pairs: number of pairs of neighbouring tokens in it.
    """

    def __init__(self, read: Callable[[], Iterable[Packed]], vocab_size: int, pairs: int) -> None:
        self._unigram = Unigram((packed.tokens for packed in read()), vocab_size)
        self._bigram = Bigram((packed.tokens for packed in read()), vocab_size, pairs)

    def losses(self, packed: Packed, labels: NDArray[np.int64]) -> Mapping[str, float]:
        return {
            "unigram": float(self._unigram.losses(packed.tokens[:, 1:]).sum()),
            "bigram": float(self._bigram.losses(packed.tokens).sum()),
        }


class LabelBaselines:
    """The unigram of the labels, for objectives that predict something else than the next token."""

    def __init__(self, batches: Iterable[Packed], vocab_size: int, objective: Objective) -> None:
        labels = (objective.batch(packed)["labels"].numpy() for packed in batches)
        self._unigram = Unigram((row[row != IGNORE] for row in labels), vocab_size)

    def losses(self, packed: Packed, labels: NDArray[np.int64]) -> Mapping[str, float]:
        return {"unigram": float(self._unigram.losses(labels[labels != IGNORE]).sum())}


def count_baselines(
    shards: PackedShards, numbers: Sequence[int] | NDArray[np.int64], vocab_size: int, objective: Objective
) -> Baselines:
    """Count these sequences of the training split."""

    def read() -> Iterable[Packed]:
        return batches_of(shards, numbers, _COUNTED_AT_ONCE)

    if isinstance(objective, Causal):
        return NextTokenBaselines(read, vocab_size, len(numbers) * (len(shards[0][0]) - 1))
    return LabelBaselines(read(), vocab_size, objective)


@dataclass(frozen=True)
class HeldOut:
    """Results on held-out sequences, the same on every rank.

    losses: summed nats of each sequence (N,), in their order; labels: its number of labelled tokens (N,).
    by_source: mean nats per token of each source that has any.
    baselines: mean nats per token of each baseline.
    """

    losses: NDArray[np.float64]
    labels: NDArray[np.int64]
    by_source: Mapping[str, float]
    baselines: Mapping[str, float]


def measure(
    model: LanguageModel,
    shards: PackedShards,
    numbers: NDArray[np.int64],
    objective: Objective,
    baselines: Baselines,
    run: Run,
    sources: Sequence[Side] = (),
) -> HeldOut:
    """Score sequences of `shards`, each rank its part of them; every rank must call.

    Args:
        model: the model to measure.
        shards: packed sequences of the validation split.
        numbers: numbers of the sequences to score (N,).
        objective: makes a batch with labels of sequences.
        baselines: n-gram models that score the same labels.
        run: receives the progress.
        sources: of the shards, for the loss of each of them.
    """
    device = next(model.parameters()).device
    size = max(1, min(_SEQUENCES_AT_ONCE, _TOKENS_AT_ONCE // len(shards[0][0])))
    step, world = size * ranks.data_ranks(), ranks.data_ranks()
    width = max((source.id for source in sources), default=-1) + 1
    indices: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.float64]] = []
    by_source = np.zeros((2, width))
    others: dict[str, float] = {}
    with measuring(model):
        for begin in range(0, len(numbers), step):
            end = min(begin + step, len(numbers))
            own_indices = np.arange(begin, end)[ranks.data_rank() :: world]
            # Ranks that share a model compute together, an equal number of sequences each: a pipeline's microbatches,
            # and with them the experts' exchange, depend on their number. Sequences added to a rank's own are left out
            # of the result.
            repeats = -(-(end - begin) // world) - len(own_indices)
            requested = np.append(numbers[own_indices], numbers[:1].repeat(repeats))
            [packed] = batches_of(shards, requested, size, with_sources=bool(sources))
            batch = objective.batch(packed)
            losses = model.losses({name: value.to(device) for name, value in batch.items()}).double().cpu().numpy()
            run.stop_if_cancelled()
            run.progress(end, len(numbers), "sequences", "validating")
            if not len(own_indices):
                continue
            packed, losses = packed.first(len(own_indices)), losses[: len(own_indices)]
            labels = batch["labels"].numpy()[: len(own_indices)]
            indices.append(own_indices)
            rows.append(np.stack([losses.sum(1), (labels != IGNORE).sum(1)]))
            for name, loss in baselines.losses(packed, labels).items():
                others[name] = others.get(name, 0.0) + loss
            if sources:
                source_ids = packed.token_sources()[:, 1:].ravel()
                by_source[0] += np.bincount(source_ids, losses[:, :-1].ravel(), minlength=width)[:width]
                by_source[1] += np.bincount(source_ids, minlength=width)[:width]
    return _together(indices, rows, by_source, others, sources)


def _together(
    indices: Sequence[NDArray[np.int64]],
    rows: Sequence[NDArray[np.float64]],
    by_source: NDArray[np.float64],
    others: Mapping[str, float],
    sources: Sequence[Side],
) -> HeldOut:
    """Join the parts of all ranks, in the order of the sequences."""
    own_columns = (
        np.concatenate(indices) if indices else np.zeros(0, np.int64),
        np.hstack(rows) if rows else np.zeros((2, 0)),
    )
    # Ranks that share layers or sequences have the same part.
    parts = ranks.gather((*own_columns, by_source, dict(others)))[:: ranks.group_size()]
    order = np.argsort(np.concatenate([index for index, _, _, _ in parts]))
    losses, labels = np.hstack([row for _, row, _, _ in parts])[:, order]
    sums, counts = np.sum([part_sums for _, _, part_sums, _ in parts], axis=0)
    names = sorted({name for _, _, _, part_others in parts for name in part_others})
    total = labels.sum()
    return HeldOut(
        losses,
        labels.astype(np.int64),
        {source.name: float(sums[source.id] / counts[source.id]) for source in sources if counts[source.id]},
        {name: math.fsum(part_others.get(name, 0.0) for _, _, _, part_others in parts) / total for name in names},
    )
