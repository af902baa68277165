"""Config of gates, registration and reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from evaluation.config.benchmarks import IDENTIFIER
from infra.config import Config, StageConfig, outside_identity
from infra.store.layout import AUX

CLAIMS = f"{AUX}/claims.json"
FIRST_SCREEN = f"{AUX}/first_screen.json"
"""The three numbers and the samples at the head of the report, for other pages."""
"""The claims at the report's head, [{"state", "sign", "title", "text"}], for pages that link it."""


class Gate(Config):
    """A bound on a figure of the pipeline; if it is violated, the model is not registered."""

    figure: str = Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")
    """`stage.figure`, e.g. `safety_rlhf.toxicity_probability` or `pretrain.validation_loss`."""
    at_least: float | None = None
    """Reject the model if the figure is smaller."""
    at_most: float | None = None
    """Reject the model if the figure is larger."""
    against: Literal["promoted"] | None = None
    """promoted: the bounds apply to the difference from the currently promoted model of this name. Without a promoted
    model, the gate passes."""
    shown: Literal["broken", "kept"] = "broken"
    """With `against`: broken rejects a model if the whole 95 % interval of the difference is beyond the bound; kept
    rejects it unless the whole interval is within the bound."""

    @model_validator(mode="after")
    def _bounded(self) -> Gate:
        if self.shown != "broken" and self.against is None:
            raise ValueError("`shown` is for gates with `against: promoted`")
        if self.at_least is None and self.at_most is None:
            raise ValueError("a gate needs `at_least` or `at_most`")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"no figure is at least {self.at_least:g} and at most {self.at_most:g}")
        return self


class RegisterConfig(StageConfig):
    name: str | None = Field(None, pattern=IDENTIFIER)
    """The registered model's name; by default the pipeline's."""
    gates: tuple[Gate, ...] = ()
    """Bounds that must all hold."""
    intended_use: str = "Research on training language models. Not evaluated for use in products or by the public."
    """Intended use, as printed in the model card."""
    licence: str = ""
    """The model's licence in its card: an identifier of the Hugging Face hub, e.g. apache-2.0, or another name."""


class CorpusReportConfig(StageConfig):
    """One page about the corpus: sources, funnel, rules, duplicates, mixture, tokenizer, shards, drift."""

    title: str | None = None
    """The page's title; by default the pipeline's name."""


class ReportConfig(StageConfig):
    title: str | None = None
    """The page's title; by default the registered model's name."""
    samples: int = Field(6, ge=0)
    """Sample generations that are shown side by side."""
    command: str = outside_identity("")
    """The command that ran the pipeline, as printed on the page."""
