"""The random states of Python, numpy and torch together: reseeded, preserved over a block, or both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from infra.config import derived_seed


def seed_all(seed: int) -> None:
    """Reseed all of them with a seed of up to 64 bits; numpy takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed if seed < 2**32 else derived_seed(seed))
    torch.manual_seed(seed)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states after the block; for torch, those of the CPU and `device`."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block under a seed, and restore the states afterwards."""
    with kept_random_state(device):
        seed_all(seed)
        yield
