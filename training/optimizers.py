"""AdamW with its weight-decay groups, and the learning rate as a function of the batch."""

from __future__ import annotations

import math

import torch
from torch import nn

from training.config import OptimizerConfig, ScheduleConfig, batches


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, embeddings, output layer, norms and biases do not.

    Each group's `scale` is its learning rate as a multiple of the schedule's.
    """
    outer = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    outer |= {id(weight) for name, weight in model.named_parameters() if name.endswith("lm_head.weight")}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    tables = [weight for weight in trained if id(weight) in outer]
    inner = [weight for weight in trained if id(weight) not in outer]
    groups = [
        {"params": [weight for weight in inner if weight.ndim >= 2], "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": [weight for weight in inner if weight.ndim < 2], "weight_decay": 0.0, "scale": 1.0},
        {"params": tables, "weight_decay": 0.0, "scale": config.embedding_scale},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def warmup_batches(config: ScheduleConfig, total: int, batch_tokens: int, epoch_batches: int) -> int:
    """Length of the warm-up in batches, at most the whole training."""
    warmup = batches(config.warmup, batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=total)
    return min(total, warmup)


def learning_rate_share(config: ScheduleConfig, batch: int, total: int, warmup: int) -> float:
    """Learning rate of batch 0, 1, … as a share of the peak.

    Warm-up rises in equal steps to 1 at batch `warmup` - 1; cosine and linear fall to `final_share` at the end;
    inverse_sqrt is sqrt(warmup / batch) (Vaswani et al. 2017, section 5.3), no lower than `final_share`.
    """
    if batch < warmup:
        return (batch + 1) / warmup
    if config.decay == "constant":
        return 1.0
    if config.decay == "inverse_sqrt":
        return max(config.final_share, math.sqrt(warmup / (batch + 1)))
    done = min(1.0, (batch - warmup + 1) / max(1, total - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if config.decay == "cosine" else 1 - done
    return config.final_share + (1 - config.final_share) * left
