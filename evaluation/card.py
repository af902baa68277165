"""The model card, in the sections of Mitchell et al. 2019, written from the manifests of a model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.artifacts import Artifact
from evaluation.config import RegisterConfig
from evaluation.gates import Verdict

ROLES = {
    "ingest": "text that was read",
    "clean": "text after the quality rules",
    "dedupe": "text without duplicates",
    "decontaminate": "text without the benchmarks' test items",
    "mix": "text in the proportions asked for",
    "shard": "token shards",
    "instructions": "instruction pairs",
    "preferences": "preference pairs",
    "pretrain": "pretraining",
    "base_model": "an existing model that was taken over",
    "sft": "supervised fine-tuning on instructions",
    "reward_model": "a reward model learnt from preferences",
    "rlhf": "reinforcement learning (PPO) against the reward model",
}
DATA = ("ingest", "clean", "dedupe", "decontaminate", "mix", "shard", "instructions", "preferences")
TRAINING = ("pretrain", "base_model", "sft", "reward_model", "rlhf")


def model_card(
    config: RegisterConfig,
    name: str,
    model: Artifact,
    family: Sequence[Artifact],
    evaluations: Mapping[str, Artifact],
    verdicts: Sequence[Verdict],
) -> str:
    """The card as Markdown. It names no time and no machine, so that the same family gives the same card.

    family: the model's ancestors, itself included. evaluations: benchmarks and safety artifacts by stage id.
    """
    sections = [
        f"# Model card: {name}",
        _details(config, name, model, family),
        _intended_use(config),
        _factors(evaluations),
        _metrics(evaluations),
        _evaluation_data(evaluations),
        _training_data(family),
        _training(family),
        _quantitative_analyses(evaluations, verdicts),
        _ethical_considerations(evaluations),
        _caveats(evaluations),
    ]
    return "\n\n".join(sections) + "\n"


def _details(config: RegisterConfig, name: str, model: Artifact, family: Sequence[Artifact]) -> str:
    manifest = model.manifest
    trained = [one for one in family if one.stage in TRAINING]
    lines = [
        "## Model details",
        "",
        f"- Name: {name}",
        f"- Made by: {'; '.join(f'{one.label}, {ROLES[one.stage]}' for one in trained) or model.stage}",
        f"- Architecture: {_architecture(model)}",
    ]
    if manifest:
        lines += [
            f"- Artifact: `{manifest.stage}/{manifest.fingerprint}`, digest `{manifest.digest}`",
            f"- Code: commit `{manifest.code.get('commit') or 'unknown'}`"
            + (" with uncommitted changes" if manifest.code.get("dirty") else "")
            + (f", lock `{manifest.lock_hash[:16]}`" if manifest.lock_hash else ""),
        ]
    return "\n".join([*lines, f"- Licence: {config.licence or 'none was given'}"])


def _architecture(model: Artifact) -> str:
    config = model.read_json("config.json")
    if not config:
        return "unknown (no config.json)"
    fields = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "vocab_size": "vocabulary",
        "max_position_embeddings": "context",
    }
    said = [f"{label} {config[key]:,}" for key, label in fields.items() if isinstance(config.get(key), int)]
    return ", ".join([str(config.get("model_type", "unknown type")), *said])


def _intended_use(config: RegisterConfig) -> str:
    return f"""## Intended use

{config.intended_use}

Out of scope: decisions about people, advice that someone relies on, text that is published as if a person had written
or checked it. What the model writes is likely, not true."""


def _factors(evaluations: Mapping[str, Artifact]) -> str:
    results = [one.read_json("results.json") or {} for one in evaluations.values()]
    categories = sorted({c for found in results for c in found.get("bias", {}).get("by_category", {})})
    kinds = sorted({k for found in results for k in found.get("toxicity", {}).get("by_kind", {})})
    lines = ["## Factors", ""]
    lines.append(f"- Groups whose stereotypes were probed: {', '.join(categories) or 'none'}.")
    lines.append(f"- Kinds of prompts that toxicity was measured on: {', '.join(kinds) or 'none'}.")
    return "\n".join([*lines, "- Language: whatever the training text holds; every probe is in English."])


def _metrics(evaluations: Mapping[str, Artifact]) -> str:
    lines = ["## Metrics", ""]
    if any(one.stage.startswith("benchmarks") for one in evaluations.values()):
        lines.append("- Accuracy of each benchmark by lm-eval, log-likelihood scoring, with its Wilson interval.")
    if any(one.stage.startswith("safety") for one in evaluations.values()):
        lines += [
            "- Expected maximum toxicity and toxicity probability over several continuations of each prompt (Gehman "
            "et al. 2020); bootstrap and Wilson intervals over prompts.",
            "- Stereotype score: percent of sentence pairs whose stereotyping member is likelier; 50 is no preference "
            "(after Nangia et al. 2020).",
            "- Memorised share: training sequences that greedy decoding recites from their start, beside validation "
            "sequences as a control (Carlini et al. 2022).",
        ]
    return "\n".join([*lines, "- Intervals are at 95 % unless the stage's config says otherwise."])


def _evaluation_data(evaluations: Mapping[str, Artifact]) -> str:
    lines = ["## Evaluation data", ""]
    for name, one in evaluations.items():
        manifest = one.manifest
        sources = [f"`{source.key}` ({source.digest[:12]})" for source in manifest.sources] if manifest else []
        lines.append(f"- {name}: {', '.join(sources) or 'sources not recorded'}")
    if not evaluations:
        lines.append("The model was not evaluated in this pipeline.")
    return "\n".join(lines)


def _training_data(family: Sequence[Artifact]) -> str:
    lines = ["## Training data", ""]
    for one in family:
        if one.stage not in DATA or one.manifest is None:
            continue
        lines.append(f"- {ROLES[one.stage]}: {one.headline} (`{one.stage}/{one.manifest.fingerprint}`)")
        lines += [f"  - source `{source.key}`, digest `{source.digest}`" for source in one.manifest.sources]
    if len(lines) == 2:
        lines.append("The training data is not part of this pipeline.")
    return "\n".join(lines)


def _training(family: Sequence[Artifact]) -> str:
    lines = ["## Training", ""]
    for one in family:
        if one.stage in TRAINING and one.manifest is not None:
            lines += [f"### {one.label}: {one.headline}", ""]
            if one.branch:
                lines += [f"Goes on from {one.branch}.", ""]
                lines += [f"- {changed}" for changed in one.branch.changed or ()] + [""] * bool(one.branch.changed)
            lines += ["```json", _config(one.manifest.config), "```", ""]
    return "\n".join(lines).rstrip()


def _config(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False)


def _quantitative_analyses(evaluations: Mapping[str, Artifact], verdicts: Sequence[Verdict]) -> str:
    lines = ["## Quantitative analyses", "", "| figure | value | interval |", "|---|---:|---|"]
    for stage, one in evaluations.items():
        figures = one.figures
        for name in figures:
            if name.endswith(("_low", "_high")):
                continue
            low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
            interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
            lines.append(f"| {stage}.{name} | {figures[name]:.4g} | {interval} |")
    lines += ["", "Gates:" if verdicts else "No gates were set."]
    for verdict in verdicts:
        word = "kept" if verdict.passed else "broken"
        lines.append(f"- {verdict.gate.figure} = {verdict.value:.4g}, {verdict.bound}: {word}")
    return "\n".join(lines)


def _ethical_considerations(evaluations: Mapping[str, Artifact]) -> str:
    lines = [
        "## Ethical considerations",
        "",
        "- The training text was filtered for quality, not for what it says of people; the model may repeat it.",
    ]
    limits = sorted(
        {
            found["toxicity"]["limits"]
            for one in evaluations.values()
            if (found := one.read_json("results.json") or {}).get("toxicity")
        }
    )
    lines += [f"- Toxicity was scored by a classifier. {limit}" for limit in limits]
    return "\n".join([*lines, "- A low score of a probe is no proof that a model is harmless."])


def _caveats(evaluations: Mapping[str, Artifact]) -> str:
    lines = ["## Caveats and recommendations", ""]
    for stage, one in evaluations.items():
        for task, metrics in (one.read_json("results.json") or {}).get("tasks", {}).items():
            accuracy = metrics.get("acc", {})
            if "chance" in accuracy and accuracy.get("low", 1) <= accuracy["chance"]:
                lines.append(f"- {stage}: {task} cannot be told from guessing ({100 * accuracy['chance']:.0f} %).")
    lines.append("- Measure the model on data of your own before you rely on any of these figures.")
    return "\n".join(lines)
