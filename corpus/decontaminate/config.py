"""Config of the stage decontaminate. Importing this module loads nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from infra.config import Config, StageConfig


class MatchConfig(Config):
    """Conditions under which a text contains a test item (GPT-3, Brown et al., 2020, appendix C)."""

    ngram: int = Field(13, ge=2, le=50)
    """Length of the word n-grams that must match; items with fewer words are matched as a whole (GPT-3). In scripts
    without spaces between words, characters stand for them: 1.5 for a word of Chinese, 2 of Japanese, 4 of Thai, Lao,
    Khmer and Burmese."""
    min_words: int = Field(8, ge=1)
    """Items with fewer words count only as complete lines or sentences: within a sentence they are common phrases
    (GPT-3's smallest n is 8). A question with fewer words counts together with its right answer, wherever that follows.
    """

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> MatchConfig:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words: expected at most ngram ({self.ngram})")
        return self


class DecontaminateConfig(StageConfig, MatchConfig):
    """Removes benchmark items from the training text (GPT-3, Brown et al., 2020, appendix C)."""

    action: Literal["drop", "cut"] = "drop"
    """drop: remove the document. cut: remove the match with `context_characters` on either side (as GPT-3 does)."""
    context_characters: int = Field(200, ge=0)
    """cut: characters removed on either side of a match (200 in GPT-3)."""
    min_piece_characters: int = Field(200, ge=1)
    """cut: remaining pieces that are shorter are removed too (200 in GPT-3)."""
    max_cuts: int = Field(10, ge=1)
    """cut: a document that would be cut more often is dropped (10 in GPT-3)."""
    max_document_hits: int | None = Field(None, ge=1)
    """Item n-grams that occur in more documents than this are common text and do not count as matches (10 in GPT-3); by
    default all count, so that a leaked item is found however often it was copied."""
