"""Efficiency of software on a device: the speed of its kernels, and their number of passes over memory.

The numbers were chosen by hand to match the published rows that each names; all other rows of
docs/planning/accuracy.md are predictions with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.errors import ConfigError, Problem
from training.core.devices import Device
from training.planner.architecture import Architecture


@dataclass(frozen=True)
class Kernels:
    """One way to train.

    touched: bytes of memory per token and layer that everything except matrix products and attention reads and writes
        in the forward pass, per unit of width, and `inner` per unit of the MLP's inner width; twice as many backward.
    scores: bytes per score (head, query, key) that attention reads and writes in the forward pass if it keeps its
        scores, and 1.5 times as many backward; 0 if they never reach memory.
    attention: share of the peak that attention's products reach.
    logits: bytes that the loss reads and writes for each logit, forward and backward.
    overlap: share of the traffic of gradients and sharded weights that overlaps with computation.
    lost: share of a step in which nothing is computed: launches, data, logging.
    data_parallel_alone: True if it supports only DDP, and full activation checkpointing as the only way to save memory.
    """

    name: str
    description: str
    touched: float
    inner: float
    scores: float
    attention: float
    logits: float
    overlap: float
    lost: float
    data_parallel_alone: bool = False


KERNELS = {
    kernels.name: kernels
    for kernels in (
        # Fitted to Mosaic LLMs (Part 1): 7.1 h for the 1.3B model on 8 GPUs.
        Kernels(
            "plain",
            "one kernel for each operation, attention keeps its scores (transformers' GPT-2 of 2022, eager)",
            touched=90, inner=44, scores=44, attention=0.4, logits=40, overlap=0.0, lost=0.03,
            data_parallel_alone=True,
        ),
        # Fitted to llm-foundry's 125M, 1B and 7B on A100 80 GB and its 1B and 7B on H100.
        Kernels(
            "flash",
            "FlashAttention, other operations one by one, gradients overlap (llm-foundry, torchtitan eager)",
            touched=42, inner=8, scores=0, attention=0.45, logits=20, overlap=0.85, lost=0.05,
        ),
        Kernels(
            "compiled",
            "FlashAttention, the rest fused by torch.compile",
            touched=20, inner=5, scores=0, attention=0.45, logits=10, overlap=0.85, lost=0.03,
        ),
        # Fitted to the 1.7B and 145.6B of Narayanan et al. 2021, table 1.
        Kernels(
            "megatron",
            "fused softmax, bias, dropout and norms; attention keeps its scores (Megatron-LM of 2021)",
            touched=30, inner=6, scores=9, attention=0.5, logits=14, overlap=0.3, lost=0.03,
        ),
    )
}  # fmt: skip
"""Kernels by name, for `--kernels`."""

HALF_ROWS, HALF_COLUMNS = 256.0, 64.0
"""Rows and columns of a matrix product at which it reaches half of what it reaches when large."""


def matmul_time(rows: float, inner: float, columns: float, peak: float, best: float) -> float:
    """Seconds of (rows, inner) @ (inner, columns).

    Args:
        best: share of the peak that large products reach.
    """
    share = best * rows / (rows + HALF_ROWS) * inner / (inner + HALF_COLUMNS) * columns / (columns + HALF_COLUMNS)
    return 2 * rows * inner * columns / (peak * share)


def default_kernels(device: Device, arch: Architecture) -> Kernels:
    """Return the kernels of published measurements on a device: Mosaic LLMs (Part 1) for GPT-2 on A100 40 GB, which
    uses Composer with transformers like this project; llm-foundry and similar for all others."""
    if device.name == "a100-40" and arch.learned_positions:
        return KERNELS["plain"]
    return fused_kernels(device)


def fused_kernels(device: Device) -> Kernels:
    """Return the kernels with FlashAttention, except for a V100, which does not support it."""
    return KERNELS["megatron" if device.name == "v100" else "flash"]


def find_kernels(name: str) -> Kernels:
    """Return kernels by name. Raises ConfigError `unknown_kernels`."""
    if name not in KERNELS:
        message = f"expected one of {', '.join(KERNELS)}, not {name!r}"
        raise ConfigError(
            Problem("unknown_kernels", "--kernels", message, "leave it out to use the device's published figures")
        )
    return KERNELS[name]
