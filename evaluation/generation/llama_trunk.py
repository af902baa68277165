"""A Llama or Qwen3 for scoring choices with fewer products, on layers of `evaluation/generation/llama_layers.py`.

- A beginning that several rows of a batch share is computed once (`evaluation/generation/choice_rows.py`), and rows are
  padded for attention only.
- The queries, keys and values of the first layer are computed once per distinct id of a batch: before positions are
  applied, equal ids have equal ones.
- For the last layer, only keys and values are computed everywhere; the rest is computed for the tokens whose logits are
  needed.

Shapes: N tokens to compute, B rows of T places that hold them, U of the N tokens whose logits are needed, D width, H
heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from evaluation.generation.choice_rows import ChoiceBatch
from evaluation.generation.llama_layers import LlamaLayers


class LlamaTrunk:
    """Logits at selected places."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        return LlamaLayers.fit(model)

    def __init__(self, model: LlamaForCausalLM | Qwen3ForCausalLM) -> None:
        self._of = LlamaLayers(model)

    def logits(self, batch: ChoiceBatch, mask: Tensor | None) -> Tensor:
        """Return (U, V) after the tokens in `batch.asked`. mask: (B, 1, T, T), added to scores; None for causal."""
        of = self._of
        turns = of.turns(batch.depths)
        ids, which = batch.tokens.unique(return_inverse=True)
        embedded = of.embedded(ids)
        stream = embedded[which]  # (N, D), to which each layer adds
        query_width = of.heads * of.width
        turned = query_width + of.kv_heads * of.width
        row, place = batch.first // batch.places.shape[1], batch.first % batch.places.shape[1]
        for number, layer in enumerate(of.layers[:-1]):
            qkv = layer.qkv.of(of.normed(embedded))[which] if number == 0 else layer.qkv.of(of.normed(stream))
            of.turn(qkv[:, :turned], turns, layer.norms)
            q, k, v = self._in_rows(qkv, batch).split([of.heads, of.kv_heads, of.kv_heads], 1)
            seen = of.attend(q, k, v, mask)
            stream = of.after_mlp(layer.o.plus(seen[row, :, place].flatten(1), stream), layer)
        return of.logits(self._last(stream, turns, mask, batch))

    def _last(self, stream: Tensor, turns: Tensor, mask: Tensor | None, batch: ChoiceBatch) -> Tensor:
        """Return (U, D): the output of the last layer."""
        of = self._of
        layer, normed, wanted = of.layers[-1], of.normed(stream), batch.asked
        rows, length = batch.places.shape
        kv = of.last_kv.of(normed)
        q_norms, k_norms = (None, None) if layer.norms is None else layer.norms.tensor_split([of.heads])
        of.turn(kv[:, : of.kv_heads * of.width], turns, k_norms)
        k, v = self._in_rows(kv, batch).chunk(2, 1)
        asked = of.last_q.of(normed[wanted])
        of.turn(asked, turns[wanted], q_norms)
        # Queries of a row next to each other: (B, largest number per row, H, E), and their places in the row.
        row = batch.first[wanted] // length
        counts = torch.bincount(row, minlength=rows)
        slot = torch.arange(len(wanted)) - (counts.cumsum(0) - counts)[row]
        q = asked.new_zeros(rows, int(counts.max()), of.heads, of.width)
        q[row, slot] = asked.view(len(wanted), of.heads, of.width)
        place = torch.zeros(q.shape[:2], dtype=torch.long)
        place[row, slot] = batch.first[wanted] % length
        if mask is None:
            later = torch.arange(length) > place[:, :, None]
            own = torch.zeros(later.shape).masked_fill_(later, -torch.inf)[:, None]
        else:
            own = mask[torch.arange(rows)[:, None], 0, place][:, None]
        seen = of.attend(q.transpose(1, 2), k, v, own).transpose(1, 2)[row, slot].flatten(1)
        return of.after_mlp(layer.o.plus(seen, stream[wanted]), layer)

    def _in_rows(self, states: Tensor, batch: ChoiceBatch) -> Tensor:
        """Return (B, heads, T, E) for (N, heads · E)."""
        return states[batch.places].unflatten(2, (-1, self._of.width)).transpose(1, 2)
