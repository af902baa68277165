"""A plain training loop on torch alone, for versions of torch that Composer refuses and for features that it lacks.

Its results equal Composer's bit for bit: the order of random draws, the weights of microbatches and the sums are the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from evaluation.generation.random_state import seed_all
from training.core import ranks
from training.core.callbacks import Event
from training.core.train_state import Batch, TrainState, count_examples, split_batch
from training.distributed.parallel import settle_buckets
from training.distributed.pipeline_parallel import Pipeline
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
        self._tell(Event.FIT_START)
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
        self._tell(Event.FIT_END)
        state.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Do nothing: the loop holds no resources."""

    def _tell(self, event: Event) -> None:
        self._state.callbacks.run_event(event, self._state)

    def _epoch(self) -> Iterator[Batch]:
        """Yield the rest of an epoch, until one rank has no further batch: the ranks' parts may differ in length."""
        batches = iter(self._state.loader.dataloader)
        while True:
            self._tell(Event.BEFORE_DATALOADER)
            batch: Any = next(batches, None)
            if ranks.any_rank(batch is None):
                return
            yield batch

    def _step(self, batch: Batch) -> None:
        """One step of the optimizer."""
        state = self._state
        state.batch = batch
        # Counted before callbacks replace the batch: examples that they leave out count as seen.
        counts = torch.tensor([count_examples(batch), state.loader.count_tokens(batch).total])
        self._tell(Event.AFTER_DATALOADER)
        self._tell(Event.BATCH_START)
        losses = self._gradients()
        self._tell(Event.AFTER_TRAIN_BATCH)
        state.optimizer.step()
        for loss in losses.values():
            ranks.all_reduce(loss)
        state.losses = {name: loss.item() / ranks.world_size() for name, loss in losses.items()}
        # Ranks that share layers or sequences have counted the same examples.
        totals = ranks.all_reduce(counts.to(state.device)) // ranks.group_size()
        samples, state.batch_tokens = map(int, totals.tolist())
        state.clock = state.clock.after_batch(samples, state.batch_tokens)
        self._tell(Event.BATCH_END)
        self._tell(Event.BATCH_CHECKPOINT)

    def _gradients(self) -> dict[str, Tensor]:
        """Accumulate the gradients of all microbatches; return this rank's part of each loss (1,).

        DDP and FSDP average the ranks' gradients, so the share of a microbatch is relative to the mean number of
        labelled tokens per rank.
        """
        state, whole = self._state, self._state.batch
        state.optimizer.zero_grad(set_to_none=True)
        if state.model.pipeline:
            return self._through(state.model.pipeline)
        parts = split_batch(whole, self._microbatch)
        labelled = [state.loader.count_tokens(part).labelled for part in parts]
        everyone = int(ranks.all_reduce(torch.tensor(sum(labelled), device=state.device)))
        losses: dict[str, Tensor] = {"total": torch.zeros(1, device=state.device)}
        for number, part in enumerate(parts):
            state.batch = {name: value.to(state.device, non_blocking=True) for name, value in part.items()}
            share = labelled[number] / (everyone / ranks.world_size()) if everyone else 0.0
            with self._summed(last=number == len(parts) - 1):
                for name, loss in self._backward(share).items():
                    losses[name] = losses.get(name, 0.0) + loss.detach().mean() * share
        if ranks.tensor_parallel() > 1:
            sum_gradients(state.model.parameters())
        if state.model.experts:
            state.model.experts.join_gradients()
        state.batch, state.outputs, state.loss = whole, None, None
        return losses

    def _through(self, pipeline: Pipeline) -> dict[str, Tensor]:
        """Do the same by a pipeline, whose last rank has all of its losses."""
        state, whole = self._state, self._state.batch
        labelled = state.loader.count_tokens(whole).labelled
        everyone = int(ranks.all_reduce(torch.tensor(labelled, device=state.device)))
        total = torch.zeros(1, device=state.device)

        def loss_of(outputs: Any, labels: Tensor) -> Tensor:
            state.loss = state.model.loss(outputs, {"labels": labels})
            assert isinstance(state.loss, Tensor)
            self._tell(Event.BEFORE_BACKWARD)
            share = (labels != IGNORE).sum() / (everyone / ranks.world_size()) if everyone else 0.0
            total.add_(state.loss.detach() * share)
            return state.loss * share

        batch = {name: value.to(state.device, non_blocking=True) for name, value in whole.items()}
        state.outputs, state.batch = pipeline.train(
            batch, self._microbatch, loss_of, lambda: self._tell(Event.BEFORE_FORWARD)
        )
        self._tell(Event.AFTER_FORWARD)
        state.batch, state.outputs, state.loss = whole, None, None
        return {"total": total * ranks.pipeline_parallel()}

    def _backward(self, share: float) -> dict[str, Tensor]:
        """Run the forward and backward pass of one microbatch; return its losses by name."""
        state = self._state
        self._tell(Event.BEFORE_FORWARD)
        state.outputs = self._model(state.batch)
        self._tell(Event.AFTER_FORWARD)
        state.loss = state.model.loss(state.outputs, state.batch)
        self._tell(Event.BEFORE_BACKWARD)
        losses = state.loss if isinstance(state.loss, dict) else {"total": state.loss}
        (losses["total"] * share).backward()
        return losses

    def _summed(self, *, last: bool) -> AbstractContextManager[Any]:
        """Make DDP reduce gradients over the ranks only once, with the last microbatch."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()
