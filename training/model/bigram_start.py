"""Embedding and output layer of a fresh model, fitted to the bigrams of its text before the first batch.

A small model spends its first million tokens on which token follows which. Counted, that is one sparse matrix, and to
fit two layers to it costs about as much as training on some ten thousand tokens a pass, however long the text was.

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
"""Over the vocabulary. At V = 4,096 and D = 256, 24 end within 0.03 nats of the counts on held-out text, 12 within 0.16
(benchmarks/RESULTS.md, "The recipe")."""
CONSTANT = 0.25
"""Of a token's embedding, the share of its length that is the same for all tokens: the output layer says in it how
frequent each is."""
_ROWS = 1024
_EMBEDDING_RATE, _OUTPUT_RATE = 0.15, 0.02
_BETAS = (0.8, 0.95)


def start_from_bigrams(
    model: PreTrainedModel, counted: Bigram, hardware: Hardware, seed: int, unused: int = 0
) -> float:
    """Sets both layers of `model` so that the token after v has about the shares that were counted after v, as long as
    the blocks add nothing; the cross-entropy of the counted text by them alone, in nats a token.

    Every embedding has a root mean square of 1, so that the last RMSNorm (with weights of one) leaves it as it is. Its
    last `unused` entries are zero and not read by the output layer; the one before is the same for all tokens. Fitted
    by Adam on rank 0, whose layers every rank takes; every rank must call.
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
            found = (shares.sum(1) * logits.logsumexp(1)).sum() - (shares * logits).sum()
            found.backward()
            adam.step()
            falling.step()
            adam.zero_grad()
            loss += found.item()
    free = (0, unused)
    embedding = nn.functional.pad(_embeddings(raw.detach(), width), free)
    return embedding.cpu(), nn.functional.pad(output.detach(), free).cpu(), loss


def _embeddings(raw: Tensor, width: int) -> Tensor:
    """Rows (R, learnt + 1) of a length of sqrt(D), CONSTANT of which is the last entry."""
    scale = math.sqrt((1 - CONSTANT**2) * width / raw.shape[1])
    constant = raw.new_full((len(raw), 1), CONSTANT * math.sqrt(width))
    return torch.cat([rms_norm(raw, raw.shape[1:]) * scale, constant], 1)
