"""Config of context extension: rotary positions beyond those that a model was trained on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import Config


class RopeConfig(Config):
    """Rotary positions for sequences longer than the input model's."""

    kind: Literal["yarn", "base"] = "yarn"
    """yarn: slow rotations are interpolated, fast ones kept, between them a ramp, and attention is sharpened (Peng et
    al. 2024, "YaRN"). base: a higher base slows all rotations, the slow ones most (Xiong et al. 2023, "Effective
    Long-Context Scaling", section 4.1; "NTK-aware"); it wants more text."""
    positions: int = Field(ge=2)
    """The longest sequence from here on, in tokens; the model's own times the factor of the extension."""
    base: float | None = Field(None, gt=1)
    """With base: the new base, such as 500,000 in Xiong et al. 2023 for 4 times the length. null: the model's own times
    factor^(d/(d-2)) for heads of width d, at which the slowest rotation is stretched by the factor."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn: rotations over the original length above which a dimension is kept; 32 in Peng et al. 2024, section 3.2."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn: rotations below which it is interpolated by the whole factor; 1 in Peng et al. 2024, section 3.2."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if self.kind == "yarn" and self.base is not None:
            raise ValueError("base: expected kind: base together with it")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast: expected more than beta_slow, {self.beta_slow:g}, not {self.beta_fast:g}")
        return self
