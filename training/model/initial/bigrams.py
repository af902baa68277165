"""Embedding and output layer of a fresh model, fitted to the bigrams of its text before the first batch.

A small model spends its first million tokens on learning bigrams. Their counts are one sparse matrix. Fitting two
layers to it costs about as much per pass as training on some ten thousand tokens, regardless of the length of the text.

Shapes: V vocabulary, D width, R tokens whose successors are fitted at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from training.core import ranks
from training.core.hardware import Hardware
from training.model.ngram import Bigram

PASSES = 32
"""Passes over the vocabulary. At V = 4,096 and D = 256, 24 end within 0.03 nats of the counts on held-out text, 12
within 0.16 (benchmarks/RESULTS.md, "The recipe")."""
CONSTANT = 0.25
"""Share of an embedding's length that is the same for all tokens: the output layer encodes their frequencies in it."""
_ROWS = 1024
_EMBEDDING_RATE, _OUTPUT_RATE = 0.15, 0.02
_BETAS = (0.8, 0.95)


def start_from_bigrams(
    model: PreTrainedModel, counted: Bigram, hardware: Hardware, seed: int, unused: int = 0
) -> float:
    """Set both layers of `model` so that the distribution after token v is about the counted one, as long as the blocks
    add nothing; return the cross-entropy of the counted text under these layers alone, in nats per token.

    Every embedding has a root mean square of 1, so that the last RMSNorm (with weights of one) does not change it. Its
    last `unused` entries are zero, and the output layer does not read them; the entry before them is the same for all
    tokens. Rank 0 fits the layers with Adam and broadcasts them; every rank must call.
    """
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rows, width = inputs.shape
    embedding, output, loss = ranks.from_first(
        _fit(counted, rows, width, hardware, seed, unused) if ranks.is_first() else (inputs, outputs, 0.0)
    )
    with torch.no_grad():
        inputs.copy_(embedding)
        outputs.copy_(output)
    return loss


def _fit(
    counted: Bigram, vocab_size: int, width: int, hardware: Hardware, seed: int, unused: int
) -> tuple[Tensor, Tensor, float]:
    """Embedding and output layer, (V, D) each on the CPU, and the loss of the last pass."""
    device = hardware.device
    generator = torch.Generator().manual_seed(seed)
    learnt = width - unused - 1
    raw = torch.randn(vocab_size, learnt, generator=generator).to(device).requires_grad_()
    output = torch.zeros(vocab_size, learnt + 1, device=device, requires_grad=True)
    groups = [{"params": [raw], "lr": _EMBEDDING_RATE}, {"params": [output], "lr": _OUTPUT_RATE}]
    adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)
    rows_at_once = min(_ROWS, -(-vocab_size // 4))
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, PASSES * -(-vocab_size // rows_at_once))
    loss = 0.0
    for _ in range(PASSES):
        loss = 0.0
        for rows in torch.randperm(vocab_size, generator=generator).split(rows_at_once):
            shares = torch.from_numpy(counted.shares(rows.numpy(), vocab_size)).to(device)
            with hardware.autocast():
                logits = _embeddings(raw[rows.to(device)], width) @ output.mT
            logits = logits.float()
            batch_loss = (shares.sum(1) * logits.logsumexp(1)).sum() - (shares * logits).sum()
            batch_loss.backward()
            adam.step()
            falling.step()
            adam.zero_grad()
            loss += batch_loss.item()
    free = (0, unused)
    embedding = nn.functional.pad(_embeddings(raw.detach(), width), free)
    return embedding.cpu(), nn.functional.pad(output.detach(), free).cpu(), loss


def _embeddings(raw: Tensor, width: int) -> Tensor:
    """Return rows (R, learnt + 1) of length sqrt(D), where the last entry is CONSTANT of the length."""
    scale = math.sqrt((1 - CONSTANT**2) * width / raw.shape[1])
    constant = raw.new_full((len(raw), 1), CONSTANT * math.sqrt(width))
    return torch.cat([rms_norm(raw, raw.shape[1:]) * scale, constant], 1)
