"""Pipeline parallelism: ranks that each hold some of a model's layers, for decoders whose parts have Llama's names.

A batch is cut into microbatches, which pass the stages one behind the other by the schedules of
torch.distributed.pipelining: 1F1B, or interleaved 1F1B where a rank holds several pieces of the model (Narayanan et al.
2021, section 2.2). The first stage has the embedding too, the last one the last norm, the output layer and the loss.
Adjacent ranks form a pipeline and get the same examples. Weights keep the names that they have in the whole model. With
tensor or context parallelism groups of ranks that share layers or sequences form a pipeline: each rank sends to its
counterpart in the next group.

Shapes: B sequences of a pipeline's batch, b of a microbatch, T tokens that a rank has of each, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)
from torch.distributed.pipelining.stage import _RecvInfo
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from training.config.parallelism import layers_of
from training.core import ranks
from training.core.train_state import Batch, count_examples
from training.distributed.expert_parallel import SharedExperts
from training.distributed.gradients import Replicas, clip_by, local, own_group
from training.distributed.other_ranks import OtherRanks
from training.distributed.tensor_parallel import padded, split, sum_gradients
from training.model.loss import IGNORE

Compute = Callable[[PreTrainedModel, Mapping[str, Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""(layers, microbatch, outputs of the previous layers, empty for the first) → outputs: hidden states (b, T, D), and the
sums that a model accumulates from layer to layer, in fp32."""
LossOf = Callable[[Any, Tensor], Tensor]
"""(outputs of the last layers, labels (b, T)) → contribution of a microbatch to the loss of this pipeline's batch."""

# Microbatches per rank of a batch in evaluation, if it has enough sequences.
_MEASURED = 4


@dataclass(frozen=True)
class Beside:
    """Outputs of a model in addition to hidden states for each microbatch, in fp32: their shapes between stages, their
    shapes after the last stage, and the function that builds the model's outputs from the latter. The first dimension
    has size 1."""

    between: tuple[tuple[int, ...], ...] = ()
    last: tuple[tuple[int, ...], ...] = ()
    outputs: Callable[..., Any] = tuple

    def named(self, given: Any) -> Any:
        """Build the model's outputs from those of the last layers."""
        return self.outputs(*given) if isinstance(given, tuple) else given


class _Stage(nn.Module):
    """Consecutive layers, in the form that torch's pipelining expects. `started` is called before each forward pass."""

    def __init__(self, layers: PreTrainedModel, compute: Compute, gives: torch.dtype) -> None:
        super().__init__()
        self._layers, self._compute, self.gives = layers, compute, gives
        self.started: Callable[[], None] = lambda: None

    def forward(self, *passed: Tensor, **microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.started()
        hidden, *extra = self._compute(self._layers, microbatch, passed)
        return (hidden.to(self.gives), *extra) if extra else hidden.to(self.gives)


class _UnderWay(PipelineStage):
    """Keep inputs and outputs only while a microbatch is in flight: in torch 2.7 torch's own stage keeps them for all
    microbatches of a batch, and 1F1B would save no memory."""

    def _prepare_forward_infra(self, *given: Any, **named: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*given, **named)

    def _prepare_backward_infra(self, *given: Any, **named: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*given, **named)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _allocate(self, received: Sequence[Any], device: torch.device) -> None:
        """Allocate buffers for tensors from other ranks on a device, or release them."""
        for item in received:
            if hasattr(item, "buffer"):
                item.buffer = torch.empty_like(item.buffer, device=device).requires_grad_(item.buffer.requires_grad)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *given: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *given, **named)
        if loss is not None:
            loss.detach_()  # the schedule holds it to the end, and with its graph what was received and its gradient
        nowhere = torch.device("meta")
        self._allocate(self.args_recv_info[bwd_chunk_id], nowhere)
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()), nowhere)
        if self.is_last:  # other stages keep no outputs
            self.output_chunks[bwd_chunk_id] = _detached(self.output_chunks[bwd_chunk_id])


class Pipeline:
    """This rank's stages of a model, and what passes between them and those of other ranks.

    Every rank of a pipeline must call each method, with the same batch.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        pieces: int,
        device: torch.device,
        computes_in: torch.dtype,
        compute: Compute,
        extra_outputs: Beside | None = None,
        experts: SharedExperts | None = None,
    ) -> None:
        """Split a model, whole on each rank, in place, and put this rank's part on `device`; all must call.

        Args:
            pieces: of the model on each rank.
            computes_in: the type of the last hidden states.
            compute: runs some layers.
            extra_outputs: its outputs in addition to hidden states.
            experts: where ranks of a stage share those of the model.
        """
        self._count, self._pieces, self._device = ranks.pipeline_parallel(), pieces, device
        self._tensor, self._context = ranks.tensor_parallel(), ranks.context_parallel()
        self._extra_outputs, self._experts = extra_outputs or Beside(), experts
        mesh = ranks.mesh(device.type)
        self._pipe = mesh["pipe"].get_group()
        self._members = distributed.get_process_group_ranks(self._pipe)
        self._replicas = Replicas(mesh)
        self._width = int(network.config.hidden_size)
        self._total = self._count * pieces
        position = self._members.index(ranks.rank())
        stack, head = network.base_model, network.get_output_embeddings()
        tied = head.weight is stack.embed_tokens.weight
        ends = position in (0, self._count - 1)
        self._stages: dict[int, _Stage] = {}
        runs = []
        for stage in range(position, self._total, self._count):
            run, last = layers_of(stage, self._total, len(stack.layers)), stage == self._total - 1
            # Under autocast the residual stream has the embeddings' type, fp32, as in one process.
            gives = computes_in if last else torch.float32
            self._stages[stage] = _Stage(_piece(stack, run, last=last), compute, gives)
            runs.append(run)
        stack.layers = _held(stack.layers, {number for run in runs for number in run})
        if position < self._count - 1:
            stack.norm = nn.Identity()
            network.set_output_embeddings(None)
        if position and not (tied and ends):
            stack.embed_tokens = None
        network.to(device)
        if self._tensor > 1:
            split(network, mesh["tensor"], runs=runs)
        if experts:
            experts.hold(network)
        self._weights = [weight for weight in network.parameters() if not (experts and experts.is_local(weight))]
        # With both ends the embedding, where it is the output layer too.
        self._shared = stack.embed_tokens.weight if tied and ends else None
        ends_of = mesh.mesh.movedim(1, -1).flatten(0, -2)[:, [0, -1]]
        self._ends = own_group(ends_of.tolist())[0] if tied else None
        self._counted = [weight for weight in self._weights if not (position and weight is self._shared)]
        self._begin_alike()
        self._loss_of: LossOf | None = None
        self._schedules: dict[bool, tuple[tuple[int, ...], Any]] = {}

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """Broadcast the first pipeline's weights to all pipelines, and shared weights to both ends."""
        self._replicas.begin_alike(self._weights)
        if self._shared is not None:
            distributed.broadcast(local(self._shared.data), self._members[0], group=self._ends)
        # NCCL needs all ranks in the first call of a group, which the calls of a schedule do not satisfy.
        distributed.all_reduce(torch.zeros(1, device=self._device), group=self._pipe)

    def train(self, batch: Batch, size: int, loss_of: LossOf, started: Callable[[], None]) -> tuple[Any, Batch]:
        """Accumulate the gradients of a batch over its microbatches, and average them over all pipelines. Return the
        outputs of the last layers, hidden states (B, T, D) and the additional outputs of each microbatch, None on
        ranks that do not compute them; and the batch of these outputs.

        Args:
            size: sequences of a microbatch; a batch that it does not divide is filled up with sequences that bear
                no loss.
            started: is called before each of this rank's forward passes.
        """
        batch, size, _ = self._filled(batch, size)
        for stage in self._stages.values():
            stage.started = started
        self._loss_of = loss_of
        outputs = self._step(batch, size, train=True)
        self._loss_of = None
        self._join_gradients()
        return self._extra_outputs.named(_detached(outputs)), batch

    @torch.no_grad()
    def measure(self, batch: Batch) -> Tensor | None:
        """The last hidden states (B, T, D), None on ranks that do not compute them."""
        rows = count_examples(batch)
        for stage in self._stages.values():
            stage.started = lambda: None
        batch, size, length = self._filled(batch, -(-rows // (_MEASURED * self._count)))
        outputs = self._step(batch, size, train=False)
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        return None if outputs is None else outputs[:rows, :length]

    def from_last(self, outputs: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast the last rank's result to all ranks of a pipeline: in fp32, with the shape of `like`."""
        full = torch.empty(like.shape, device=self._device) if outputs is None else outputs.float().contiguous()
        distributed.broadcast(full, self._members[-1], group=self._pipe)
        return full

    def clip(self, limit: float) -> float:
        """Scale all gradients so that their norm over all stages is at most `limit`; return the norm before."""
        total = torch.zeros((), device=self._device)
        for weight in self._counted:
            if weight.grad is not None:
                total += local(weight.grad).float().square().sum() / (1 if _is_cut_up(weight) else self._tensor)
        total /= self._replicas.size
        gradients = self._gradients()
        if self._experts:
            total += self._experts.squares()
            gradients += self._experts.gradients()
        return clip_by(total, gradients, limit)

    def _gradients(self) -> list[Tensor]:
        """Gradients of all weights except experts that ranks share."""
        return [weight.grad for weight in self._weights if weight.grad is not None]

    def _filled(self, batch: Batch, size: int) -> tuple[Batch, int, int]:
        """A batch in as many equal microbatches as the schedule wants, the sequences of one, at most `size`, and the
        tokens of a sequence before ranks that share layers had them filled up."""
        rows = count_examples(batch)
        batch, length = padded(batch, self._tensor)
        number = -(-rows // size)
        if rows % size or number < self._count or (self._pieces > 1 and number % self._count):
            size = min(size, -(-rows // self._count))
            number = -(-rows // (size * self._count)) * self._count
        more = number * size - rows
        if more:
            batch = {
                name: torch.cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])]) for name, tensor in batch.items()
            }
            batch["labels"][rows:] = IGNORE
        return batch, size, length

    def _step(self, batch: Batch, size: int, *, train: bool) -> Any:
        rows, length = batch["input_ids"].shape
        schedule = self._schedule(rows // size, size, length, train=train)
        target = {"target": batch["labels"]} if train else {}
        try:
            return schedule.step(**target, **batch)
        except RuntimeError as error:
            if memory := _want_of_memory(error):
                raise memory from None
            raise

    def _schedule(self, number: int, size: int, length: int, *, train: bool) -> Any:
        """The schedule of a batch of this shape. The last one stays, with its buffers."""
        key = (number, size, length)
        if train not in self._schedules or self._schedules[train][0] != key:
            self._schedules.pop(train, None)
            self._schedules[train] = key, self._new_schedule(number, size, length, train=train)
        return self._schedules[train][1]

    def _new_schedule(self, number: int, size: int, length: int, *, train: bool) -> Any:
        hidden = torch.empty(size, length // self._context, self._width, device="meta", requires_grad=train)

        def given(last: bool, gives: torch.dtype) -> tuple[Tensor, ...]:
            shapes = self._extra_outputs.last if last else self._extra_outputs.between
            like = [torch.empty(shape, device="meta", requires_grad=train) for shape in shapes]
            return torch.empty_like(hidden, dtype=gives, requires_grad=train), *like

        # Newer versions of torch have memory for what they receive only while it is needed.
        stage_class = PipelineStage if hasattr(_RecvInfo, "allocate_buffer") else _UnderWay
        stages = [
            stage_class(
                stage,
                position,
                self._total,
                self._device,
                given(False, hidden.dtype) if position else (),
                given(position == self._total - 1, stage.gives),
                group=self._pipe,
            )
            for position, stage in self._stages.items()
        ]
        loss = self._loss if train else None
        if self._pieces == 1:
            return (Schedule1F1B if train else ScheduleGPipe)(stages[0], number, loss, scale_grads=False)
        schedule = ScheduleInterleaved1F1B(stages, number, loss, scale_grads=False)  # type: ignore[arg-type]
        if not train:
            forward = schedules.FORWARD
            for actions in schedule.pipeline_order.values():
                actions[:] = [action if action and action.computation_type == forward else None for action in actions]
        return schedule

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(self._extra_outputs.named(outputs), labels)

    @torch.no_grad()
    def _join_gradients(self) -> None:
        """Average gradients over all pipelines, and sum the gradient of an embedding that is also the output layer over
        both ends."""
        if self._tensor > 1:
            sum_gradients(self._weights)
        self._replicas.average(self._gradients())
        if self._experts:
            self._experts.join_gradients()
        if self._shared is not None:
            assert self._shared.grad is not None
            distributed.all_reduce(local(self._shared.grad), group=self._ends)


def _piece(stack: PreTrainedModel, run: Collection[int], *, last: bool) -> PreTrainedModel:
    """Return the same model with only some of its layers, which are shared with the original."""
    piece = copy.copy(stack)
    parts = {**stack._modules, "layers": _held(stack.layers, run)}
    if not last:
        parts["norm"] = nn.Identity()
    piece.__dict__["_modules"] = parts
    return piece


def _held(layers: nn.ModuleList, run: Collection[int]) -> nn.ModuleList:
    return nn.ModuleList(layer if number in run else OtherRanks(layer) for number, layer in enumerate(layers))


def _detached(outputs: Any) -> Any:
    """Detach the outputs of the last layers, a tensor or several."""
    if isinstance(outputs, tuple):
        return tuple(output.detach() for output in outputs)
    return None if outputs is None else outputs.detach()


def _is_cut_up(weight: Tensor) -> bool:
    """Return True if ranks that share a layer have a part of a weight each."""
    return isinstance(weight, DTensor) and any(placement.is_shard() for placement in weight.placements)


def _want_of_memory(error: BaseException) -> BaseException | None:
    """The error that a device ran out of memory, where a schedule has wrapped one into its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__
    return cause


class _AllOf:
    """Wait for several sends and receives, then drop the references to their tensors: a schedule keeps some until its
    end."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


def _send_and_receive(operations: list[Any], desc: str | None = None) -> _AllOf | None:
    return _AllOf(distributed.batch_isend_irecv(operations)) if operations else None


if not hasattr(schedules, "_wait_batch_p2p"):
    # torch 2.7 waits for the last operation of a batch alone: enough for NCCL, which makes one of them, and too little
    # for gloo. Newer versions wait for all.
    schedules._batch_p2p = _send_and_receive  # type: ignore[assignment]
