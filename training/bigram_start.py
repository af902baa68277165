"""Embedding and output layer of a fresh model, fitted to the bigrams of its text before the first batch.

A small model spends its first million tokens on which token follows which. Counted, that is one sparse matrix, and to
fit two layers to it costs about as much as training on some ten thousand tokens a pass, however long the text was.

Shapes: V vocabulary, D width, R tokens whose successors are fitted at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from training import ranks
from training.hardware import Hardware
from training.ngram import Bigram

PASSES = 24
"""Over the vocabulary. At V = 4,096 and D = 256 they end within 0.03 nats of the counts on held-out text, and 12 within
0.16 (benchmarks/RESULTS.md, "The recipe")."""
_ROWS = 1024
_EMBEDDING_RATE, _OUTPUT_RATE = 0.15, 0.02
_BETAS = (0.8, 0.95)


def start_from_bigrams(model: PreTrainedModel, counted: Bigram, hardware: Hardware, seed: int) -> float:
    """Sets both layers of `model` so that the token after v has about the shares that were counted after v, as long as
    the blocks add nothing; the cross-entropy of the counted text by them alone, in nats a token.

    The embedding of every token then has a root mean square of 1 and passes the last RMSNorm (with weights of one)
    unchanged. Fitted by Adam on rank 0, whose layers every rank takes; every rank must call.
    """
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rows, width = inputs.shape
    embedding, output, loss = ranks.from_first(
        _fit(counted, rows, width, hardware, seed) if ranks.is_first() else (inputs, outputs, 0.0)
    )
    with torch.no_grad():
        inputs.copy_(embedding)
        outputs.copy_(output)
    return loss


def _fit(counted: Bigram, vocab_size: int, width: int, hardware: Hardware, seed: int) -> tuple[Tensor, Tensor, float]:
    """Embedding and output layer, (V, D) each on the CPU, and the loss of the last pass."""
    device = hardware.device
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab_size, width, generator=generator).to(device).requires_grad_()
    output = torch.zeros(vocab_size, width, device=device, requires_grad=True)
    groups = [{"params": [embedding], "lr": _EMBEDDING_RATE}, {"params": [output], "lr": _OUTPUT_RATE}]
    adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)
    rows_at_once = min(_ROWS, -(-vocab_size // 4))
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, PASSES * -(-vocab_size // rows_at_once))
    loss = 0.0
    for _ in range(PASSES):
        loss = 0.0
        for rows in torch.randperm(vocab_size, generator=generator).split(rows_at_once):
            shares = torch.from_numpy(counted.shares(rows.numpy(), vocab_size)).to(device)
            with hardware.autocast():
                logits = rms_norm(embedding[rows.to(device)], (width,)) @ output.mT
            logits = logits.float()
            found = (shares.sum(1) * logits.logsumexp(1)).sum() - (shares * logits).sum()
            found.backward()
            adam.step()
            falling.step()
            adam.zero_grad()
            loss += found.item()
    return rms_norm(embedding.detach(), (width,)).cpu(), output.detach().cpu(), loss
