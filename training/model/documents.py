"""Documents in packed sequences: their boundaries, and attention within them.

A document begins with the token before its text. That is the beginning-of-text token for tokenizers that put one in
front of every text, else the `<|endoftext|>` that ended the previous document. It takes the same role when the model is
scored or prompted without context. It attends to nothing before it.

Shapes: B sequences, T tokens, D documents of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

Tokens = NDArray[np.int64]
Starts = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Packed sequences: tokens (B, T), and for each sequence the positions at which a document's text begins (D,).

    sources: the source of each of these documents (D,); empty if not requested.
    draws: epoch and number of each sequence, which seed its random draws; empty if nothing is drawn.
    """

    tokens: Tokens
    starts: tuple[Starts, ...]
    sources: tuple[Starts, ...] = ()
    draws: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Packed:
        return self._rows(slice(count))

    def batches(self, size: int) -> Iterator[Packed]:
        for begin in range(0, len(self), size):
            yield self._rows(slice(begin, begin + size))

    def _rows(self, rows: slice) -> Packed:
        return Packed(self.tokens[rows], self.starts[rows], self.sources[rows], self.draws[rows])

    def token_sources(self) -> NDArray[np.int64]:
        """The source of every token (B, T)."""
        token_sources = np.zeros(self.tokens.shape, np.int64)
        for row, starts, sources in zip(token_sources, self.starts, self.sources, strict=True):
            row[:] = np.repeat(sources, np.diff([*starts, len(row)]))
        return token_sources


def document_numbers(starts: Sequence[Starts], length: int) -> Tensor:
    """The number of the document that each token belongs to, from 0 in each sequence: (B, T), int32."""
    begins = np.zeros((len(starts), length), np.int32)
    for row, positions in zip(begins, starts, strict=True):
        row[positions[positions > 1] - 1] = 1
    return torch.from_numpy(begins.cumsum(1, dtype=np.int32))


def positions_within(documents: Tensor) -> Tensor:
    """Return the position of each token in its document (B, T), counted from 0.

    Args:
        documents: number of each token's document (B, T); neighbours of one document have the same number.
    """
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - torch.where(begins, positions, 0).cummax(1).values


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """Mask (B, 1, Q, K) of queries (B, Q) and keys (B, K) of the same document, from their document numbers."""
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def within_documents(
    documents: Tensor, seen_by_all: Tensor | None = None, window: int | None = None, rows: Tensor | None = None
) -> Tensor:
    """Return an attention mask (B, 1, T, T), true for each token itself and the earlier ones of its document.

    Args:
        documents: number of each token's document (B, T).
        seen_by_all: tokens (B, T) that earlier tokens of their document see too.
        window: maximum number of tokens that each token sees, itself included.
        rows: positions (R,) of the requested queries, if not all: the mask is then (B, 1, R, T).
    """
    positions = torch.arange(documents.shape[1], device=documents.device)
    queries = (positions if rows is None else rows)[:, None]
    visible = queries >= positions
    if seen_by_all is not None:
        visible = visible | seen_by_all[:, None, :]
    if window is not None:
        visible = visible & (queries - positions < window)
    query_documents = documents if rows is None else documents[:, rows]
    return same_document(query_documents, documents) & visible.view(-1, 1, *visible.shape[-2:])


def block_mask(documents: Tensor, seen_by_all: Tensor | None = None, window: int | None = None) -> BlockMask:
    """Return the mask of `within_documents` for torch's flex attention, which skips fully masked blocks.

    Args:
        documents: number of each token's document (B, T).
        seen_by_all: tokens (B, T) that earlier tokens of their document see too.
        window: maximum number of tokens that each token sees, itself included.
    """
    length = documents.shape[1]

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if seen_by_all is not None:
            seen = seen | seen_by_all[row, key]
        if window is not None:
            seen = seen & (query - key < window)
        return seen & (documents[row, query] == documents[row, key])

    # Compiled, this never materializes a mask (B, T, T).
    on_gpu = documents.device.type == "cuda"
    mask = create_block_mask(visible, len(documents), None, length, length, str(documents.device), _compile=on_gpu)
    # GPT-2 in transformers asks any mask for its dimensions.
    mask.ndim = 4  # type: ignore[attr-defined]
    return mask


def document_bounds(documents: Tensor) -> Tensor:
    """Return the start of each document in the concatenated rows, and the end of the last one: (documents + 1,), int32.

    This is the format of `cu_seqlens` of variable-length flash attention.

    Args:
        documents: number of each token's document (B, T).
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([documents.numel()])]).int()


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to the term that plain attention adds to scores: 0 where true, else the dtype's minimum.

    Args:
        mask: boolean, of any shape, which the result has too.
        dtype: floating-point type of the scores.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class EncoderDecoderMasks:
    """Give the encoder's attention, the decoder's and that from decoder to encoder the masks of the current batch.

    Each goes to its layers by a hook, so that the model, its export and its recomputation stay those of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._masks: dict[str, Tensor] = {}
        for block in model.encoder.block:
            self._hook(block.layer[0], "encoder")
        for block in model.decoder.block:
            self._hook(block.layer[0], "decoder")
            self._hook(block.layer[1], "across")

    def set(self, batch: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Compute the masks from `documents (B, T)` and `decoder_documents (B, S)`; none if the batch has neither."""
        self._masks = {}
        if "documents" in batch:
            read, written = batch["documents"], batch["decoder_documents"]
            masks = {
                "encoder": same_document(read, read),
                "decoder": within_documents(written),
                "across": same_document(written, read),
            }
            self._masks = {name: additive(mask, dtype) for name, mask in masks.items()}

    def _hook(self, layer: nn.Module, name: str) -> None:
        layer.register_forward_pre_hook(partial(self._give, name), with_kwargs=True)

    def _give(
        self, name: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return (given, {**named, "attention_mask": self._masks[name]}) if name in self._masks else None
