"""Attention of a fresh model that starts with induction heads instead of having to learn them.

The slow first part of a training ends when two heads form (Olsson et al. 2022, "In-context Learning and Induction
Heads"): one that attends to the previous token, and one in a later block that attends to the token after an earlier
occurrence of the current token. Both can be constructed for a model whose embeddings have some unused entries.

Shapes: D width, H a head's width, U = 3/8 of H unused entries of the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.model.blocks import blocks

# Weights of the norms of queries and keys: by the first a head of the first block has 97 % of its attention on its
# token, by the second the induction head 98 % (H = 64, sequences of 256 tokens).
_FIRST_BLOCK, _SECOND_BLOCK = 2.0, 2.0**0.5
# Share of the rotations that distinguish positions, the fastest; and of those too slow to matter over a sequence.
_FAST, _SLOW = 1 / 4, 3 / 8
_SPREAD = 0.1


def unused_width(model: PreTrainedModel) -> int:
    """Entries of the embedding that `start_induction` wants unused."""
    return 2 * int(_SLOW * model.config.head_dim / 2)


def start_induction(model: PreTrainedModel, seed: int) -> None:
    """Set queries and keys of the first block, so that its heads look at the 1st, 2nd, 3rd… token back, and of the
    first head of the second block, so that it looks at what came after the present token before.

    The first head writes a random projection of the token that it attends to into the unused entries. The values and
    outputs of all other heads do not change: with residual projections of zero the logits stay the same, except for a
    few percent by which the last norm divides all of them.

    Args:
        model: of the family qwen3, with two blocks or more, and embeddings as training/model/initial/bigrams.py leaves
            them.
    """
    # Another seed than that of the embeddings: a projection that is drawn as they were favours the first of them.
    generator = torch.Generator().manual_seed(seed + 1)
    first, second = (block.get_submodule("self_attn") for block in blocks(model)[:2])
    width, head, unused = model.config.hidden_size, model.config.head_dim, unused_width(model)
    frequencies = model.get_submodule("model.rotary_emb").get_buffer("inv_freq").float().cpu()
    fast = (torch.arange(len(frequencies)) < _FAST * len(frequencies)).float()
    shared = width - unused - 1  # the entry that is the same for all tokens

    def matrix_for(back: int) -> Tensor:
        """A vector (H,) that meets its like when it is rotated `back` positions further."""
        return _SPREAD * torch.cat([fast * torch.cos(back * frequencies), -fast * torch.sin(back * frequencies)])

    with torch.no_grad():
        for weight in (_weight(first, "q_proj"), _weight(first, "k_proj")):
            weight.zero_()
        _weight(first, "k_proj")[:, shared] = matrix_for(0).repeat(model.config.num_key_value_heads)
        heads = range(1, model.config.num_attention_heads + 1)
        _weight(first, "q_proj")[:, shared] = torch.cat([matrix_for(back) for back in heads])

        tokens = torch.randn(unused, shared, generator=generator) / width**0.5
        _weight(first, "v_proj")[:unused, :shared] = tokens
        _weight(first, "v_proj")[:unused, shared:] = 0
        _weight(first, "o_proj")[width - unused :, :unused] = torch.eye(unused)

        slow = torch.arange(len(frequencies) - unused // 2, len(frequencies))
        slow = torch.cat([slow, slow + len(frequencies)])
        queries, keys = _weight(second, "q_proj"), _weight(second, "k_proj")
        queries[:head], keys[:head] = 0, 0
        queries[slow, :shared] = tokens
        keys[slow, width - unused :] = torch.eye(unused)
        for attention, gain in ((first, _FIRST_BLOCK), (second, _SECOND_BLOCK)):
            for norm in ("q_norm", "k_norm"):
                _weight(attention, norm).fill_(gain)


def _weight(attention: nn.Module, name: str) -> Tensor:
    return attention.get_parameter(f"{name}.weight")
