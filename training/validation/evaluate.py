"""Measuring a language model on held-out text without touching the training's random state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.run import Run
from training.core.callbacks import Callback
from training.core.measuring import measuring
from training.core.train_state import TrainState
from training.model.documents import Packed
from training.model.loss import IGNORE
from training.objectives.base import Objective
from training.train_modules.language_model import LanguageModel

_BATCH = 16


def token_losses(
    model: LanguageModel, sequences: Packed, objective: Objective, run: Run | None = None
) -> NDArray[np.float64]:
    """Return the cross-entropy in nats (sequences, T) of each labelled token, 0 elsewhere; for the causal objective
    each position has that of the next token, the last one 0.

    Args:
        objective: that of the training.
    """
    device = next(model.parameters()).device
    parts = []
    with measuring(model):
        for number, part in enumerate(sequences.batches(_BATCH)):
            batch = objective.batch(part)
            losses = model.losses({name: value.to(device) for name, value in batch.items()})
            parts.append(losses.double().cpu().numpy())
            if run is not None:
                run.stop_if_cancelled()
                run.progress(number * _BATCH + len(part), len(sequences), "sequences", "validating")
    return np.concatenate(parts)


def labels_of(sequences: Packed, objective: Objective) -> NDArray[np.int64]:
    """The labels of each sequence (sequences, T), -100 elsewhere: the labels of `token_losses`."""
    return np.concatenate([objective.batch(part)["labels"].numpy() for part in sequences.batches(_BATCH)])


@dataclass(frozen=True)
class Side:
    """Validation side of one source, from meta.json.

    id: its number in the shards' column `sources`.
    """

    name: str
    id: int
    bytes_per_token: float


def sides(meta: Mapping[str, Any]) -> list[Side]:
    """Return the sources with validation text; empty for shards that record none."""
    all_sides = []
    for name, source in meta.get("sources", {}).items():
        held = source["validation"]
        if held["tokens"]:
            all_sides.append(Side(name, source["id"], held["bytes"] / held["tokens"]))
    return all_sides


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss of a text by its UTF-8 bytes, which compares across tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token


def losses_by_source(losses: NDArray[np.float64], sequences: Packed, sources: Sequence[Side]) -> dict[str, float]:
    """Return the mean loss in nats per token of each source that has tokens in `sequences`.

    Args:
        losses: result of `token_losses` for the sequences.
        sequences: packed sequences with the source of each token.
        sources: name and number of each source.
    """
    predicted = sequences.token_sources()[:, 1:].ravel()
    sums = np.bincount(predicted, losses[:, :-1].ravel())
    counts = np.bincount(predicted)
    return {
        source.name: float(sums[source.id] / counts[source.id])
        for source in sources
        if source.id < len(counts) and counts[source.id]
    }


class Validation(Callback):
    """Measures loss and bits per byte on a fixed sample of the validation text every `every` batches and after the last
    one, in total and by source. The figures of the manifest cover more text, and so have other names.

    last: batches of the whole training.
    bytes_per_token: of the whole validation side; 0 for objectives whose loss is not a code length of the text.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: Packed,
        every: int,
        last: int,
        run: Run,
        objective: Objective,
        *,
        bytes_per_token: float = 0.0,
        sources: Sequence[Side] = (),
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._objective = objective
        self._labelled = int((labels_of(sequences, objective) != IGNORE).sum())
        self._every = every
        self._last = last
        self._run = run
        self._bytes_per_token = bytes_per_token
        self._sources = sources

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch
        if batch % self._every and batch != self._last:
            return
        losses = token_losses(self._model, self._sequences, self._objective)
        mean = float(losses.sum()) / self._labelled
        values = {"validation/sample_loss": mean}
        if self._bytes_per_token:
            values["validation/sample_bits_per_byte"] = bits_per_byte(mean, self._bytes_per_token)
        by_source = losses_by_source(losses, self._sequences, self._sources) if self._sources else {}
        for source in self._sources:
            if source.name in by_source:
                values[f"validation/sample_loss/{source.name}"] = by_source[source.name]
                values[f"validation/sample_bits_per_byte/{source.name}"] = bits_per_byte(
                    by_source[source.name], source.bytes_per_token
                )
        self._run.metrics(values, batch)


class InLoopEvaluation(Callback):
    """Records the metrics that `measure` returns on held-out examples every `every` batches, and after the last one.

    last: batches of the whole training.
    """

    def __init__(self, measure: Callable[[], Mapping[str, float]], every: int, last: int, run: Run) -> None:
        self._measure = measure
        self._every = every
        self._last = last
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch
        if batch % self._every == 0 or batch == self._last:
            self._run.metrics(self._measure(), batch)
