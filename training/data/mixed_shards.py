"""Shards of several sources, mixed while training: the sources of a shard artifact, the phases of a config, and the
data set that reads them in the order of `training.data.mixture`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.tokens.trained import split_fingerprint
from infra.errors import StageError, stage_error
from training.config import MixtureConfig, MixtureWeights, phase_problem
from training.core import ranks
from training.data.mixture import Mixture, Phase, Pool, pools_of
from training.data.packed_shards import PackedShards, bytes_in_use
from training.data.shard_index import read_index

_USEFUL_EPOCHS = 4
"""Number of epochs up to which repeated text is worth nearly as much as new text (Muennighoff et al., 2023)."""


class MixedShards(PackedShards):
    """The training split, read in the order of a mixture; an epoch is the mixture's. See PackedShards.

    mixture: with an epoch of whole batches.
    """

    def __init__(
        self,
        folder: Path,
        cache: Path,
        batch_size: int,
        seed: int,
        mixture: Mixture,
        *,
        read_at_once: int | None = None,
        limit_gb: float | None = None,
    ) -> None:
        super().__init__(
            folder,
            cache,
            batch_size,
            seed,
            shuffle=False,
            read_at_once=read_at_once,
            limit_gb=limit_gb,
            in_use=bytes_in_use(_files(folder, mixture.pools), mixture.shuffle_block),
        )
        self.mixture = mixture
        self.epoch_size = mixture.epoch
        self.length = ceil(mixture.epoch / ranks.data_ranks())
        self.fingerprint = mixed_fingerprint(folder)

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return an epoch's sequences to streaming, which distributes them among ranks and workers."""
        return np.array([self.mixture.epoch]), self.mixture.order(epoch, self.shuffle_seed)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        state = super().state_dict(num_samples, from_beginning)
        until = self.mixture.until(self._place(state))
        return {**state, "mixture": {"epoch": self.mixture.epoch, "phases": until}}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Seek to a position, like PackedShards. Raises StageError `other_mixture` if this mixture would have read
        different sequences before it."""
        place, was = self._place(obj), obj["mixture"]
        same_epoch = was["epoch"] == self.mixture.epoch or obj["epoch"] == 0
        if not same_epoch or was["phases"] != self.mixture.until(place):
            raise stage_error(
                "other_mixture",
                "pretrain.mixture",
                f"the training that it goes on from read another mixture up to there, sequence {place:,}",
                "begin with its mixture and its global_batch_tokens, and write other weights as a phase that begins at "
                "that batch, in batches",
            )
        super().load_state_dict({key: value for key, value in obj.items() if key != "mixture"})

    def _place(self, state: Mapping[str, Any]) -> int:
        return int(state["epoch"]) * self.mixture.epoch + int(state["sample_in_epoch"])


def mixed_fingerprint(split: Path) -> str:
    """Fingerprint of a training split that is read as a mixture; the state of the data set identifies the mixture."""
    return f"{split_fingerprint(split)}:mixed"


def mixed_sources(config: MixtureConfig, meta: Mapping[str, Any], folder: Path) -> list[Pool]:
    """The sources of a training split that a mixture reads.

    Raises StageError: `not_by_source` for shards whose sequences hold several sources; `unknown_source`,
    `unnamed_source`; `no_sequences` for a source that is to be read and fills no sequence.
    """
    sources = meta.get("sources", {})
    if not sources or any("first_sequence" not in source["train"] for source in sources.values()):
        raise stage_error(
            "not_by_source",
            "pretrain.mixture",
            "expected shards whose sequences are each of one source",
            "set by_source: true in the shard section, and they are cut once more",
        )
    if problems := list(config.problems(sources)):
        raise StageError(*problems)
    for phase in config.all_phases:
        for name, weight in phase.weights.items():
            if weight and not sources[name]["train"]["sequences"]:
                raise stage_error(
                    "no_sequences",
                    f"pretrain.mixture.{phase.unit}.{name}",
                    "its training text fills no sequence",
                    f"set {name}: 0, or give it more text",
                )
    index = read_index(folder)
    return [pool for pool in pools_of(sources, [shard["samples"] for shard in index["shards"]]) if pool.size]


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


def _files(folder: Path, pools: Sequence[Pool]) -> list[list[Mapping[str, Any]]]:
    """The entries of index.json of each source."""
    shards = read_index(folder)["shards"]
    firsts = np.cumsum([0, *(shard["samples"] for shard in shards)])
    return [
        [one for one, first in zip(shards, firsts, strict=False) if pool.first <= first < pool.first + pool.size]
        for pool in pools
    ]


def told(mixture: Mixture, place: int, seed: int) -> dict[str, Any]:
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


def repeated_often(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each source that was repeated too often. found: result of `told`."""
    return [
        f"{name} is read {one['epochs']:.1f} times: repetitions beyond {_USEFUL_EPOCHS} hardly help "
        "(Muennighoff et al., 2023)"
        for name, one in found["sources"].items()
        if one["epochs"] > _USEFUL_EPOCHS + 0.05
    ]
