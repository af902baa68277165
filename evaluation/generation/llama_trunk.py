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
        net = self._of
        turns = net.turns(batch.depths)
        ids, inverse = batch.tokens.unique(return_inverse=True)
        embedded = net.embedded(ids)
        stream = embedded[inverse]  # (N, D), to which each layer adds
        query_width = net.heads * net.width
        turned = query_width + net.kv_heads * net.width
        row, column = batch.first // batch.places.shape[1], batch.first % batch.places.shape[1]
        for number, layer in enumerate(net.layers[:-1]):
            qkv = layer.qkv.of(net.normed(embedded))[inverse] if number == 0 else layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, :turned], turns, layer.norms)
            q, k, v = self._in_rows(qkv, batch).split([net.heads, net.kv_heads, net.kv_heads], 1)
            attended = net.attend(q, k, v, mask)
            stream = net.after_mlp(layer.o.plus(attended[row, :, column].flatten(1), stream), layer)
        return net.logits(self._last(stream, turns, mask, batch))

    def _last(self, stream: Tensor, turns: Tensor, mask: Tensor | None, batch: ChoiceBatch) -> Tensor:
        """Return (U, D): the output of the last layer."""
        net = self._of
        layer, normed, nodes = net.layers[-1], net.normed(stream), batch.asked
        rows, length = batch.places.shape
        kv = net.last_kv.of(normed)
        q_norms, k_norms = (None, None) if layer.norms is None else layer.norms.tensor_split([net.heads])
        net.turn(kv[:, : net.kv_heads * net.width], turns, k_norms)
        k, v = self._in_rows(kv, batch).chunk(2, 1)
        queries = net.last_q.of(normed[nodes])
        net.turn(queries, turns[nodes], q_norms)
        # Queries of a row next to each other: (B, largest number per row, H, E), and their places in the row.
        row = batch.first[nodes] // length
        counts = torch.bincount(row, minlength=rows)
        slot = torch.arange(len(nodes)) - (counts.cumsum(0) - counts)[row]
        q = queries.new_zeros(rows, int(counts.max()), net.heads, net.width)
        q[row, slot] = queries.view(len(nodes), net.heads, net.width)
        columns = torch.zeros(q.shape[:2], dtype=torch.long)
        columns[row, slot] = batch.first[nodes] % length
        if mask is None:
            later = torch.arange(length) > columns[:, :, None]
            causal_mask = torch.zeros(later.shape).masked_fill_(later, -torch.inf)[:, None]
        else:
            causal_mask = mask[torch.arange(rows)[:, None], 0, columns][:, None]
        attended = net.attend(q.transpose(1, 2), k, v, causal_mask).transpose(1, 2)[row, slot].flatten(1)
        return net.after_mlp(layer.o.plus(attended, stream[nodes]), layer)

    def _in_rows(self, states: Tensor, batch: ChoiceBatch) -> Tensor:
        """Return (B, heads, T, E) for (N, heads · E)."""
        return states[batch.places].unflatten(2, (-1, self._of.width)).transpose(1, 2)
