"""Config of weight averaging; every default names its source."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from evaluation.config import BenchmarksConfig
from infra.config import StageConfig


class AverageConfig(StageConfig):
    """The mean of several models of one architecture: of several runs (the inputs, under any names), or of the kept
    training states of one run (`states`)."""

    method: Literal["uniform", "ema", "greedy"] = "uniform"
    """uniform: the mean of all (Izmailov et al. 2018, "SWA"; Wortsman et al. 2022, "Model soups"). ema: of states, each
    weighted by `decay` less than the one after it. greedy: models are added from the best on, and kept if the mean with
    them is better (Wortsman et al. 2022, algorithm 1)."""
    states: int | None = Field(None, ge=2)
    """Number of last training states of the input `model` to average (`keep_state: {every: …}`). null: average the
    input models."""
    decay: float = Field(0.9, gt=0, lt=1)
    """Weight of a state, relative to the one after it, in ema. The mean of the last 10 checkpoints of an interval has
    about that of 0.9."""
    figure: str = ""
    """Metric of `benchmark` that greedy maximises, such as cloze_accuracy. "": greedy minimises the loss on the
    validation text of the input `shards`."""
    benchmark: BenchmarksConfig | None = None
    """Benchmarks with the `figure` that greedy maximises. Their items are then no longer a fair test: evaluate the
    result on others."""
    validation_sequences: int = Field(256, ge=1)
    """Validation sequences for the loss, spread over all validation text."""

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if self.method == "ema" and self.states is None:
            raise ValueError("method: expected states with ema: models of several runs have no order in time")
        if bool(self.figure) != (self.benchmark is not None):
            raise ValueError("figure: expected together with benchmark")
        if self.benchmark is not None and self.method != "greedy":
            raise ValueError(f"benchmark: expected method: greedy, not {self.method}, which chooses nothing")
        return self
