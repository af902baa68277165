"""Model sizes by name, with the batch and learning rate they were published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Preset:
    """The shape of a decoder-only model, and how it was trained where it was published.

    parameters: the published count (with a vocabulary of 50,257 for the GPT-3 family, 4,096 for ours).
    batch_tokens, learning_rate: from the same table; None where nothing was published.
    """

    family: Family
    layers: int
    width: int
    heads: int
    positions: int
    parameters: int
    mlp_width: int | None = None
    batch_tokens: int | None = None
    learning_rate: float | None = None


# GPT-3 (Brown et al. 2020), table 2.1, in the GPT-2 architecture with 2,048 positions as in MosaicML's "Mosaic LLMs
# (Part 1)". The paper's 24 heads of 128 do not fit the 1.3B model's width of 2,048: like MosaicML we take 16.
PRESETS: dict[str, Preset] = {
    "gpt-125m": Preset("gpt2", 12, 768, 12, 2048, 125_000_000, batch_tokens=524_288, learning_rate=6.0e-4),
    "gpt-350m": Preset("gpt2", 24, 1024, 16, 2048, 350_000_000, batch_tokens=524_288, learning_rate=3.0e-4),
    "gpt-760m": Preset("gpt2", 24, 1536, 16, 2048, 760_000_000, batch_tokens=524_288, learning_rate=2.5e-4),
    "gpt-1.3b": Preset("gpt2", 24, 2048, 16, 2048, 1_300_000_000, batch_tokens=1_048_576, learning_rate=2.0e-4),
    # Ours, for a laptop and for tests.
    "llama-4m": Preset("llama", 4, 256, 4, 512, 4_200_000, mlp_width=688),
    "llama-nano": Preset("llama", 2, 64, 2, 512, 370_000, mlp_width=176),
}
