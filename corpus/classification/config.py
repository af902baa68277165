"""Config of the stage classify. Importing this module loads nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config import StageConfig, outside_identity
from infra.io.sources import Source, SourcePath, expand


class ClassifyConfig(StageConfig):
    """Scores documents with a sequence classifier, such as those of FineWeb-Edu (Penedo et al., 2024), and keeps the
    documents above a score or the best share of them. Without either, all are kept with their scores."""

    model: SourcePath = outside_identity(examples=["models/quality-classifier"])
    """Folder of a Hugging Face sequence classifier. Its bytes are part of the identity."""
    label: str | None = None
    """The label whose score counts, as in the model's config; null for a model with a single output."""
    output: Literal["auto", "probability", "raw"] = "auto"
    """probability: softmax over the labels, or a sigmoid each where the model's problem_type is
    multi_label_classification. raw: the model's output value, for regressions and reward models. auto: raw for a single
    output, else probability."""
    name: str = Field("quality", pattern="^[a-z][a-z0-9_]*$", max_length=40)
    """Name of the score in the documents' metadata, under `scores`."""
    min_score: float | None = None
    """Minimum score of a document to keep."""
    top_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the scored documents to keep, the best ones; ties at the boundary are all kept."""
    from_sources: tuple[str, ...] | None = None
    """Names of the sources whose documents are scored; documents of other sources are kept without a score. null: all.
    """
    max_tokens: int = Field(512, ge=8)
    """Maximum number of tokens read from the beginning of a document; fewer if the model has fewer positions."""
    batch_documents: int = outside_identity(32, ge=1)
    """Documents per forward pass; scores change by rounding."""

    @model_validator(mode="after")
    def _can_be_done(self) -> ClassifyConfig:
        if self.min_score is not None and self.top_share is not None:
            raise ValueError("min_score, top_share: expected one of them, not both")
        if Path(self.model).suffix in (".bin", ".ftz"):
            raise ValueError(
                "model: expected the folder of a Hugging Face sequence classifier, not a fastText model, which no "
                "library of the lock reads: use one such as HuggingFaceFW/fineweb-edu-classifier, or score with "
                "fastText's own program before `ingest`"
            )
        return self

    def sources(self) -> list[Source]:
        return [Source("classify.model", paths=expand([self.model]))]
