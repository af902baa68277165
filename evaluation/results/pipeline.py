"""Artifacts of a pipeline for the report: models by name, curves, answers, paired scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from evaluation.results.artifacts import Artifact, read_artifacts
from evaluation.results.comparison import (
    PairedAccuracy,
    PairedToxicity,
    headline_metric,
    paired_accuracy,
    paired_toxicity,
)
from evaluation.results.stage_order import MODELS

NAMES = {stage: stage for stage in MODELS} | {"pretrain": "base", "base_model": "base"}
"""Stages that make models that write text, with the name of the model of a pipeline's usual step."""

ROLES = {
    "sft": ("base", "sft"),
    "preference_tuning": ("reference", "policy"),
    "distill": ("student", "distilled"),
    "rlhf": ("sft", "rlhf"),
}
"""Names that a stage gives, in figures and samples, to its input model and to the model that it made."""

LONG_NAMES = {"base": "base model", "sft": "SFT model", "rlhf": "RLHF model"}
OTHER_STYLES = 5


def asked_in(line: Mapping[str, Any]) -> str:
    """Return the question of a line of samples: its prompt, for a conversation with all turns before it."""
    if not line.get("history"):
        return str(line["prompt"])
    turns = [*line["history"], {"role": "user", "content": line["prompt"]}]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


class PipelineResults:
    """Every finished artifact of the pipeline by stage id; any of them may be missing."""

    def __init__(self, inputs: Mapping[str, Path]) -> None:
        self.artifacts = read_artifacts(inputs)

    def get(self, id: str) -> Artifact | None:
        return self.artifacts.get(id)

    def figures(self, id: str) -> dict[str, float]:
        """Return the figures of a stage; empty if the pipeline has none of that name."""
        artifact = self.get(id)
        return artifact.figures if artifact else {}

    def steps(self, stage: str) -> list[str]:
        """Return the steps of a stage, the usual one first."""
        ids = [id for id, artifact in self.artifacts.items() if artifact.stage == stage or id == stage]
        return sorted(ids, key=lambda id: id != stage)

    @cached_property
    def _models(self) -> dict[str, Artifact]:
        by_name = {NAMES[id]: artifact for id, artifact in self.artifacts.items() if id in NAMES}
        other_models = {
            id: artifact for id, artifact in self.artifacts.items() if artifact.stage in NAMES and id not in NAMES
        }
        return {name: by_name[name] for name in dict.fromkeys(NAMES.values()) if name in by_name} | other_models

    @property
    def models(self) -> list[str]:
        """Models that the pipeline made: base, sft and rlhf for the usual steps, others by their step's name."""
        return list(self._models)

    def model(self, name: str) -> Artifact:
        """Return the artifact of a model by its name here."""
        return self._models[name]

    def by_address(self, stage: str, fingerprint: str) -> Artifact | None:
        """Return the artifact with this address; None if the pipeline does not have it."""
        return next(
            (
                artifact
                for artifact in self.artifacts.values()
                if artifact.manifest
                and (artifact.manifest.stage, artifact.manifest.fingerprint) == (stage, fingerprint)
            ),
            None,
        )

    def long_name(self, model: str) -> str:
        """Return the model's name in words."""
        return LONG_NAMES.get(model, model)

    def style(self, model: str) -> str:
        """Return the class of the style sheet for a model's colour."""
        other_models = [name for name in self._models if name not in LONG_NAMES]
        return model if model not in other_models else f"other{other_models.index(model) % OTHER_STYLES}"

    def legend(self, models: Sequence[str]) -> list[tuple[str, str]]:
        return [(self.long_name(name), self.style(name)) for name in models]

    def parent(self, model: str) -> str | None:
        """Return the model that this one was made from; None for the first, or if that model is not in the pipeline."""
        artifact = self._models.get(model)
        reference = artifact.manifest.inputs.get("model") if artifact and artifact.manifest else None
        return self._model_at(reference.stage, reference.fingerprint) if reference else None

    def _model_at(self, stage: str, fingerprint: str) -> str | None:
        return next(
            (
                name
                for name, artifact in self._models.items()
                if artifact.manifest
                and (artifact.manifest.stage, artifact.manifest.fingerprint) == (stage, fingerprint)
            ),
            None,
        )

    def roles(self, id: str) -> dict[str, str]:
        """Return a mapping from the names that a tuning step's figures and samples use for its two models to the
        models' names here."""
        before, after = ROLES[self.artifacts[id].stage if id not in ROLES else id]
        trained = NAMES.get(id, id)
        return {before: self.parent(trained) or before, after: trained}

    def first_and_last(self) -> list[tuple[str, str]]:
        """Return each model from which no other was made, paired with its first ancestor (ancestor, model)."""
        parents = {name: self.parent(name) for name in self._models}
        if not any(parents.values()):
            return [(self.models[0], self.models[-1])] if len(self.models) > 1 else []
        pairs = []
        for last in [name for name in self._models if name not in parents.values()]:
            first = last
            while parent := parents[first]:
                first = parent
            if first != last:
                pairs.append((first, last))
        return pairs

    def evaluation(self, kind: str, model: str) -> Artifact | None:
        """Return the benchmarks or safety artifact of a model; None if it was not measured."""
        if (usual := self.get(f"{kind}_{model}")) is not None and model in LONG_NAMES:
            return usual
        measured = [
            artifact for artifact in self.artifacts.values() if artifact.stage.startswith(kind) and artifact.manifest
        ]
        for artifact in measured:
            reference = artifact.manifest.inputs.get("model") if artifact.manifest else None
            if reference and self._model_at(reference.stage, reference.fingerprint) == model:
                return artifact
        return None

    def results(self, kind: str, model: str) -> dict[str, Any]:
        """Return results.json of benchmarks or safety for a model; empty if it was not measured."""
        artifact = self.evaluation(kind, model)
        return (artifact.read_json("results.json") if artifact else None) or {}

    def scores_of(self, model: str, task: str) -> dict[str, float]:
        """Return the entry of the metric of a task to read first, with the score of an untrained model of this shape as
        `untrained` if it is known; empty for a task without accuracy."""
        results = self.results("benchmarks", model)
        metric = headline_metric(results, task)
        entry = results.get("tasks", {}).get(task, {}).get(metric)
        if entry is None:
            return {}
        floor = results.get("untrained", {}).get(task, {}).get(metric, {})
        return {**entry, **({"untrained": floor["value"]} if floor else {})}

    def curve(self, id: str, name: str) -> list[tuple[float, float]]:
        """Return the (step, value) points of a metric, without points that are not finite.

        If a step was logged more than once, the last value counts: a training run that went back discarded the others.
        """
        artifact = self.get(id)
        points: dict[float, float] = {}
        for row in artifact.read_lines("aux/metrics.jsonl") if artifact else []:
            value = row.get("values", {}).get(name)
            if value is not None and row.get("step") is not None and math.isfinite(float(value)):
                points[float(row["step"])] = float(value)
        return sorted(points.items())

    def sampled(self, id: str) -> list[tuple[float, float]]:
        """Return the loss of the held-out sample that training evaluates; earlier versions used another name."""
        return self.curve(id, "validation/sample_loss") or self.curve(id, "validation/loss")

    def corrections(self, id: str) -> list[dict[str, Any]]:
        """Return the guard's actions while a stage trained, in order; see training/guard/corrections.py."""
        artifact = self.get(id)
        return (artifact.read_json("aux/corrections.json") if artifact else None) or []

    def samples(self, count: int) -> list[dict[str, Any]]:
        """Return the first held-out prompts with the answers of every model, in the order in which they were measured.

        Each tuning stage wrote the answers of two models; they are joined by prompt, including the turns before it.
        """
        rows: dict[str, dict[str, Any]] = {}
        for id in (*self.steps("rlhf"), *self.steps("preference_tuning"), *self.steps("distill"), *self.steps("sft")):
            artifact, roles = self.get(id), self.roles(id)
            for line in artifact.read_lines("aux/samples.jsonl") if artifact else []:
                row = rows.setdefault(
                    prompt := asked_in(line),
                    {
                        "prompt": prompt,
                        "reference": line.get("reference", ""),
                        "answers": {},
                        "rewards": {},
                        "verified": {},
                    },
                )
                for role, answer in line.get("answers", {}).items():
                    model = roles.get(role, role)
                    if model in row["answers"]:
                        continue
                    row["answers"][model] = answer
                    # Only for this answer: another step, or another line with this prompt, marked a different answer.
                    for field in ("verified", "rewards"):
                        if role in (line.get(field) or {}):
                            row[field][model] = line[field][role]
        # Prompts that every model answered come first; the order is otherwise that of the files.
        ordered = sorted(rows.values(), key=lambda row: -len(row["answers"]))
        return ordered[:count]

    def algorithm(self, id: str) -> str:
        """Return the method of an alignment, as in `Artifact.algorithm`."""
        artifact = self.get(id)
        return artifact.algorithm if artifact else "PPO"

    def scores(self, id: str, key: str, role: str) -> list[float]:
        """Return the scores of the answers of one of an alignment's two models, in the order of its held-out prompts.

        Args:
            key: `rewards` of the reward model, `judge` of the judge.
            role: one of the stage's ROLES. Empty if they are unknown.
        """
        artifact = self.get(id)
        lines = artifact.read_lines("aux/samples.jsonl") if artifact else []
        return [float(line[key][role]) for line in lines if role in (line.get(key) or {})]

    def input_steps(self, id: str, name: str) -> list[str]:
        """Return the steps whose artifact a step read as the input `name`; several if they share one artifact."""
        artifact = self.get(id)
        reference = artifact.manifest.inputs.get(name) if artifact and artifact.manifest else None
        return [
            step
            for step, artifact in self.artifacts.items()
            if reference and artifact.manifest and artifact.manifest.fingerprint == reference.fingerprint
        ]

    def judges(self) -> set[str]:
        """Return the reward models that judge an alignment and train none."""
        alignments = [*self.steps("rlhf"), *self.steps("preference_tuning")]
        judging = {step for id in alignments for step in self.input_steps(id, "judge")}
        return judging - {step for id in alignments for step in self.input_steps(id, "reward_model")}

    def paired(self, first: str, second: str) -> list[PairedAccuracy]:
        """Return the difference of accuracies over the same items for each task that both models took."""
        a, b = self.evaluation("benchmarks", first), self.evaluation("benchmarks", second)
        return paired_accuracy(a, b) if a and b else []

    def paired_toxicity(self, first: str, second: str) -> PairedToxicity | None:
        """Return the difference in toxicity over the same prompts; None if the models were asked differently."""
        a, b = self.evaluation("safety", first), self.evaluation("safety", second)
        return paired_toxicity(a, b) if a and b else None
