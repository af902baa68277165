"""Gates: bounds on the pipeline's figures that a model must keep to be registered."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.config import Gate
from evaluation.results.against import Against
from infra.errors import Problem, StageError


@dataclass(frozen=True)
class Verdict:
    """Result of a gate for one figure."""

    gate: Gate
    value: float
    against: Against | None = None
    """Comparison of the figure with the promoted model's, for a gate that requires it; None if there is none."""
    promoted: bool = False
    """True if there is a promoted model to compare with."""

    @property
    def passed(self) -> bool:
        """True if every bound holds; nan satisfies no bound. See `Gate.against` for a bound on a difference."""
        low = -math.inf if self.gate.at_least is None else self.gate.at_least
        high = math.inf if self.gate.at_most is None else self.gate.at_most
        if self.gate.against is None:
            return low <= self.value <= high
        if self.against is None:
            return not self.promoted or self.gate.shown == "broken"
        difference = self.against.difference
        if math.isnan(difference.value):
            return False
        return (
            low <= difference.low and difference.high <= high
            if self.gate.shown == "kept"
            else (low <= difference.high and difference.low <= high)
        )

    @property
    def bound(self) -> str:
        """The bound in words: `at least 0.6`, `at least 0 more than the promoted model`."""
        bounds = (("at least", self.gate.at_least), ("at most", self.gate.at_most))
        suffix = " more than the promoted model" if self.gate.against else ""
        conditions = " and ".join(f"{word} {value:g}" for word, value in bounds if value is not None)
        return f"{conditions}{suffix}"

    @property
    def finding(self) -> str:
        """The finding in words: `0.4`, or the difference from the promoted model's value."""
        if self.gate.against is None:
            return f"{self.value:g}"
        if self.against is None:
            reason = "has no such figure" if self.promoted else "is there none yet"
            return f"{self.value:.4g}, and the promoted model {reason}"
        difference = self.against.difference
        return (
            f"{self.value:.4g}, {difference.value:+.4g} ({difference.low:+.4g} to {difference.high:+.4g}) more than "
            f"{self.against.promoted:.4g} of {self.against.registration}"
        )

    def as_json(self) -> dict[str, object]:
        gate = self.gate.model_dump(exclude=set() if self.gate.against else {"against", "shown"})
        document: dict[str, object] = {**gate, "value": self.value, "passed": self.passed}
        if self.gate.against:
            document["difference"] = self.against.as_json() if self.against else None
        return document


def judge(
    gates: Sequence[Gate],
    figures: Mapping[str, float],
    against: Mapping[str, Against] | None = None,
) -> list[Verdict]:
    """Return a verdict for each gate.

    Raises StageError naming every gate whose figure no stage of the pipeline made, with the nearest that exists.

    Args:
        figures: by `stage.figure`.
        against: the same of `evaluation.results.against`; None if no model is promoted.
    """
    problems = []
    for index, gate in enumerate(gates):
        if gate.figure not in figures:
            near = difflib.get_close_matches(gate.figure, figures, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else "the report and the manifests name the figures of each stage"
            path = f"register.gates.{index}.figure"
            problems.append(Problem("unknown_figure", path, f"no stage before register made {gate.figure}", fix))
    if problems:
        raise StageError(*problems)
    compared = against or {}
    return [
        Verdict(gate, figures[gate.figure], compared.get(gate.figure) if gate.against else None, against is not None)
        for gate in gates
    ]


def refusals(verdicts: Sequence[Verdict]) -> list[Problem]:
    """Return a problem for each gate that refuses, naming figure, value and bound."""
    return [
        Problem(
            "gate_refused",
            f"register.gates.{index}",
            f"{verdict.gate.figure} is {verdict.finding}, expected {verdict.bound}",
            "the model is recorded as rejected; improve it, or change the gate if the bound is wrong",
        )
        for index, verdict in enumerate(verdicts)
        if not verdict.passed
    ]
