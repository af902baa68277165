"""Gates: bounds on the pipeline's figures that a model must keep to be registered."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.config import Gate
from infra.errors import Problem, StageError


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a figure."""

    gate: Gate
    value: float

    @property
    def passed(self) -> bool:
        """Whether every bound holds; nan holds none."""
        low = -math.inf if self.gate.at_least is None else self.gate.at_least
        high = math.inf if self.gate.at_most is None else self.gate.at_most
        return low <= self.value <= high

    @property
    def bound(self) -> str:
        """The bound in words: `at least 0.6`."""
        bounds = (("at least", self.gate.at_least), ("at most", self.gate.at_most))
        return " and ".join(f"{word} {value:g}" for word, value in bounds if value is not None)

    def as_json(self) -> dict[str, object]:
        return {**self.gate.model_dump(), "value": self.value, "passed": self.passed}


def judge(gates: Sequence[Gate], figures: Mapping[str, float]) -> list[Verdict]:
    """A verdict for each gate. figures: by `stage.figure`.

    Raises StageError naming every gate whose figure no stage of the pipeline made, with the nearest that exists.
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
    return [Verdict(gate, figures[gate.figure]) for gate in gates]


def refusals(verdicts: Sequence[Verdict]) -> list[Problem]:
    """A problem for each gate that refuses, naming figure, value and bound."""
    return [
        Problem(
            "gate_refused",
            f"register.gates.{index}",
            f"{verdict.gate.figure} is {verdict.value:g}, expected {verdict.bound}",
            "the model is recorded as rejected; better it, or move the gate if the bound is wrong",
        )
        for index, verdict in enumerate(verdicts)
        if not verdict.passed
    ]
