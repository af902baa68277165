"""Context parallelism: ranks that share every sequence along its tokens, for decoders of transformers.

A sequence is split into 2N chunks for N ranks, and each rank has the r-th from the beginning and the r-th from the end,
so that all have equally many keys under a causal mask (Grattafiori et al. 2024, section 3.3.2). Embeddings, norms, MLP
and loss run on a rank's own tokens. Attention gathers the keys and values of all ranks; their gradients are summed and
scattered back. All ranks of a group get the same examples. With tensor parallelism, groups of ranks that share layers
share sequences: keys and values are then those of a rank's heads.

Shapes: B sequences, T tokens of a whole one, N ranks, H heads, K heads of keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from training.core import ranks
from training.model.attention import ADDED_MASKS, CAUSAL_BLOCKS, causal_blocks, is_plain

_KERNELS = {CAUSAL_BLOCKS: causal_blocks, "sdpa": sdpa_attention_forward}
"""Kernels for the attention of a rank's queries, with masks that are added to the scores."""


@dataclass(frozen=True)
class SharedSequences:
    """This rank's part of every sequence.

    mesh: the ranks that share them, in one dimension.
    """

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        """N."""
        return self.mesh.size()

    def places(self, length: int, device: torch.device) -> Tensor:
        """The positions (T / N,) of this rank's tokens in a sequence of `length`, a multiple of 2N."""
        return self.part(torch.arange(length, device=device)[None])[0]

    def part(self, full: Tensor) -> Tensor:
        """Select this rank's part (B, T / N) of a tensor (B, T) over all tokens."""
        rank = self.mesh.get_local_rank()
        chunks = full.chunk(2 * self.size, 1)
        return torch.cat([chunks[rank], chunks[-1 - rank]], 1)

    def parts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each tensor (B, T) of a batch, as `part`."""
        return {name: self.part(value) for name, value in batch.items()}

    def whole(self, part: Tensor) -> Tensor:
        """Gather (B, T) over all tokens from every rank's (B, T / N), without gradients; every rank must call."""
        return _in_order(_gather(part, self.mesh), 1)

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place and without gradients; every rank must call."""
        distributed.all_reduce(value, group=self.mesh.get_group())
        return value

    def attend(
        self,
        kernel: str,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention (B, T / N, H, D) of this rank's queries (B, H, T / N, D) over the keys and values of all ranks,
        here (B, K, T / N, D); attention_mask, added to the scores (B, 1, T / N, T), hides at least what comes later.

        Args:
            kernel: of _KERNELS; each chunk of queries is given the keys up to its end alone.
        """
        # Under autocast RoPE leaves keys in fp32, and the products would make them as the values are.
        stacked = torch.stack([key.to(value.dtype), value])
        keys, values = _in_order(_Gathered.apply(stacked, self.mesh), 3)
        length, own_rank = keys.shape[2], self.mesh.get_local_rank()
        chunk = length // (2 * self.size)
        outputs = []
        chunks = zip(query.chunk(2, 2), attention_mask.chunk(2, 2), strict=True)
        for (queries, mask), end in zip(chunks, (chunk * (own_rank + 1), length - chunk * own_rank), strict=True):
            seen = keys[:, :, :end], values[:, :, :end]
            outputs.append(_KERNELS[kernel](module, queries, *seen, mask[..., :end], **options)[0])
        return torch.cat(outputs, 1), None


def share(network: PreTrainedModel, device: torch.device) -> SharedSequences:
    """Share the sequences of a model among `ranks.context_parallel()` groups of `ranks.tensor_parallel()` ranks. The
    model's attention is replaced in place: it now takes a rank's tokens with their positions, and their rows of the
    mask. Every rank must call.

    If one process would compute plain attention, as on a CPU, ranks do too; else they use SDPA.
    """
    shared = SharedSequences(ranks.mesh(device.type)["context"])
    plain = is_plain(network) and network.config._attn_implementation in ADDED_MASKS
    kernel = CAUSAL_BLOCKS if plain else "sdpa"
    name = f"gathered_{kernel}"
    AttentionInterface.register(name, partial(shared.attend, kernel))
    AttentionMaskInterface.register(name, eager_mask)
    network.set_attn_implementation(name)
    return shared


def _gather(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return (N, …) of every rank's (…), in order of the ranks."""
    gathered = part.new_empty(mesh.size() * len(part), *part.shape[1:])
    distributed.all_gather_into_tensor(gathered, part.contiguous(), group=mesh.get_group())
    return gathered.unflatten(0, (mesh.size(), len(part)))


def _in_order(gathered: Tensor, dim: int) -> Tensor:
    """Tokens as they follow each other in dimension `dim` (T), from every rank's two chunks (N, …, T / N, …)."""
    first, last = gathered.chunk(2, dim + 1)
    return torch.cat([*first, *last.flip(0)], dim)


class _Gathered(torch.autograd.Function):
    """`_gather`, whose gradient is the sum of all ranks' for this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _gather(part, mesh)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (grad,) = upstream
        part = torch.empty_like(grad[0])
        distributed.reduce_scatter_tensor(part, grad.flatten(0, 1).contiguous(), group=ctx.mesh.get_group())
        return part, None
