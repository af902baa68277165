"""Config of the stage mix. Importing this module loads nothing heavy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from corpus.config import HELDOUT_SHARE, Share
from infra.config import Seed, StageConfig

Weight = Annotated[float, Field(ge=0)]


class MixConfig(StageConfig):
    """Samples sources up and down to the proportions that a model is to read them in (GPT-3, Brown et al., 2020)."""

    shares: dict[str, Share] = Field(default_factory=dict)
    """Source name → its share of the mixture's bytes (GPT-3, table 2.2). Other sources share the rest in proportion to
    their bytes times their weight."""
    weights: dict[str, Weight] = Field(default_factory=dict)
    """Source name → relative number of times that its documents are read, replacing the weight set in `read`."""
    max_epochs: float = Field(4, gt=0)
    """Maximum number of epochs of any source; other sources make up for what is missing. Up to 4 are worth nearly as
    much as new text (Muennighoff et al., 2023, Scaling Data-Constrained Language Models)."""
    target_mb: float | None = Field(None, gt=0)
    """Size of the mixture in megabytes (10^6 bytes of UTF-8)."""
    target_tokens: float | None = Field(None, gt=0)
    """Size of the mixture in tokens, at `bytes_per_token`."""
    target_share: float | None = Field(None, gt=0)
    """Size of the mixture as a share of the available text; 1 if none of the three is set."""
    bytes_per_token: float = Field(4.0, gt=0)
    """UTF-8 bytes per token, for `target_tokens`: about 4 for English with a vocabulary of 50,000."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; they are never repeated. The same in mix, tokenizer, shard, instructions and
    preferences."""
    seed: Seed = 17
    """Seed for choosing which documents are left out or repeated once more."""

    @model_validator(mode="after")
    def _is_possible(self) -> MixConfig:
        if sum(target is not None for target in (self.target_mb, self.target_tokens, self.target_share)) > 1:
            raise ValueError("expected one of target_mb, target_tokens and target_share")
        if sum(self.shares.values()) > 1 + 1e-9:
            raise ValueError(f"shares: expected at most 1 in all, not {sum(self.shares.values()):g}")
        return self
