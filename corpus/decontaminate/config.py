"""Config of the stage decontaminate. Importing this module loads nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from infra.config import Config, StageConfig


class MatchConfig(Config):
    """Conditions under which a text contains a test item (GPT-3, Brown et al., 2020, appendix C)."""

    ngram: int = Field(13, ge=2, le=50)
    """Words of an item that must follow each other in a document; items with fewer words are matched whole (GPT-3). In
    scripts without spaces between words, characters stand for them: 1.5 for a word of Chinese, 2 of Japanese, 4 of
    Thai, Lao, Khmer and Burmese."""
    min_words: int = Field(8, ge=1)
    """Items with fewer words count only where they stand alone, from one line or sentence end to the next: as a part of
    a sentence they are common phrases (GPT-3's smallest n is 8). A question with fewer words counts together with its
    right answer, wherever that follows."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> MatchConfig:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words: expected at most ngram ({self.ngram})")
        return self


class DecontaminateConfig(StageConfig, MatchConfig):
    """Takes the benchmarks' items out of the training text (GPT-3, Brown et al., 2020, appendix C)."""

    action: Literal["drop", "cut"] = "drop"
    """drop: the whole document. cut: what was hit with `context_characters` on either side (GPT-3 does this)."""
    context_characters: int = Field(200, ge=0)
    """cut: characters that go with the hit on either side (200 in GPT-3)."""
    min_piece_characters: int = Field(200, ge=1)
    """cut: shorter pieces of what is left go too (200 in GPT-3)."""
    max_cuts: int = Field(10, ge=1)
    """cut: a document that would be cut more often is dropped (10 in GPT-3)."""
    max_document_hits: int | None = Field(None, ge=1)
    """Item n-grams that occur in more documents than this are common text and count as no hit (10 in GPT-3); by default
    none is common, so that a leaked item is found however often it was copied."""
