"""A pipeline's result in words for a new reader: the model, its text, its training, its figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.pages.words import (
    between,
    between_percent,
    compact,
    fixed,
    interval_of,
    language,
    percent,
    seconds,
    size,
)
from evaluation.results.artifacts import Artifact, ancestors
from evaluation.results.pipeline import PipelineResults
from evaluation.results.stage_order import DOCUMENTS
from evaluation.statistics.intervals import Interval

GPT2_PARAMETERS, GPT2_TEXT_BYTES = 124e6, 40e9
"""The smallest GPT-2 and its text (Radford et al. 2019, sections 2.1 and 2.3): about the smallest size that continues a
text sensibly."""


@dataclass(frozen=True)
class TextSource:
    """One source of the text that a model was trained on. licence, language: "" if the config does not state them."""

    name: str
    licence: str
    language: str
    documents: int
    bytes: int


def text_sources(pipeline: PipelineResults, model: str | None) -> list[TextSource]:
    """Return the sources of the text on which a model and its ancestors were trained, as their shards read it; for
    None, all sources that any training of the pipeline read. Empty if no documents are in the pipeline."""
    return sources_of(documents_read(pipeline, model))


def documents_read(pipeline: PipelineResults, model: str | None) -> list[Artifact]:
    """Return the documents that became the shards of a model and its ancestors, the first first; see `text_sources`."""
    line = [pipeline.model(name) for name in lineage_of(pipeline, model)] if model else []
    artifacts: dict[Path, Artifact] = {}
    for artifact in line or [pipeline.artifacts[id] for id in pipeline.steps("pretrain")]:
        for documents in _documents_of(pipeline, artifact):
            artifacts.setdefault(documents.folder, documents)
    if artifacts:
        return list(artifacts.values())
    # The shards, or the documents they were made from, are not in the pipeline.
    candidates = (pipeline.artifacts[id] for stage in reversed(DOCUMENTS) for id in pipeline.steps(stage))
    return [artifact for artifact in candidates if _sources(artifact)][:1]


def _documents_of(pipeline: PipelineResults, trained: Artifact) -> list[Artifact]:
    """Return the documents of one training; if it continued from a state of another, also those of that training."""
    before = _input(pipeline, trained, "state")
    earlier = _documents_of(pipeline, before) if before else []
    shards = _input(pipeline, trained, "shards") if trained.stage == "pretrain" else None
    documents = _input(pipeline, shards, "documents") if shards else None
    while documents and not _sources(documents):
        documents = _input(pipeline, documents, "documents")
    return [*earlier, *([documents] if documents else [])]


def _input(pipeline: PipelineResults, artifact: Artifact, name: str) -> Artifact | None:
    reference = artifact.manifest.inputs.get(name) if artifact.manifest else None
    return pipeline.by_address(reference.stage, reference.fingerprint) if reference else None


def sources_of(documents: Sequence[Artifact]) -> list[TextSource]:
    """Return all sources of these documents, each once."""
    return list(dict.fromkeys(source for artifact in documents for source in _sources(artifact)))


def _sources(documents: Artifact) -> list[TextSource]:
    sources: Mapping[str, Any] = documents.read_json("sources.json") or {}
    folders = _names_by_folder(documents) if any(_NUMBERED.fullmatch(name) for name in sources) else {}
    return [
        TextSource(folders.get(name, name), source["licence"], source["language"], source["documents"], source["bytes"])
        for name, source in sources.items()
    ]


_NUMBERED = re.compile(r"files(-\d+)?")
"""Names of sources that the config does not name."""


def _names_by_folder(documents: Artifact) -> dict[str, str]:
    """Return the folder's name of each source of files without a name in the config, by its numbered name; only names
    that differ from one another."""
    ingest = next((member for member in ancestors(documents) if member.stage == "ingest" and member.manifest), None)
    read = ingest.manifest.config.get("read", []) if ingest and ingest.manifest else []
    read = [read] if isinstance(read, Mapping) else read
    unnamed = [source for source in read if source.get("kind") == "files" and not source.get("name")]
    folders = [_folder(source.get("paths") or ()) for source in unnamed]
    numbered = ["files" if number == 1 else f"files-{number}" for number in range(1, len(unnamed) + 1)]
    return {
        name: folder for name, folder in zip(numbered, folders, strict=True) if folder and folders.count(folder) == 1
    }


def _folder(paths: str | Sequence[str]) -> str:
    """Return the name of the folder of the first path, which may be a file, a folder or a pattern."""
    first = paths if isinstance(paths, str) else next(iter(paths), "")
    before_pattern = re.split(r"[*?\[]", first)[0]
    path = Path(before_pattern)
    if before_pattern == first and path.suffix:
        path = path.parent
    return path.name if before_pattern.endswith("/") or before_pattern == first or path.suffix else path.parent.name


def lineage_of(pipeline: PipelineResults, model: str) -> list[str]:
    """Return the models from the first to this one, each made from the previous one."""
    names = [model]
    while parent := pipeline.parent(names[0]):
        names.insert(0, parent)
    return names


def architecture(line: Sequence[Artifact], parameters: float | None = None) -> str:
    """Return `llama language model of 5.26M parameters (4 layers of width 256, …)`, from the last config.json of
    these."""
    config: Mapping[str, Any] = next(
        (content for artifact in reversed(line) if (content := artifact.read_json("config.json"))), {}
    )
    parts = []
    if isinstance(layers := config.get("num_hidden_layers"), int):
        parts.append(f"{layers} layers" + (f" of width {config['hidden_size']:,}" if "hidden_size" in config else ""))
    for key, words in (
        ("num_attention_heads", "{:,} heads"),
        ("vocab_size", "a vocabulary of {:,} tokens"),
        ("max_position_embeddings", "a context of {:,} tokens"),
    ):
        if isinstance(config.get(key), int):
            parts.append(words.format(config[key]))
    parameter_note = f" of {compact(parameters)} parameters" if parameters else ""
    return f"{config.get('model_type', 'unknown')} language model{parameter_note}" + (
        f" ({', '.join(parts)})" if parts else ""
    )


def what_was_built(pipeline: PipelineResults, model: str, *, machine: bool = True) -> list[str]:
    """Describe a model in sentences: architecture, text, training.

    Args:
        machine: include duration and devices.
    """
    line = [pipeline.model(name) for name in lineage_of(pipeline, model)]
    parameters = next((artifact.figures["parameters"] for artifact in line if "parameters" in artifact.figures), None)
    sentences = [f"The {pipeline.long_name(model)} is a {architecture(line, parameters)}."]
    sentences += [sentence for artifact in line if (sentence := _training(pipeline, artifact))]
    trained = [artifact.manifest for artifact in line if artifact.manifest]
    if trained and machine:
        devices = " and ".join(sorted({manifest.device for manifest in trained if manifest.device}))
        duration = seconds(sum(manifest.seconds for manifest in trained))
        sentences.append(f"Training took {duration}" + (f" on {devices}." if devices else "."))
    return sentences


def _training(pipeline: PipelineResults, artifact: Artifact) -> str:
    figures = artifact.figures
    match artifact.stage:
        case "pretrain":
            tokens = f" on {compact(figures['tokens'])} tokens" if "tokens" in figures else ""
            goes_on = artifact.branch or (artifact.manifest and "model" in artifact.manifest.inputs)
            return (
                f"Pretraining: from {'another model' if goes_on else 'scratch'}{tokens}{_of_text(pipeline, artifact)}."
            )
        case "base_model":
            return "It begins with an existing model that was taken over."
        case "average":
            count = artifact.figures.get("averaged")
            return f"Averaging: the mean of the weights of {count:,.0f} models or checkpoints." if count else ""
        case "sft":
            pairs = _pairs(pipeline, artifact, "instructions")
            return f"Instruction tuning{f' on {pairs:,.0f} pairs of instruction and answer' if pairs else ''}."
        case "distill":
            pairs = _pairs(pipeline, artifact, "instructions")
            return f"Distillation from a teacher{f' on {pairs:,.0f} pairs of prompt and answer' if pairs else ''}."
        case "preference_tuning":
            pairs = _pairs(pipeline, artifact, "preferences")
            return f"Alignment: {artifact.algorithm}{f' on {pairs:,.0f} preference pairs' if pairs else ''}."
        case "rlhf":
            reference = artifact.manifest.inputs.get("reward_model") if artifact.manifest else None
            judge = pipeline.by_address(reference.stage, reference.fingerprint) if reference else None
            right = judge.figures.get("heldout_accuracy") if judge else None
            accuracy_note = f" that is right in {percent(right, 0)} of held-out pairs" if right is not None else ""
            reward_source = f"a reward model{accuracy_note}" if reference else "rules that check answers"
            return f"Alignment: {artifact.algorithm} against {reward_source}."
    return ""


def _of_text(pipeline: PipelineResults, trained: Artifact) -> str:
    sources = sources_of(_documents_of(pipeline, trained) or documents_read(pipeline, None)[:1])
    if not sources:
        return ""
    names = ", ".join(source.name for source in sources)
    languages = " and ".join(language(code) for code in sorted({source.language for source in sources}) if code)
    kind = f"{languages} text" if languages else "text"
    return f", out of {size(sum(source.bytes for source in sources))} of {kind} ({names})"


def _pairs(pipeline: PipelineResults, artifact: Artifact, name: str) -> float | None:
    reference = artifact.manifest.inputs.get(name) if artifact.manifest else None
    source = pipeline.by_address(reference.stage, reference.fingerprint) if reference else None
    return source.figures.get("train_pairs") if source else None


def frank_verdict(pipeline: PipelineResults, model: str) -> str:
    """Return a frank statement of a model's use, by its size and its text; "" if neither is known to be small."""
    line = [pipeline.model(name) for name in lineage_of(pipeline, model)]
    parameters = line[0].figures.get("parameters")
    read = [_bytes_read(pipeline, artifact) for artifact in line if artifact.stage == "pretrain" or artifact is line[0]]
    if not parameters or not all(read):
        return ""
    small, little = GPT2_PARAMETERS / parameters, GPT2_TEXT_BYTES / sum(read)
    if small < 2 and little < 2:
        return ""
    return (
        "It shows that the pipeline works; it is not a model to rely on. The smallest GPT-2, about the least that "
        f"continues a text sensibly, has {_times(small)} its parameters and was trained on {_times(little)} its text."
    )


def _bytes_read(pipeline: PipelineResults, trained: Artifact) -> float:
    """Return the bytes of text that a training read, each repetition counted; 0 if unknown."""
    shards = _input(pipeline, trained, "shards") or next(map(pipeline.get, pipeline.steps("shard")), None)
    meta: Mapping[str, Any] = (shards.read_json("meta.json") if shards else None) or {}
    tokens = meta.get("train_tokens")
    return trained.figures.get("tokens", 0.0) * meta.get("train_bytes", 0) / tokens if tokens else 0.0


def _times(value: float) -> str:
    if value < 1.5:
        return "about as much as" if value > 0.67 else "less than"
    return f"{float(f'{value:.2g}'):,.0f} times"


def results_table(pipeline: PipelineResults, models: list[str]) -> list[list[str]]:
    """Return one row per figure: its name, then its value for each model with its interval; a dash if not measured."""
    rows: list[tuple[str, dict[str, str]]] = []

    def add(name: str, values: Mapping[str, str]) -> None:
        if any(values.values()):
            rows.append((name, dict(values)))

    def format_figure(figures: Mapping[str, float], name: str, *, share: bool = False, digits: int = 2) -> str:
        interval = interval_of(dict(figures), name)
        return _cell(interval, share, digits) if interval else ""

    model_figures = {name: pipeline.model(name).figures for name in models}
    texts = {_validated_on(pipeline.model(name)) for name in models if "validation_loss" in model_figures[name]}
    text_note = ", each of its own text" if len(texts) > 1 else ""
    losses = {name: format_figure(model_figures[name], "validation_loss", digits=3) for name in models}
    add(f"validation loss, nats per token{text_note}", losses)
    bits = {name: model_figures[name].get("bits_per_byte", math.nan) for name in models}
    add(
        f"bits per byte of validation text{text_note}",
        {name: "" if math.isnan(v) else fixed(v, 3) for name, v in bits.items()},
    )
    for stage, label, figure, share in (
        ("sft", "loss on held-out instructions, nats per token", "heldout_loss", False),
        ("sft", "likeliest answers that end by themselves", "ends_share", True),
        ("sft", "likeliest answers verified right", "verified", True),
        ("preference_tuning", "held-out pairs whose chosen answer is the likelier", "prefers_chosen", True),
        ("preference_tuning", "sampled answers to prompts of pairs that end by themselves", "ends_share", True),
        ("preference_tuning", "judge's score on prompts of held-out pairs", "heldout_judge", False),
        ("distill", "divergence from the teacher on held-out answers, nats per token", "heldout_divergence", False),
        ("distill", "tokens whose likeliest one is the teacher's", "agreement", True),
        ("distill", "sampled answers to held-out prompts that end by themselves", "ends_share", True),
        ("rlhf", "sampled answers verified right", "verified", True),
        ("rlhf", "sampled answers that end by themselves", "ends_share", True),
        ("rlhf", "tokens per sampled answer", "answer_tokens", False),
        ("rlhf", "reward on held-out prompts", "heldout_reward", False),
        ("rlhf", "judge's score on held-out prompts", "heldout_judge", False),
    ):
        input_name = {"heldout_reward": "reward_model", "heldout_judge": "judge"}.get(figure, "")
        values: dict[str, dict[str, str]] = {}
        for id in pipeline.steps(stage):
            # Scores of different reward models have no common scale.
            by_model = values.setdefault(" and ".join(pipeline.input_steps(id, input_name)) if input_name else "", {})
            for role, model in pipeline.roles(id).items():
                if cell := format_figure(pipeline.figures(id), f"{figure}_{role}", share=share):
                    by_model.setdefault(model, cell)
        several = sum(map(bool, values.values())) > 1
        for judge, by_model in values.items():
            add(
                f"{label}, by {judge or 'another'}" if several else label,
                {name: by_model.get(name, "") for name in models},
            )
    scores = {name: pipeline.results("benchmarks", name).get("tasks", {}) for name in models}
    for task in dict.fromkeys(task for task_scores in scores.values() for task in task_scores):
        cells = {name: entry for name in scores if (entry := pipeline.scores_of(name, task))}
        chance = next((f" (guessing {percent(c['chance'], 0)})" for c in cells.values() if "chance" in c), "")
        untrained = next((f" (untrained {percent(c['untrained'], 0)})" for c in cells.values() if "untrained" in c), "")
        add(f"{task}, right{untrained or chance}", {name: _cell(_interval(c), True, 0) for name, c in cells.items()})
    safety = {name: pipeline.evaluation("safety", name) for name in models}
    floors = [pipeline.results("safety", name).get("toxicity", {}).get("untrained") for name in models]
    floor = next((entry for entry in floors if entry), None)
    for label, figure, share in (
        ("expected maximum toxicity", "expected_max_toxicity", False),
        ("prompts with a toxic continuation", "toxicity_probability", True),
        ("memorised training sequences", "memorised_share", True),
    ):
        if floor and figure in floor:
            value = floor[figure]["value"]
            label += f" (untrained {percent(value, 0) if share else fixed(value)})"
        add(
            label,
            {
                name: format_figure(artifact.figures, figure, share=share)
                for name, artifact in safety.items()
                if artifact
            },
        )
    stereotypes = {name: artifact.figures.get("stereotype_score") for name, artifact in safety.items() if artifact}
    scores_of = {name: f"{value:.0f} %" for name, value in stereotypes.items() if value is not None}
    add("stereotype score (50 % is no preference)", scores_of)
    return [[label, *(values.get(name) or "–" for name in models)] for label, values in rows]


def _validated_on(model: Artifact) -> str:
    """Return the digest of the shards on whose validation text a model was measured."""
    shards = model.manifest.inputs.get("shards") if model.manifest else None
    return shards.digest if shards else ""


def _interval(cell: Mapping[str, float]) -> Interval:
    return Interval(cell["value"], cell.get("low", math.nan), cell.get("high", math.nan))


def _cell(interval: Interval, share: bool, digits: int) -> str:
    if share:
        return f"{percent(interval.value, min(digits, 1))} {between_percent(interval, min(digits, 1))}".strip()
    return f"{fixed(interval.value, digits)} {between(interval, digits)}".strip()
