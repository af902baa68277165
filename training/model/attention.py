"""Choose the attention kernel of a model; includes a causal one for CPUs that skips masked blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import eager_mask, flex_attention_mask
from transformers.utils import is_flash_attn_2_available

from infra.errors import StageError, stage_error
from training.config.families import FAMILIES, Family
from training.core.hardware import Hardware

CAUSAL_BLOCKS = "causal_blocks"
FLEX = "flex_documents"
"""Transformers' flex attention under our own name: it works for GPT-2 too, which transformers does not declare."""
ADDED_MASKS = ("eager", CAUSAL_BLOCKS)
"""Kernels that add their mask to the scores."""
# Families of transformers whose attention is no more than softmax(QKᵀ × scale + mask) V.
_PLAIN = {"llama", "gpt2", "mistral", "qwen2", "qwen3"}
# SDPA on a CPU computes all of (T, T), and its backward pass is slower than plain products up to these lengths.
_EAGER_UP_TO, _BLOCKS_UP_TO = 512, 2048
_BLOCK = 256
# Triton's matrix products do not support narrower heads.
_FLEX_LEAST_WIDTH = 16


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
    """Compute plain attention in blocks of queries, each against only the keys up to its end: for T tokens in n blocks
    this is (n + 1) / 2n of the scores.

    query (B, H, Q, D), key and value (B, K, S, D) where K divides H and the queries are the last Q of the S positions;
    attention_mask, added to the scores (B, 1, Q, S), hides at least what comes later. Returns (B, Q, H, D).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        seen = before + end
        scores = torch.matmul(query[:, :, begin:end], key[:, :, :seen].transpose(2, 3)) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, begin:end, :seen]
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        outputs.append(torch.matmul(drop(weights, dropout, module.training), value[:, :, :seen]))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(CAUSAL_BLOCKS, causal_blocks)
AttentionMaskInterface.register(CAUSAL_BLOCKS, eager_mask)


AttentionInterface.register(FLEX, flex_attention_forward)
AttentionMaskInterface.register(FLEX, flex_attention_mask)


def is_plain(model: PreTrainedModel) -> bool:
    """Return True if `causal_blocks` computes the same as a model's own attention."""
    return model.config.model_type in _PLAIN


def is_flash(implementation: str) -> bool:
    """Return True if a kernel takes the bounds of documents instead of a mask."""
    return implementation.startswith("flash_attention")


def choose_attention(
    model: PreTrainedModel, hardware: Hardware, longest: int, *, causal: bool = True, documents: bool = False
) -> None:
    """Set the requested kernel; by default, on a CPU, plain attention for short sequences and blocks for longer ones,
    and on a GPU with packed documents a kernel that computes nothing between them.

    Args:
        longest: tokens of a sequence.
        causal: True if no token ever sees a later one.
        documents: True if attention stays within documents.

    Raises StageError for a kernel that the model or the machine does not support, or that would cross documents.
    """
    implementation, family = hardware.attention, FAMILIES.get(model.config.model_type)
    if implementation == "auto":
        default = _on_cpu(model, longest, causal) if hardware.device.type == "cpu" else None
        if hardware.device.type != "cpu" and documents and family:
            default = _for_documents(model, family, hardware, causal)
        if default is None:
            return
        implementation = default
    if implementation == CAUSAL_BLOCKS and not (causal and is_plain(model)):
        raise _none_here(model, implementation, "it is for causal training of " + ", ".join(sorted(_PLAIN)))
    if documents and is_flash(implementation) and not (causal and family and family.varlen):
        able = ", ".join(sorted(name for name, other in FAMILIES.items() if other.varlen))
        raise _none_here(
            model,
            implementation,
            f"it keeps documents apart in causal training of {able} only, elsewhere it would cross them",
        )
    if implementation == "flex_attention" and hardware.device.type == "cpu":
        raise _none_here(model, implementation, "torch can train with it only on a GPU")
    if implementation == "flex_attention" and family:
        implementation = FLEX
    if implementation == FLEX and (reason := _no_flex(model)):
        raise _none_here(model, "flex_attention", reason)
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise _none_here(model, implementation, str(error).splitlines()[0]) from error


@contextmanager
def answering(model: PreTrainedModel) -> Iterator[None]:
    """Replace a kernel for packed documents by SDPA within this context: generation runs token by token, and every
    length would be compiled again."""
    kernel = model.config._attn_implementation
    if kernel == FLEX or is_flash(kernel):
        model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = kernel


def _on_cpu(model: PreTrainedModel, longest: int, causal: bool) -> str | None:
    if causal and is_plain(model) and _BLOCK < longest <= _BLOCKS_UP_TO:
        return CAUSAL_BLOCKS
    return "eager" if longest <= _EAGER_UP_TO else None


def _for_documents(model: PreTrainedModel, family: Family, hardware: Hardware, causal: bool) -> str | None:
    """A GPU's kernel for packed documents: flash-attn where it is installed, else torch's flex attention."""
    half = hardware.compute != torch.float32
    if causal and half and family.varlen and is_flash_attn_2_available():
        return "flash_attention_2"
    return None if _no_flex(model) else FLEX


def _no_flex(model: PreTrainedModel) -> str:
    """Return the reason why flex attention does not support a model; empty if it does."""
    config = model.config
    if any(getattr(config, name, 0.0) for name in ("attn_pdrop", "attention_dropout")):
        return "it does not support attention dropout"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return "" if width >= _FLEX_LEAST_WIDTH else f"its heads are {width} wide, and flex attention needs 16 or more"


def _none_here(model: PreTrainedModel, implementation: str, reason: str) -> StageError:
    return stage_error(
        "no_such_attention",
        "launch.attention",
        f"{model.config.model_type} has no {implementation} attention here: {reason}",
        "set launch.attention to auto",
    )
