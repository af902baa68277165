"""A plain training loop on torch alone, for versions of torch that Composer refuses and for features that it lacks.

Its results equal Composer's bit for bit: the order of random draws, the weights of microbatches and the sums are the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from evaluation.generation.random_state import seed_all
from training.core import ranks
from training.core.callbacks import Event
from training.core.parallel_parts import PipelineParts
from training.core.train_state import Batch, TrainState, count_examples, split_batch
from training.distributed.parallel import settle_buckets
from training.distributed.tensor_parallel import sum_gradients
from training.model.loss import IGNORE


class Native:
    """See training.backends.Backend."""

    def __init__(self, state: TrainState, *, batches: int, microbatch: int) -> None:
        self._state = state
        self._batches = batches
        self._microbatch = microbatch
        seed_all(state.seed)
        self._model: nn.Module = state.model
        averaged = isinstance(state.model, FSDPModule) or state.model.pipeline or ranks.tensor_parallel() > 1
        if ranks.gradient_ranks() > 1 and not averaged:
            if experts := state.model.experts:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                    state.model, experts.names(state.model)
                )
            self._model = DistributedDataParallel(state.model)
            settle_buckets(self._model)

    def train(self) -> None:
        state = self._state
        self._call(Event.FIT_START)
        self._model.train()
        while state.clock.batch < self._batches:
            before = state.clock
            for batch in self._epoch():
                self._step(batch)
                if state.clock.batch == self._batches:
                    break
            else:
                if before == state.clock and not before.batch_in_epoch:
                    raise RuntimeError("expected at least one batch in an epoch, the loader gave none")
                state.clock = state.clock.after_epoch()
        self._call(Event.FIT_END)
        state.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Do nothing: the loop holds no resources."""

    def _call(self, event: Event) -> None:
        self._state.callbacks.run_event(event, self._state)

    def _epoch(self) -> Iterator[Batch]:
        """Yield the rest of an epoch, until one rank has no further batch: the ranks' parts may differ in length."""
        batches = iter(self._state.loader.dataloader)
        while True:
            self._call(Event.BEFORE_DATALOADER)
            batch: Any = next(batches, None)
            if ranks.any_rank(batch is None):
                return
            yield batch

    def _step(self, batch: Batch) -> None:
        """One step of the optimizer. What callbacks do at an event is listed in `training.trainer.fit`, in their
        order."""
        state = self._state

        # Count before callbacks replace the batch: examples that they leave out count as seen.
        state.batch = batch
        counts = torch.tensor([count_examples(batch), state.loader.count_tokens(batch).total])
        self._call(Event.AFTER_DATALOADER)

        # Schedule: the learning rate of this batch. Guard: of a batch that it skips, only one example is left.
        self._call(Event.BATCH_START)

        # Forward and backward: the gradients of all microbatches, summed over the ranks.
        state.optimizer.zero_grad(set_to_none=True)
        losses = self._through(state.model.pipeline) if state.model.pipeline else self._accumulate()

        # Gradients: divide by the loss scale, remove those of idle experts, clip; of a skipped batch, drop all.
        self._call(Event.AFTER_TRAIN_BATCH)

        # Optimizer: the update. Weights without a gradient stay unchanged.
        state.optimizer.step()

        # Losses and counts of all ranks. Ranks that share layers or sequences have counted the same examples.
        for loss in losses.values():
            ranks.all_reduce(loss)
        state.losses = {name: loss.item() / ranks.world_size() for name, loss in losses.items()}
        totals = ranks.all_reduce(counts.to(state.device)) // ranks.group_size()
        samples, state.batch_tokens = map(int, totals.tolist())
        state.clock = state.clock.after_batch(samples, state.batch_tokens)

        # Metrics, evaluation, and the guard, which raises an alarm here; then checkpoints.
        self._call(Event.BATCH_END)
        self._call(Event.BATCH_CHECKPOINT)

    def _accumulate(self) -> dict[str, Tensor]:
        """Accumulate the gradients of all microbatches; return this rank's part of each loss (1,)."""
        state, full_batch = self._state, self._state.batch

        # Weight of each microbatch. DDP and FSDP average the ranks' gradients, so it is relative to the mean number of
        # labelled tokens per rank.
        microbatches = split_batch(full_batch, self._microbatch)
        labelled = [state.loader.count_tokens(microbatch).labelled for microbatch in microbatches]
        everyone = int(ranks.all_reduce(torch.tensor(sum(labelled), device=state.device)))
        losses: dict[str, Tensor] = {"total": torch.zeros(1, device=state.device)}
        for number, microbatch in enumerate(microbatches):
            weight = labelled[number] / (everyone / ranks.world_size()) if everyone else 0.0
            state.batch = {name: value.to(state.device, non_blocking=True) for name, value in microbatch.items()}
            # DDP reduces gradients over the ranks once, with the last microbatch.
            is_last = number == len(microbatches) - 1
            reducing = self._model if isinstance(self._model, DistributedDataParallel) and not is_last else None
            with reducing.no_sync() if reducing else nullcontext():
                # Forward.
                self._call(Event.BEFORE_FORWARD)
                state.outputs = self._model(state.batch)
                self._call(Event.AFTER_FORWARD)
                state.loss = state.model.loss(state.outputs, state.batch)
                # Backward.
                self._call(Event.BEFORE_BACKWARD)
                parts = state.loss if isinstance(state.loss, dict) else {"total": state.loss}
                (parts["total"] * weight).backward()
                for name, loss in parts.items():
                    losses[name] = losses.get(name, 0.0) + loss.detach().mean() * weight

        # Gradients that neither DDP nor FSDP reduces: of layers that ranks share, and of experts.
        if ranks.tensor_parallel() > 1:
            sum_gradients(state.model.parameters())
        if state.model.experts:
            state.model.experts.join_gradients()
        state.batch, state.outputs, state.loss = full_batch, None, None
        return losses

    def _through(self, pipeline: PipelineParts) -> dict[str, Tensor]:
        """Do the same as `_accumulate` by a pipeline, whose last rank has all of its losses."""
        state, full_batch = self._state, self._state.batch
        labelled = state.loader.count_tokens(full_batch).labelled
        everyone = int(ranks.all_reduce(torch.tensor(labelled, device=state.device)))
        total = torch.zeros(1, device=state.device)

        def loss_of(outputs: Any, labels: Tensor) -> Tensor:
            state.loss = state.model.loss(outputs, {"labels": labels})
            assert isinstance(state.loss, Tensor)
            self._call(Event.BEFORE_BACKWARD)
            share = (labels != IGNORE).sum() / (everyone / ranks.world_size()) if everyone else 0.0
            total.add_(state.loss.detach() * share)
            return state.loss * share

        batch = {name: value.to(state.device, non_blocking=True) for name, value in full_batch.items()}
        state.outputs, state.batch = pipeline.train(
            batch, self._microbatch, loss_of, lambda: self._call(Event.BEFORE_FORWARD)
        )
        self._call(Event.AFTER_FORWARD)
        state.batch, state.outputs, state.loss = full_batch, None, None
        return {"total": total * ranks.pipeline_parallel()}
