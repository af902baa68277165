"""The data of a pretraining, from shards to batches.

The way of a document's tokens:

1. `shard_index.Split` checks the index and the files of each side, before anything is computed.
2. `PretrainData` puts sequences together to batches, batches to epochs, and epochs to the length of the training. Of a
   mixture (`mixture`) an epoch is what its sources give together.
3. `PackedShards` reads the training side in its order: in place, unpacked, or fetched from S3 (`remote_shards`), into
   the folder of this node (`node_storage`).
4. `packed_loader` (`packed_batches`) stacks sequences and has the objective make inputs and labels of them. The loop
   takes the batch from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.documents.passes import write_json
from corpus.tokens.trained import TrainedSequences
from infra.errors import StageError, stage_error
from infra.run import Run
from infra.store.states import KeptState, kept_states
from training.checkpoint.states import beginning, place_in
from training.config import PretrainConfig, batches
from training.config.batch_size import BatchSizeRampup
from training.core import ranks
from training.core.hardware import Hardware
from training.core.plan import Plan
from training.core.train_state import Batch, Loader, TokenCount
from training.data.mixture import Mixture, epoch_sequences, mixture_report, phases_of, repeated_often, sources_of
from training.data.open_shards import OpenShards, spread
from training.data.packed_batches import packed_loader, trained_sequences
from training.data.packed_shards import PackedShards, fingerprint_of
from training.model.documents import Packed
from training.trainer.fit import Fit


class PretrainData(OpenShards):
    """The packed text of a pretraining, and how it is read.

    Plan and order are known from the beginning, and depend on the config and the shards alone; sequences and batches
    come within a `with` block. Made once the ranks know what they share (`ranks.share_examples`).

    plan: length of the training, without its FLOPs. mixture: the order of a mixture; None where the split is shuffled.
    """

    def __init__(self, config: PretrainConfig, inputs: Mapping[str, Path], run: Run) -> None:
        """Plan the reading.

        Raises:
            StageError: where shards are damaged, the config does not fit them, they hold less than a batch, or ranks
                cannot share a batch; of a mixture what `sources_of` and `phases_of` raise.
        """
        super().__init__(inputs["shards"], run)
        self._seed, self._shuffle_block, self._inputs = config.seed, config.shuffle_block, inputs

        # A batch, in whole sequences.
        if problems := config.problems(self.length, self.vocab_size, continues="model" in inputs):
            raise StageError(*problems)
        batch_size = config.global_batch_tokens // self.length

        # An epoch, in whole batches: of the split, or of the sources that are mixed.
        sequences = self.train.sequences
        if config.mixture:
            pools = sources_of(config.mixture, self.meta, self.train)
            sequences = epoch_sequences(config.mixture, pools, batch_size)
        if sequences < batch_size:
            raise stage_error(
                "too_few_sequences",
                "pretrain.global_batch_tokens",
                f"expected at least one batch of {batch_size} sequences, the training split has {sequences}",
                "lower global_batch_tokens or give more text",
            )
        epoch_batches = sequences // batch_size

        # The training, in batches, which may be smaller at first.
        lengths: dict[str, Any] = {"batch_tokens": config.global_batch_tokens, "epoch_batches": epoch_batches}
        rampup = _rampup(config, self.length, batch_size, epoch_batches)
        last = batches(config.duration, **lengths, rampup=rampup)
        self.plan = Plan(last, batch_size, config.global_batch_tokens, epoch_batches, rampup=rampup)

        # The order of a mixture, whose phases begin after batches that count from the beginning of the first training.
        self.mixture: Mixture | None = None
        if config.mixture:
            begin = beginning(config, inputs, last)
            before = self._read_before(begin, fingerprint_of(self.train, mixed=True))
            phases = phases_of(
                config.mixture,
                pools,
                lambda begins: batches(begins, **lengths, whole=last, rampup=rampup),
                last,
                lambda batch: self.plan.place(batch) - before,
            )
            self.mixture = Mixture(pools, phases, epoch_batches * batch_size, config.shuffle_block)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of a validation token."""
        return float(self.meta["validation_bytes"]) / float(self.meta["validation_tokens"])

    # What is looked at besides training.

    def training_numbers(self, tokens: int) -> Sequence[int] | NDArray[np.int64]:
        """Return the numbers of training sequences, about `tokens` tokens in total, that represent the text: the first
        ones of a mixture, else the first of the split, which is ordered by the documents' hashes, or some of each
        source."""
        count = max(1, tokens // self.length)
        if self.mixture:
            return np.unique(self.mixture.order(0, self._seed)[:count])
        if any("first_sequence" in source["train"] for source in self.meta.get("sources", {}).values()):
            return spread(self.train.sequences, count)
        return range(min(self.train.sequences, count))

    def validation_numbers(self, tokens: int) -> NDArray[np.int64]:
        """Return the numbers of validation sequences, at most about `tokens` tokens in total, from all of the text."""
        return spread(self.validation.sequences, max(1, tokens // self.length))

    # Training.

    def loader(
        self, batch: Callable[[Packed], Batch], count: Callable[[Any], TokenCount], hardware: Hardware
    ) -> Loader:
        """The batches of the training; every rank must call, and gets its part of each.

        Args:
            batch: makes tensors of sequences, see training/objectives.
            count: total and loss-bearing tokens of such a batch.
        """
        rampup = self.plan.rampup
        self._training = PackedShards(
            self.train,
            self.cache,
            self.plan.batch_size,
            self._seed,
            shuffle=self.mixture is None,
            mixture=self.mixture,
            read_at_once=self.plan.smallest_batch,
            limit_gb=self.limit_gb,
            shuffle_block=self._shuffle_block,
        )
        return packed_loader(
            self._training,
            self.plan.batch_size,
            batch,
            count,
            workers=hardware.loader_workers(self._run.launch),
            pin_memory=hardware.device.type == "cuda",
            rampup=rampup,
        )

    # The record of what was read.

    def write_trained(self, done: Fit, out_dir: Path) -> None:
        """Write the record of trained sequences to the model's folder, and to each of its kept states."""
        training, inputs, plan = self._training, self._inputs, self.plan
        skipped = {batch for one in done.corrections for batch in range(one.skip_first, one.skip_end)}
        before = TrainedSequences.read(inputs["model"]) if "model" in inputs else None
        first, place = 0, (0, 0)
        if begin := done.begin:
            # Of states that were kept before this was written down, what is known is what their whole training read.
            before = TrainedSequences.read(begin.folder) or TrainedSequences.read(inputs["state"])
            first, place = begin.batch, place_in(begin, training.fingerprint)
        for state in [*kept_states(out_dir), None]:
            batch = state.batch if state else done.batches
            seen = trained_sequences(training, batch, plan.batch_size, plan.rampup, skipped, first, place)
            before = TrainedSequences(training.text_fingerprint, seen).after(before)
            before.write(state.folder if state else out_dir)
            first, place = batch, place_in(state, training.fingerprint) if state else place

    def write_mixture(self, done: Fit, out_dir: Path) -> dict[str, float]:
        """Report the sequences read of each source, in aux/mixture.json and as figures; nothing without a mixture."""
        if self.mixture is None:
            return {}
        before = self._read_before(done.begin, self._training.fingerprint)
        place = self.plan.examples(done.batches) - before
        report = mixture_report(self.mixture, place, self._training.shuffle_seed)
        for sentence in repeated_often(report):
            self._run.event("repeated_often", sentence)
        if ranks.is_first():
            write_json(out_dir / "aux" / "mixture.json", report)
        return {f"epochs_{name}": source["epochs"] for name, source in report["sources"].items()}

    def _read_before(self, begin: KeptState | None, data: str) -> int:
        """Examples that a training read of other data before those with this fingerprint."""
        if begin is None:
            return 0
        epochs, read = place_in(begin, data)
        return self.plan.place(begin.batch) - epochs * self.plan.epoch_batches * self.plan.batch_size - read


def _rampup(config: PretrainConfig, length: int, batch_size: int, epoch_batches: int) -> BatchSizeRampup | None:
    """The batch-size warm-up in sequences. Raises StageError where it is longer than an epoch, or ranks cannot share
    the first batch."""
    if config.batch_warmup is None:
        return None
    epoch = epoch_batches * batch_size
    over = math.ceil(config.batch_warmup.over_tokens / length)
    if over > epoch:
        raise stage_error(
            "not_within_an_epoch",
            "pretrain.batch_warmup.over_tokens",
            f"expected no more than the {epoch * length:,} tokens of an epoch, not {config.batch_warmup.over_tokens:,}",
            "shorten it, or provide more text",
        )
    first = config.batch_warmup.first_tokens // length
    if first % ranks.data_ranks():
        raise stage_error(
            "not_divisible",
            "pretrain.batch_warmup.first_tokens",
            f"expected {ranks.data_ranks()} ranks to share the {first} sequences of the first batch",
            f"make it a multiple of {length * ranks.data_ranks():,} tokens, or start fewer processes",
        )
    return BatchSizeRampup(first, batch_size, over, epoch)
