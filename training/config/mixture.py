"""Config of a mixture of sources that is made during training: weights, and phases with other weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from corpus.documents.source_names import unknown_source
from infra.config import Config
from infra.errors import Problem
from training.config.duration import LengthOrShare, parse_duration

Weight = Annotated[float, Field(ge=0)]
Unit = Literal["proportion", "repeat", "choose"]


class MixtureWeights(Config):
    """Amount to read of each source, in one of three ways, named as in mosaicml-streaming's Stream. A source that is
    not listed is not read."""

    proportion: dict[str, Weight] = Field(default_factory=dict)
    """Source → its share of the sequences read, relative to the other shares."""
    repeat: dict[str, Weight] = Field(default_factory=dict)
    """Source → number of times that its training text is read per epoch of the mixture."""
    choose: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Source → number of its sequences read per epoch of the mixture."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in get_args(Unit) if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"expected one of {', '.join(get_args(Unit))}, not {' and '.join(given) or 'none'}")
        if not any(self.weights.values()):
            raise ValueError(f"{given[0]}: expected a weight above 0 for at least one source")
        return self

    @property
    def unit(self) -> Unit:
        return next(name for name in get_args(Unit) if getattr(self, name))

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight by source, in the chosen unit."""
        weights: Mapping[str, float] = getattr(self, self.unit)
        return weights

    def wanted(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return by source its weight against the others.

        Args:
            sizes: training sequences of each.
        """
        factor = sizes if self.unit == "repeat" else dict.fromkeys(sizes, 1)
        return {name: self.weights.get(name, 0.0) * factor[name] for name in sizes}


class MixturePhase(MixtureWeights):
    """Weights that apply from a given point of training."""

    begins: LengthOrShare
    """Start of this phase: a number of batches or tokens, or a percentage of training."""

    @field_validator("begins")
    @classmethod
    def _is_within(cls, begins: str) -> str:
        duration = parse_duration(begins)
        if duration.value <= 0:
            raise ValueError("expected more than 0: the initial weights are those of the mixture itself")
        if duration.unit == "percent" and duration.value >= 100:
            raise ValueError("expected less than 100 %")
        return begins


def phase_problem(begins: Sequence[int], last: int) -> Problem | None:
    """Return the problem with later phases that begin after the numbers of batches in `begins`, in a training of `last`
    batches; None if there is none."""
    for number, (before, after) in enumerate(pairwise([0, *begins, last])):
        if begins and after <= before:
            listed = ", ".join(f"{begin:,}" for begin in begins)
            return Problem(
                "phase_order",
                f"pretrain.mixture.phases.{min(number, len(begins) - 1)}.begins",
                f"the phases begin after {listed} of {last:,} batches: expected each after the one before, and the "
                "last before the training ends",
                "correct begins, or lengthen the training",
            )
    return None


class MixtureConfig(MixtureWeights):
    """Sources that are mixed while training, by weights that may change from phase to phase."""

    phases: tuple[MixturePhase, ...] = ()
    """Phases after the first, in their order: a curriculum."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        begins = [parse_duration(phase.begins) for phase in self.phases]
        for number, (before, after) in enumerate(pairwise(begins), 1):
            if before.unit == after.unit and after.value <= before.value:
                raise ValueError(
                    f"phases.{number}.begins: expected more than {before} of the phase before, not {after}"
                )
        return self

    @property
    def all_phases(self) -> tuple[MixtureWeights, ...]:
        return (self, *self.phases)

    def problems(self, sources: Collection[str]) -> Iterator[Problem]:
        """Yield what does not fit shards of these sources: names that none of them has, and sources that no phase
        names."""
        named = set()
        for number, phase in enumerate(self.all_phases):
            where = f"phases.{number - 1}.{phase.unit}" if number else phase.unit
            for name in phase.weights:
                named.add(name)
                yield from unknown_source(f"pretrain.mixture.{where}.{name}", name, sources)
        for name in sorted(set(sources) - named):
            message = f"expected a weight for each source of the shards, and {name} has none in any phase"
            yield Problem("unnamed_source", f"pretrain.mixture.{self.unit}", message, f"give it one, or {name}: 0")
