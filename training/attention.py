"""Which attention a model computes with, and a causal one for CPUs that leaves out what no token sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from infra.errors import StageError, stage_error
from training.hardware import Hardware

CAUSAL_BLOCKS = "causal_blocks"
ADDED_MASKS = ("eager", CAUSAL_BLOCKS)
"""Kernels that add their mask to the scores."""
# Families of transformers whose attention is no more than softmax(QKᵀ × scale + mask) V.
_PLAIN = {"llama", "gpt2", "mistral", "qwen2", "qwen3"}
# A CPU's SDPA goes through all of (T, T), and its backward pass is slower than the plain products: measured up to here.
_EAGER_UP_TO, _BLOCKS_UP_TO = 512, 2048
_BLOCK = 256


def causal_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain attention whose queries, block by block, meet only the keys up to their own: at T tokens in n blocks it
    computes (n + 1) / 2n of the scores.

    query (B, H, Q, D), key and value (B, K, S, D) where K divides H and the queries are the last Q of the S positions;
    attention_mask, added to the scores (B, 1, Q, S), hides at least what comes later. Returns (B, Q, H, D).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        seen = before + end
        scores = torch.matmul(query[:, :, begin:end], key[:, :, :seen].transpose(2, 3)) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, begin:end, :seen]
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        found.append(torch.matmul(drop(weights, dropout, module.training), value[:, :, :seen]))
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(CAUSAL_BLOCKS, causal_blocks)
AttentionMaskInterface.register(CAUSAL_BLOCKS, eager_mask)


def choose_attention(model: PreTrainedModel, hardware: Hardware, longest: int, *, causal: bool = True) -> None:
    """The kernel that was asked for; else, on a CPU, plain attention for short sequences, in blocks for longer ones.

    longest: tokens of a sequence. causal: whether no token ever sees a later one.
    Raises StageError for a kernel that the model or the machine has not.
    """
    wanted = hardware.attention
    if wanted == "auto":
        if hardware.device.type != "cpu":
            return
        in_blocks = causal and model.config.model_type in _PLAIN and _BLOCK < longest <= _BLOCKS_UP_TO
        if not in_blocks and longest > _EAGER_UP_TO:
            return
        wanted = CAUSAL_BLOCKS if in_blocks else "eager"
    if wanted == CAUSAL_BLOCKS and not (causal and model.config.model_type in _PLAIN):
        raise _none_here(model, wanted, "it is for causal training of " + ", ".join(sorted(_PLAIN)))
    try:
        model.set_attn_implementation(wanted)
    except (ValueError, ImportError) as error:
        raise _none_here(model, wanted, str(error).splitlines()[0]) from error


def _none_here(model: PreTrainedModel, wanted: str, reason: str) -> StageError:
    return stage_error(
        "no_such_attention",
        "launch.attention",
        f"{model.config.model_type} has no {wanted} attention here: {reason}",
        "set launch.attention to auto",
    )
