"""Config of a rubric: criteria by which a judge model rewards answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from corpus.generation.config import EndpointConfig, SamplingConfig
from infra.config import Config

JUDGE = "rubric_judge"
"""Input of a model that judges."""
CriterionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]


class Criterion(Config):
    """One criterion of a rubric."""

    text: str = Field(min_length=1, examples=["The answer names the function's argument."])
    """Condition that an answer must meet, as shown to the judge."""
    weight: float = Field(1.0, gt=0)
    """Weight in the rubric's score, relative to the other criteria."""


class RubricConfig(Config):
    """A judge model scores each answer from 0 to 1 by each criterion on its own (Gunjal et al. 2025, "Rubrics as
    Rewards"; Arora et al. 2025, "HealthBench", for the weights). The score is their weighted mean."""

    criteria: dict[CriterionName, Criterion] = Field(min_length=1)
    """Name → criterion. Each name is a curve and a figure."""
    endpoint: EndpointConfig | None = None
    """Judge behind OpenAI's protocol, which is asked for a number from 0 to 10. Its answers are cached by request: none
    is paid for twice. null: the input `rubric_judge`, a model of another step, whose probability of `Yes` against `No`
    is the score."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_tokens=256)
    """Sampling of the endpoint's judgements."""
    weight: float = Field(1.0, gt=0)
    """Factor of the score in an answer's reward, to which it is added like a function's."""
    show_response: bool = True
    """Show the judge the response of the instructions too, where there is one."""
    max_unscored_share: float = Field(0.05, ge=0, le=1)
    """Maximum share of a call's judgements in which the endpoint gives no number; above it the stage fails. A criterion
    without a number is left out of that answer's mean."""

    @model_validator(mode="after")
    def _has_one_judge(self) -> Self:
        default = type(self).model_fields["sampling"].default
        if self.endpoint is None and self.sampling != default:
            raise ValueError("sampling: expected an endpoint as well: a model from a step is not sampled")
        return self
