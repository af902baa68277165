"""Keys and values that a Llama or Qwen3 has read, one slot per sequence, with the layers of
`evaluation/generation/llama_layers.py`.

For the last layer, only keys and values are computed for the whole prompt: its output is needed only after the last
token.

Shapes: S slots of W places, N sequences, T tokens, H heads, K heads of keys, E width of a head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from evaluation.generation.llama_layers import Layer, LlamaLayers
from evaluation.generation.slots import resized, unseen


class LlamaSlots:
    """`evaluation.generation.slots.Slots` of a plain model."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        return LlamaLayers.fit(model)

    def __init__(self, model: LlamaForCausalLM | Qwen3ForCausalLM, slots: int, width: int) -> None:
        self._of, self._width = LlamaLayers(model), width
        net = self._of
        self._queries = net.heads * net.width
        self._turned = self._queries + net.kv_heads * net.width
        self._turns = net.turns(torch.arange(width))
        # Zeros: a masked place must not hold NaN.
        self._kept = [torch.zeros(slots * width, 2 * net.kv_heads * net.width) for _ in net.layers]
        """Keys and values (S · W, 2 · K · E) of each layer."""

    def read(self, ids: Tensor, lengths: Tensor, rows: Tensor, sources: Tensor) -> Tensor:
        net = self._of
        count, length = ids.shape
        stream, turns = net.embedded(ids.flatten()), self._turns[:length].repeat(count, 1, 1)
        positions = (rows[:, None] * self._width + torch.arange(length)).flatten()
        for layer, kept in zip(net.layers[:-1], self._kept, strict=False):
            qkv = layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, : self._turned], turns, layer.norms)
            self._store(kept, qkv[:, self._queries :], positions, count, sources)
            q, k, v = self._in_heads(qkv, count).split([net.heads, net.kv_heads, net.kv_heads], 1)
            attended = net.attend(q, k, v, None).transpose(1, 2).flatten(0, 1).flatten(1)
            stream = net.after_mlp(layer.o.plus(attended, stream), layer)
        layer, normed = net.layers[-1], net.normed(stream)
        last = torch.arange(count) * length + lengths - 1
        q_norms, k_norms = (None, None) if layer.norms is None else layer.norms.tensor_split([net.heads])
        kv, q = net.last_kv.of(normed), net.last_q.of(normed[last])
        net.turn(kv[:, : net.kv_heads * net.width], turns, k_norms)
        net.turn(q, turns[last], q_norms)
        self._store(self._kept[-1], kv, positions, count, sources)
        k, v = self._in_heads(kv, count).chunk(2, 1)
        unread = unseen(lengths - 1, length, torch.float32)
        return net.logits(self._after_layer(stream[last], q, k, v, unread, layer))

    def step(self, tokens: Tensor, places: Tensor, reach: int) -> Tensor:
        net, count = self._of, len(tokens)
        stream, turns, mask = net.embedded(tokens), self._turns[places], unseen(places, reach, torch.float32)
        positions = torch.arange(count) * self._width + places
        for layer, kept in zip(net.layers, self._kept, strict=True):
            qkv = layer.qkv.of(net.normed(stream))
            net.turn(qkv[:, : self._turned], turns, layer.norms)
            kept.index_copy_(0, positions, qkv[:, self._queries :])
            cached = kept.view(-1, self._width, 2, net.kv_heads, net.width)[:count, :reach]
            k, v = cached.permute(2, 0, 3, 1, 4)
            stream = self._after_layer(stream, qkv[:, : self._queries], k, v, mask, layer)
        return net.logits(stream)

    def move(self, source: int, target: int, length: int) -> None:
        source_start, target_start = source * self._width, target * self._width
        for kept in self._kept:
            kept[target_start : target_start + length] = kept[source_start : source_start + length]

    def resize(self, slots: int, width: int) -> None:
        self._turns = self._of.turns(torch.arange(width))
        self._kept = [
            resized(kept.view(-1, self._width, kept.shape[1]), slots, width).flatten(0, 1) for kept in self._kept
        ]
        self._width = width

    def _store(self, kept: Tensor, kv: Tensor, positions: Tensor, count: int, sources: Tensor) -> None:
        kept.index_copy_(0, positions, kv.view(count, -1, kv.shape[1])[sources].flatten(0, 1))

    def _in_heads(self, states: Tensor, count: int) -> Tensor:
        """Return (N, heads, T, E) for (N · T, heads · E)."""
        return states.view(count, -1, states.shape[1] // self._of.width, self._of.width).transpose(1, 2)

    def _after_layer(self, stream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: Layer) -> Tensor:
        """Return the stream after attention and MLP, for one query per sequence (N, H · E) that sees keys and values
        (N, K, T, E) through mask (N, T).

        Heads that share keys are laid out as queries of one head.
        """
        queries = q.view(len(q), self._of.kv_heads, -1, self._of.width)
        added = mask[:, None, None].expand(-1, -1, queries.shape[2], -1)
        attended = scaled_dot_product_attention(queries, k, v, attn_mask=added, scale=self._of.scale)
        return self._of.after_mlp(layer.o.plus(attended.flatten(1), stream), layer)
