"""Sources that are mixed during training: what a config makes of them, and the order of their sequences.

The order depends only on the sources, the weights, a seed and the place, so it is the same for any number of ranks, and
a training can continue at any place without a record of earlier reads. Each source is read completely before any of its
sequences is repeated, in a new order every time; a phase continues in each source where the previous one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.shuffle import get_shuffle

from corpus.tokens.packing import splitmix
from infra.errors import StageError, stage_error
from training.config import MixtureConfig, MixtureWeights, phase_problem
from training.data.shard_index import Split

SHUFFLE_BLOCK = 4_000_000
"""Sequences of a source within which they are shuffled: streaming's own for one canonical node."""
_USEFUL_EPOCHS = 4
"""Number of epochs up to which repeated text is worth nearly as much as new text (Muennighoff et al., 2023)."""


@dataclass(frozen=True)
class Pool:
    """The training sequences of one source, which lie one after the other.

    first: number of the first of them in the training split. shards: how many of them each file holds.
    """

    name: str
    first: int
    shards: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.shards)


@dataclass(frozen=True)
class Phase:
    """Weights from a place on. begins: sequences before it. weights: of each pool, adding up to 1."""

    begins: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Mixture:
    """Sources, phases in their order (the first begins at 0), and sequences that are called an epoch.

    At every position in a phase, each source has been read in proportion to its weight, but for at most as many
    sequences as there are sources.
    """

    pools: Sequence[Pool]
    phases: Sequence[Phase]
    epoch: int
    shuffle_block: int = SHUFFLE_BLOCK
    _orders: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Of each source the order at hand, and those of a few sources that are read quicker.
        object.__setattr__(self, "_orders", lru_cache(maxsize=2 * len(self.pools))(self._shuffled))

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The numbers of an epoch's sequences in the training split, (epoch,)."""
        begin, end = epoch * self.epoch, (epoch + 1) * self.epoch
        read = np.zeros(len(self.pools), np.int64)
        parts = []
        for number, (phase, length) in enumerate(self._lengths(end)):
            first, last = (min(max(0, place - phase.begins), length) for place in (begin, end))
            if first < last:
                before, labels = self._draw(number, first, last, seed)
                parts.append(self._numbers(read + before, labels, seed))
            read += self._draw(number, length, length, seed)[0]
        return np.concatenate(parts)

    def read(self, place: int, seed: int) -> NDArray[np.int64]:
        """Number of sequences of each source read before a place, (sources,)."""
        counts = [
            self._draw(number, length, length, seed)[0] for number, (_, length) in enumerate(self._lengths(place))
        ]
        return np.sum([np.zeros(len(self.pools), np.int64), *counts], axis=0)

    def until(self, place: int) -> list[Any]:
        """Phases that determine the order before a place, as plain JSON."""
        return [[phase.begins, list(phase.weights)] for phase in self.phases if phase.begins < max(1, place)]

    def _lengths(self, end: int) -> list[tuple[Phase, int]]:
        """The phases that begin before a place, with their lengths up to it."""
        begins = [*(phase.begins for phase in self.phases if phase.begins < end), end]
        return [(phase, after - before) for phase, (before, after) in zip(self.phases, pairwise(begins), strict=False)]

    def _draw(self, number: int, begin: int, end: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for a phase the number of sequences of each source before its place `begin` (sources,), and the source
        of each place from there to `end`.

        The i-th sequence of a source with weight w has the time (i + u) / w, with u between 0 and 1 from a hash, and
        sequences are sorted by their times. Before time t a source has at most one sequence more or less than w · t,
        so there are few candidates at any place.
        """
        weights = np.array(self.phases[number].weights)
        sources = np.flatnonzero(weights)
        slack = len(sources)
        first = np.zeros(len(weights), np.int64)
        pieces = []
        for source in sources.tolist():
            weight = weights[source]
            first[source] = max(0, int(weight * (begin - slack)) - 1)
            items = np.arange(first[source], int(weight * (end + slack)) + 2)
            times = (items + _scattered(items, source, number, seed)) / weight
            pieces.append((times, np.full(len(items), source)))
        times, labels = (np.concatenate(column) for column in zip(*pieces, strict=True))
        labels = labels[np.lexsort((labels, times))]
        skipped = begin - int(first.sum())
        before = first + np.bincount(labels[:skipped], minlength=len(weights))
        return before, labels[skipped : skipped + end - begin]

    def _numbers(self, read: NDArray[np.int64], labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """The sequences of places whose sources are `labels`, after `read` of each were read."""
        numbers = np.empty(len(labels), np.int64)
        for source in np.unique(labels):
            here = np.flatnonzero(labels == source)
            numbers[here] = self._of_source(int(source), int(read[source]), len(here), seed)
        return numbers

    def _of_source(self, source: int, begin: int, count: int, seed: int) -> NDArray[np.int64]:
        size = self.pools[source].size
        found = []
        for time in range(begin // size, (begin + count - 1) // size + 1):
            first, last = (min(max(0, place - time * size), size) for place in (begin, begin + count))
            found.append(self._orders(source, time, seed)[first:last])
        return self.pools[source].first + np.concatenate(found)

    def _shuffled(self, source: int, time: int, seed: int) -> NDArray[np.int64]:
        """The order in which a source is read for the `time`-th time: streaming's, which knows its files."""
        shards = np.array(self.pools[source].shards)
        order: NDArray[np.int64] = get_shuffle("py1e", shards, 1, seed, time, self.shuffle_block)
        return order


def _scattered(items: NDArray[np.int64], source: int, phase: int, seed: int) -> NDArray[np.float64]:
    """A number from 0 to 1 for each item, by the finaliser of SplitMix64 (Steele et al., 2014)."""
    mixed = items.astype(np.uint64)
    for more in (source, phase, seed):
        mixed = splitmix(mixed + np.uint64((int(more) + 1) * 0x9E3779B97F4A7C15 % 2**64))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def sources_of(config: MixtureConfig, meta: Mapping[str, Any], split: Split) -> list[Pool]:
    """The sources of a training split that a mixture reads.

    Raises StageError: `not_by_source` for shards whose sequences hold several sources; `unknown_source`,
    `unnamed_source`; `no_sequences` for a source that is to be read and fills no sequence.
    """
    sources = meta.get("sources", {})
    if not sources or any("first_sequence" not in source["train"] for source in sources.values()):
        raise stage_error(
            "not_by_source",
            "pretrain.mixture",
            "expected shards in which each sequence has one source",
            "set by_source: true in the shard section, which rebuilds the shards",
        )
    if problems := list(config.problems(sources)):
        raise StageError(*problems)
    for phase in config.all_phases:
        for name, weight in phase.weights.items():
            if weight and not sources[name]["train"]["sequences"]:
                raise stage_error(
                    "no_sequences",
                    f"pretrain.mixture.{phase.unit}.{name}",
                    "its training text does not fill a sequence",
                    f"set {name}: 0, or provide more text",
                )
    # A source's files are those that end within its sequences.
    samples = [shard["samples"] for shard in split.shards]
    ends = np.cumsum(samples)
    pools = []
    for name, source in sources.items():
        first, count = source["train"]["first_sequence"], source["train"]["sequences"]
        within = (ends > first) & (ends <= first + count)
        pools.append(Pool(name, first, tuple(int(size) for size, mine in zip(samples, within, strict=True) if mine)))
    return [pool for pool in pools if pool.size]


def epoch_sequences(config: MixtureConfig, pools: Sequence[Pool], batch_size: int) -> int:
    """Sequences of an epoch of the mixture, in whole batches: with `proportion` as many as all sources have that it
    ever reads, else as many as `repeat` or `choose` of the beginning ask for."""
    sizes = {pool.name: pool.size for pool in pools}
    if config.unit == "proportion":
        total = sum(sizes[name] for name in sizes if any(phase.weights.get(name) for phase in config.all_phases))
    else:
        total = int(sum(config.wanted(sizes).values()))
    return total // batch_size * batch_size


def phases_of(
    config: MixtureConfig,
    pools: Sequence[Pool],
    batches_of: Callable[[str], int],
    last: int,
    place: Callable[[int], int],
) -> list[Phase]:
    """The phases of a training of `last` batches.

    batches_of: converts the `begins` of a phase to the number of batches before it.
    place: number of sequences of these data read before a batch; below 0 for earlier batches of other data.
    Raises StageError `phase_order` for phases that do not come one after the other within the training.
    """
    begins = [batches_of(phase.begins) for phase in config.phases]
    if problem := phase_problem(begins, last):
        raise StageError(problem)
    places = [max(0, place(batch)) for batch in (0, *begins)]
    found = []
    for number, phase in enumerate(config.all_phases):
        if number + 1 == len(places) or places[number + 1] > places[number]:
            found.append(Phase(places[number], _shares(phase, pools)))
    return found


def _shares(phase: MixtureWeights, pools: Sequence[Pool]) -> tuple[float, ...]:
    wanted = phase.wanted({pool.name: pool.size for pool in pools})
    total = sum(wanted.values())
    return tuple(wanted[pool.name] / total for pool in pools)


def files_of(pools: Sequence[Pool], split: Split) -> list[list[Mapping[str, Any]]]:
    """The entries of index.json of each source."""
    firsts = np.cumsum([0, *(shard["samples"] for shard in split.shards)])
    return [
        [
            shard
            for shard, first in zip(split.shards, firsts, strict=False)
            if pool.first <= first < pool.first + pool.size
        ]
        for pool in pools
    ]


def mixture_report(mixture: Mixture, place: int, seed: int) -> dict[str, Any]:
    """Summary of a mixture after `place` sequences: for each source its size, the sequences read and the epochs that
    these amount to; and the phases."""
    read = mixture.read(place, seed).tolist()
    names = [pool.name for pool in mixture.pools]
    return {
        "sources": {
            pool.name: {"sequences": pool.size, "read": count, "epochs": count / pool.size}
            for pool, count in zip(mixture.pools, read, strict=True)
        },
        "phases": [
            {"begins_at_sequence": phase.begins, "proportion": dict(zip(names, phase.weights, strict=True))}
            for phase in mixture.phases
        ],
    }


def repeated_often(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each source that was repeated too often. report: of `mixture_report`."""
    return [
        f"{name} is read {source['epochs']:.1f} times: repetitions beyond {_USEFUL_EPOCHS} hardly help "
        "(Muennighoff et al., 2023)"
        for name, source in report["sources"].items()
        if source["epochs"] > _USEFUL_EPOCHS + 0.05
    ]
