"""The artifacts of a pipeline as the report reads them: models by name, curves, answers, paired scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evaluation.artifacts import Artifact, read_artifacts
from evaluation.statistics import Interval, difference_of_paired_proportions, mcnemar_p_value

MODELS = ("base", "sft", "rlhf")
MODEL_STAGES = {"base": ("pretrain", "base_model"), "sft": ("sft",), "rlhf": ("rlhf",)}


@dataclass(frozen=True)
class Paired:
    """How much better the second model did on the same items, and McNemar's p-value."""

    task: str
    first: str
    second: str
    difference: Interval
    p_value: float


class Family:
    """Every finished artifact of the pipeline by stage id; any of them may be missing."""

    def __init__(self, inputs: Mapping[str, Path]) -> None:
        self.artifacts = read_artifacts(inputs)

    def get(self, id: str) -> Artifact | None:
        return self.artifacts.get(id)

    def figures(self, id: str) -> dict[str, float]:
        """The figures of a stage; empty if the pipeline has none of that name."""
        found = self.get(id)
        return found.figures if found else {}

    def base(self) -> Artifact | None:
        return self.get("pretrain") or self.get("base_model")

    @cached_property
    def models(self) -> list[str]:
        """The models that the pipeline made, of base, sft, rlhf."""
        return [name for name in MODELS if any(stage in self.artifacts for stage in MODEL_STAGES[name])]

    def results(self, kind: str, model: str) -> dict[str, Any]:
        """results.json of benchmarks or safety for a model; empty where it was not measured."""
        found = self.get(f"{kind}_{model}")
        return (found.read_json("results.json") if found else None) or {}

    def curve(self, id: str, name: str) -> list[tuple[float, float]]:
        """The (step, value) points of a metric; points that are not finite are left out.

        Of a step that was told more than once the last counts: a training that went back took the others back.
        """
        found = self.get(id)
        points: dict[float, float] = {}
        for row in found.read_lines("aux/metrics.jsonl") if found else []:
            value = row.get("values", {}).get(name)
            if value is not None and row.get("step") is not None and math.isfinite(float(value)):
                points[float(row["step"])] = float(value)
        return sorted(points.items())

    def corrections(self, id: str) -> list[dict[str, Any]]:
        """What the guard did while a stage trained, in order; see training/guard/corrections.py."""
        found = self.get(id)
        return (found.read_json("aux/corrections.json") if found else None) or []

    def samples(self, count: int) -> list[dict[str, Any]]:
        """The first held-out prompts with the answers of every model, in the order in which they were measured.

        The stages sft and rlhf each wrote the answers of two models; they are joined by prompt.
        """
        rows: dict[str, dict[str, Any]] = {}
        for id in ("rlhf", "sft"):
            found = self.get(id)
            for line in found.read_lines("aux/samples.jsonl") if found else []:
                row = rows.setdefault(
                    line["prompt"],
                    {"prompt": line["prompt"], "reference": line.get("reference", ""), "answers": {}, "rewards": {}},
                )
                for model, answer in line.get("answers", {}).items():
                    row["answers"].setdefault(model, answer)
                row["rewards"] |= line.get("rewards") or {}
        # Prompts that every model answered come first; the order is otherwise that of the files.
        ordered = sorted(rows.values(), key=lambda row: -len(row["answers"]))
        return ordered[:count]

    def paired(self, first: str, second: str) -> list[Paired]:
        """For each task that both models took: the difference of their accuracies over the same items."""
        a, b = self.get(f"benchmarks_{first}"), self.get(f"benchmarks_{second}")
        if a is None or b is None:
            return []
        compared = []
        for task in sorted(self.results("benchmarks", first).get("tasks", {})):
            left, right = (
                {row["doc_id"]: row["acc"] for row in one.read_lines(f"aux/samples_{task}.jsonl") if "acc" in row}
                for one in (a, b)
            )
            if not left or left.keys() != right.keys():
                continue
            better = sum(right[i] > left[i] for i in left)
            worse = sum(right[i] < left[i] for i in left)
            both = sum(right[i] == left[i] == 1 for i in left)
            difference = difference_of_paired_proportions(both, better, worse, len(left) - both - better - worse)
            compared.append(Paired(task, first, second, difference, mcnemar_p_value(better, worse)))
        return compared
