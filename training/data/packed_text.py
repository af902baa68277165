"""The packed text of a pretraining: its batches, their order, and a record of the sequences read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.documents.passes import write_json
from corpus.tokens.chat_format import END_OF_TEXT
from corpus.tokens.trained import TrainedSequences
from infra.errors import StageError, stage_error
from infra.run import Run
from infra.store.states import KeptState, kept_states
from training.checkpoint.states import beginning, place_in
from training.config import PretrainConfig, batches
from training.config.batch_size import BatchSizeRampup
from training.core import ranks
from training.core.plan import Plan
from training.data.mixed_shards import (
    MixedShards,
    epoch_sequences,
    mixed_fingerprint,
    mixed_sources,
    phases_of,
    repeated_often,
    told,
)
from training.data.mixture import Mixture, Pool
from training.data.packed_shards import PackedShards, count_sequences, spread, trained_sequences
from training.data.shard_index import read_meta
from training.trainer.fit import Fit


@dataclass(frozen=True)
class PackedText:
    """The packed text of a training, and how it is read.

    meta: meta.json of the shards. length: tokens of a sequence. batch_tokens, batch_size: tokens as the config has
    them and whole sequences of a full batch. epoch_batches: full batches of one pass over the text. pools: the sources
    of a mixture, none without one.
    """

    shards: Path
    meta: Mapping[str, Any]
    length: int
    batch_tokens: int
    batch_size: int
    epoch_batches: int
    pools: Sequence[Pool]

    @classmethod
    def of(cls, config: PretrainConfig, inputs: Mapping[str, Path]) -> PackedText:
        """Open the text of a config. Raises StageError if the config does not fit the shards, or these hold less than a
        batch."""
        shards = inputs["shards"]
        meta = read_meta(shards)
        length = int(meta["sequence_length"])
        if problems := config.problems(length, int(meta["vocab_size"]), continues="model" in inputs):
            raise StageError(*problems)
        batch_size = config.global_batch_tokens // length
        pools = mixed_sources(config.mixture, meta, shards / "train") if config.mixture else []
        sequences = count_sequences(shards / "train")
        if config.mixture:
            sequences = epoch_sequences(config.mixture, pools, batch_size)
        if sequences < batch_size:
            raise stage_error(
                "too_few_sequences",
                "pretrain.global_batch_tokens",
                f"expected at least one batch of {batch_size} sequences, the training split has {sequences}",
                "lower global_batch_tokens or give more text",
            )
        return cls(shards, meta, length, config.global_batch_tokens, batch_size, sequences // batch_size, pools)

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    @property
    def scale(self) -> dict[str, Any]:
        """Units for the lengths of a config (training.config.batches)."""
        return {"batch_tokens": self.batch_tokens, "epoch_batches": self.epoch_batches}

    @property
    def train(self) -> Path:
        return self.shards / "train"

    @property
    def validation(self) -> Path:
        return self.shards / "validation"

    @property
    def bytes_per_token(self) -> float:
        return float(self.meta["validation_bytes"]) / float(self.meta["validation_tokens"])

    def first(self, mixture: Mixture | None, seed: int, tokens: int) -> Sequence[int] | NDArray[np.int64]:
        """Return the numbers of training sequences, about `tokens` tokens in total, that represent the text: the first
        ones of a mixture, else the first of the split, which is ordered by the documents' hashes, or some of each
        source."""
        count = max(1, tokens // self.length)
        if mixture:
            return np.unique(mixture.order(0, seed)[:count])
        sequences = count_sequences(self.train)
        if any("first_sequence" in source["train"] for source in self.meta.get("sources", {}).values()):
            return spread(sequences, count)
        return range(min(sequences, count))


def check_tokenizer(
    tokenizer: Any,
    meta: Mapping[str, Any],
    path: str = "pretrain.inputs.tokenizer",
    fix: str = "name the tokenizer that the shards were made with",
) -> None:
    """Raise StageError `other_tokenizer` for shards made with another tokenizer, as far as their numbers reveal it.
    path: the key that names one of the two."""
    end = meta.get("end_of_text", END_OF_TEXT)
    ours = max(tokenizer.get_vocab().values()) + 1, tokenizer.get_vocab().get(end)
    theirs = meta["vocab_size"], meta["end_of_text_id"]
    if ours != theirs:
        raise stage_error(
            "other_tokenizer",
            path,
            f"expected the tokenizer of the shards: {theirs[0]:,} ids with {end} at {theirs[1]}, this one has "
            f"{ours[0]:,} with it at {ours[1]}",
            fix,
        )


def rampup_of(config: PretrainConfig, text: PackedText) -> BatchSizeRampup | None:
    """The batch-size warm-up in sequences. Raises StageError where it is longer than an epoch, or ranks
    cannot share the first batch."""
    if config.batch_warmup is None:
        return None
    length, epoch = text.length, text.epoch_batches * text.batch_size
    over = math.ceil(config.batch_warmup.over_tokens / length)
    if over > epoch:
        raise stage_error(
            "not_within_an_epoch",
            "pretrain.batch_warmup.over_tokens",
            f"expected no more than the {epoch * length:,} tokens of an epoch, not {config.batch_warmup.over_tokens:,}",
            "shorten it, or give more text",
        )
    first = config.batch_warmup.first_tokens // length
    if first % ranks.data_ranks():
        raise stage_error(
            "not_divisible",
            "pretrain.batch_warmup.first_tokens",
            f"expected {ranks.data_ranks()} ranks to share the {first} sequences of the first batch",
            f"make it a multiple of {length * ranks.data_ranks():,} tokens, or start fewer processes",
        )
    return BatchSizeRampup(first, text.batch_size, over, epoch)


def mixture_of(config: PretrainConfig, text: PackedText, plan: Plan, inputs: Mapping[str, Path]) -> Mixture:
    """The mixture of a training, whose phases begin after batches that count from the beginning of the first training.

    Raises StageError `phase_order`.
    """
    assert config.mixture is not None
    epoch = plan.epoch_batches * plan.batch_size
    before = _of_other_data(plan, beginning(config, inputs, plan.batches), mixed_fingerprint(text.train))
    phases = phases_of(
        config.mixture,
        text.pools,
        lambda begins: batches(begins, **text.scale, whole=plan.batches, rampup=plan.rampup),
        plan.batches,
        lambda batch: plan.place(batch) - before,
    )
    return Mixture(text.pools, phases, epoch, config.shuffle_block)


def _of_other_data(plan: Plan, begin: KeptState | None, data: str) -> int:
    """Examples that a training read before the data with this fingerprint."""
    if begin is None:
        return 0
    epochs, read = place_in(begin, data)
    return plan.place(begin.batch) - epochs * plan.epoch_batches * plan.batch_size - read


def open_training(
    config: PretrainConfig,
    text: PackedText,
    mixture: Mixture | None,
    rampup: BatchSizeRampup | None,
    cache: Path,
    limit_gb: float | None,
) -> PackedShards:
    """The training split in the order in which it is read. cache: where compressed shards are unpacked."""
    options: dict[str, Any] = {"read_at_once": rampup.first if rampup else None, "limit_gb": limit_gb}
    if mixture:
        return MixedShards(text.train, cache, text.batch_size, config.seed, mixture, **options)
    return PackedShards(
        text.train, cache, text.batch_size, config.seed, shuffle=True, shuffle_block=config.shuffle_block, **options
    )


def leave_mixture(train: MixedShards, plan: Plan, done: Fit, out_dir: Path, run: Run) -> dict[str, float]:
    """Report the sequences read of each source, in aux/mixture.json and as figures."""
    place = plan.examples(done.batches) - _of_other_data(plan, done.begin, train.fingerprint)
    found = told(train.mixture, place, train.shuffle_seed)
    for said in repeated_often(found):
        run.event("repeated_often", said)
    if ranks.is_first():
        write_json(out_dir / "aux" / "mixture.json", found)
    return {f"epochs_{name}": one["epochs"] for name, one in found["sources"].items()}


def leave_trained(train: PackedShards, done: Fit, plan: Plan, inputs: Mapping[str, Path], out_dir: Path) -> None:
    """Write the record of trained sequences to the model's folder, and to each of its kept states."""
    skipped = {batch for one in done.corrections for batch in range(one.skip_first, one.skip_end)}
    before = TrainedSequences.read(inputs["model"]) if "model" in inputs else None
    first, place = 0, (0, 0)
    if begin := done.begin:
        # Of states that were kept before this was written down, what is known is what their whole training read.
        before = TrainedSequences.read(begin.folder) or TrainedSequences.read(inputs["state"])
        first, place = begin.batch, place_in(begin, train.fingerprint)
    for state in [*kept_states(out_dir), None]:
        batch = state.batch if state else done.batches
        seen = trained_sequences(train, batch, plan.batch_size, plan.rampup, skipped, first, place)
        before = TrainedSequences(train.text_fingerprint, seen).after(before)
        before.write(state.folder if state else out_dir)
        first, place = batch, place_in(state, train.fingerprint) if state else place
