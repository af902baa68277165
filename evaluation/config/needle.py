"""Config of the needle test. Importing this module loads nothing heavy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from infra.config import Seed, StageConfig, outside_identity

Depth = Annotated[float, Field(ge=0, le=1)]


class NeedleConfig(StageConfig):
    """Retrieval of a number from long text, by length and position (passkey retrieval, Mohtashami & Jaggi 2023, section
    4.2; Peng et al. 2024, "YaRN", section 4.3.2)."""

    lengths: tuple[Annotated[int, Field(ge=64)], ...] = Field((1024, 2048, 4096), min_length=1)
    """Lengths in tokens. Lengths beyond the model's positions are tested too, which shows the effect of a context
    extension."""
    depths: tuple[Depth, ...] = Field((0.0, 0.25, 0.5, 0.75, 1.0), min_length=1)
    """Positions of the number in the text, as shares of its length; 1 is next to the question."""
    items: int = Field(10, ge=1)
    """Questions for each length and depth; 10 in Mohtashami & Jaggi 2023."""
    choices: int = Field(4, ge=2)
    """Number of choices among which the right one must be the most likely. Chance is 1 / choices."""
    digits: int = Field(5, ge=1, le=12)
    """Digits of a number."""
    filler: str = Field(
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ", min_length=1
    )
    """Text that is repeated around the number; that of Mohtashami & Jaggi 2023."""
    needle: str = "The pass key is {number}. Remember it. {number} is the pass key. "
    """Sentence with the number."""
    question: str = "What is the pass key? The pass key is"
    """End of the text, which a space and the number follow."""
    confidence: float = outside_identity(0.95, gt=0, lt=1)
    """Level of the intervals."""
    seed: Seed = 17

    @field_validator("needle")
    @classmethod
    def _holds_the_number(cls, needle: str) -> str:
        if "{number}" not in needle:
            raise ValueError("expected {number}, where the number goes")
        return needle
