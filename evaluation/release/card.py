"""The model card in the format of the Hugging Face hub: front matter, then the parts that a user needs, then the rest.

Its content follows Mitchell et al. 2019, its order the hub's template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corpus.model_folders.licence import stated_licence
from evaluation.config import RegisterConfig
from evaluation.pages.summary import (
    TextSource,
    architecture,
    documents_read,
    frank_verdict,
    results_table,
    sources_of,
    text_sources,
    what_was_built,
)
from evaluation.pages.words import size
from evaluation.release.elsewhere import WRITE, auto_class
from evaluation.release.gates import Verdict
from evaluation.results.artifacts import Artifact, ancestors
from evaluation.results.comparison import headline_metric
from evaluation.results.pipeline import PipelineResults
from evaluation.results.stage_order import DOCUMENTS, PAIRS, WEIGHTS

DATA_KINDS = ("documents", "shards", "instructions", "preferences")
"""Kinds of artifacts that data stages of installed packages make."""
SAMPLES = 3
SAMPLE_CHARACTERS = 400
LICENCES = (
    *(
        "apache-2.0",
        "mit",
        "openrail",
        "bsd-2-clause",
        "bsd-3-clause",
        "cc0-1.0",
        "cc-by-2.0",
        "cc-by-3.0",
        "cc-by-4.0",
    ),
    *("cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "gpl-2.0", "gpl-3.0"),
    *("agpl-3.0", "lgpl-3.0", "mpl-2.0", "unlicense", "odc-by", "unknown"),
)
"""Identifiers known to the hub that a user's own model may have; any other licence is written as a name."""


def model_card(
    config: RegisterConfig, name: str, model: Artifact, inputs: Mapping[str, Artifact], verdicts: Sequence[Verdict]
) -> str:
    """Return the card as Markdown. It names no time and no machine, so that the same pipeline gives the same card.

    Args:
        inputs: inputs of the stage register, by input name: `model` itself, its evaluations by stage id.
    """
    line = ancestors(model) or [model]
    folders = {_name(artifact): artifact.folder for artifact in line}
    evaluations = {
        key: artifact for key, artifact in inputs.items() if artifact.stage.startswith(("benchmarks", "safety"))
    }
    folders |= {key: artifact.folder for key, artifact in inputs.items() if key != "model" and key not in folders}
    pipeline = PipelineResults(folders)
    model_name = _name(model)
    last = next(
        (candidate for candidate in pipeline.models if pipeline.model(candidate).folder == folders.get(model_name)),
        None,
    )
    sections = [
        _front_matter(config, name, model, pipeline, last, evaluations),
        f"# {name}",
        _summary(pipeline, last, model),
        _usage(config, model),
        _data(pipeline, last, line),
        _results(pipeline, evaluations, verdicts),
        _limits(evaluations),
        _samples(pipeline),
        _origin(model, line, evaluations),
        _settings(line),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _name(artifact: Artifact) -> str:
    return (artifact.manifest.step or artifact.manifest.stage) if artifact.manifest else artifact.id


def _front_matter(
    config: RegisterConfig,
    name: str,
    model: Artifact,
    pipeline: PipelineResults,
    model_name: str | None,
    evaluations: Mapping[str, Artifact],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    licence = config.licence.lower() or "unknown"
    stated = {} if config.licence else stated_licence(model.folder)  # of the model that it was made from
    languages = sorted({source.language for source in text_sources(pipeline, model_name) if source.language})
    of_model = next((artifact for artifact in evaluations.values() if _is_about(artifact, model)), None)
    measured = (of_model.read_json("results.json") or {}) if of_model else {}
    results = [
        EvalResult(
            "text-generation",
            task,
            task,
            "accuracy" if metric == "acc" else metric,
            round(metrics[metric]["value"], 4),
        )
        for task, metrics in measured.get("tasks", {}).items()
        if (metric := headline_metric(measured, task)) in metrics
    ]
    described = model.read_json("config.json") or {}
    kind = described.get("model_type")
    data = ModelCardData(
        language=languages or None,
        library_name="transformers",
        pipeline_tag=auto_class(described)[1],
        tags=["stemma", *([kind] if kind else [])],
        model_name=name if results else None,
        eval_results=results or None,
        license=stated.get("license") or (licence if licence in LICENCES else "other"),
        license_name=stated.get("license_name") or (None if licence in LICENCES else config.licence),
        license_link=stated.get("license_link"),
    )
    return f"---\n{data.to_yaml().rstrip()}\n---"


def _is_about(artifact: Artifact, model: Artifact) -> bool:
    """Return True if these are benchmarks of this model."""
    reference = (
        artifact.manifest.inputs.get("model") if artifact.manifest and artifact.stage.startswith("benchmarks") else None
    )
    return bool(reference and model.manifest and reference.digest == model.manifest.digest)


def _summary(pipeline: PipelineResults, model_name: str | None, model: Artifact) -> str:
    if model_name is None:
        return f"A {architecture([model])}, whose origin is not part of this pipeline."
    paragraphs = [" ".join(what_was_built(pipeline, model_name, machine=False))]
    return "\n\n".join(filter(None, [*paragraphs, frank_verdict(pipeline, model_name)]))


def _usage(config: RegisterConfig, model: Artifact) -> str:
    tokenizer = model.read_json("tokenizer_config.json") or {}
    has_template = "chat_template" in tokenizer or (model.folder / "chat_template.jinja").is_file()
    auto, _ = auto_class(model.read_json("config.json") or {})
    message = '{"role": "user", "content": "Explain in one sentence what a list is."}'
    if auto not in WRITE and has_template:
        prompt = f"""messages = [
    {message},
    {{"role": "assistant", "content": "A list is an ordered collection of items."}},
]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)"""
    elif has_template and model.stage in ("sft", "preference_tuning", "distill", "rlhf"):
        prompt = f"""messages = [{message}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
    else:
        prompt = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    # Folders of earlier versions stay unchanged in a store: their tokenizers also return `token_type_ids`.
    call_arguments = 'inputs["input_ids"], attention_mask=inputs["attention_mask"]'
    if auto == "AutoModelForCausalLM":
        output = f"""output = model.generate({call_arguments}, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
    elif auto == "AutoModelForSeq2SeqLM":
        output = f"""output = model.generate({call_arguments}, max_new_tokens=64)
print(tokenizer.decode(output[0]))"""
    else:
        output = f"print(model({call_arguments}).logits)"
    return f"""## Use

```python
from transformers import {auto}, AutoTokenizer

folder = "."  # this model's folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto}.from_pretrained(folder)
{prompt}
{output}
```

{config.intended_use}

Out of scope: decisions about people, advice that someone relies on, text that is published as if a person had written \
or checked it. What the model writes is likely, not true."""


def _data(pipeline: PipelineResults, model_name: str | None, line: Sequence[Artifact]) -> str:
    sources = text_sources(pipeline, model_name)
    lines = ["## Data", ""]
    if sources:
        lines += ["| source | language | licence | documents | text |", "|---|---|---|---:|---:|"]
        lines += [_source_row(source) for source in sources]
        if unstated := [source.name for source in sources if not source.licence]:
            it = "this source" if len(unstated) == 1 else "these sources"
            lines += [
                "",
                f"No licence is stated for {' and '.join(unstated) if len(unstated) < 3 else ', '.join(unstated)}. "
                f"Before you publish the model, find out under which licence the text of {it} may be used.",
            ]
        lines.append("")
    data_steps = [
        artifact
        for artifact in line
        if (artifact.stage in (*DOCUMENTS, "shard", *PAIRS) or artifact.installed_kind in DATA_KINDS)
        and artifact.headline
    ]
    lines += [f"- {artifact.label}: {artifact.headline}" for artifact in data_steps]
    if len(lines) == 2:
        return "## Data\n\nThe training data is not part of this pipeline."
    return "\n".join([*lines, *_cleaning(pipeline, model_name, line)])


def _source_row(source: TextSource) -> str:
    # A licence may be any text; a line end or a bar in it would break the Markdown table.
    stated = [" ".join(text.split()).replace("|", "\\|") or "not stated" for text in (source.language, source.licence)]
    return f"| {source.name} | {' | '.join(stated)} | {source.documents:,} | {size(source.bytes)} |"


def _cleaning(pipeline: PipelineResults, model_name: str | None, line: Sequence[Artifact]) -> list[str]:
    """Return lines about the text's filters, from the config of the cleaning; separate lines for texts that were
    cleaned differently."""
    if not any(artifact.stage == "ingest" or artifact.stage == "clean" for artifact in line):
        return []
    read = documents_read(pipeline, model_name)
    sources_by_rules: dict[str, list[str]] = {}
    for documents in read:
        cleaned = next((artifact for artifact in reversed(ancestors(documents)) if artifact.stage == "clean"), None)
        names = [source.name for source in sources_of([documents])]
        sources_by_rules.setdefault(_rules_of(cleaned), []).extend(names)
    if len(sources_by_rules) < 2:
        cleaned = next((artifact for artifact in line if artifact.stage == "clean"), None)
        return [f"- The text {next(iter(sources_by_rules), _rules_of(cleaned))}"]
    return [f"- The text of {', '.join(dict.fromkeys(names))} {rules}" for rules, names in sources_by_rules.items()]


def _rules_of(cleaned: Artifact | None) -> str:
    if cleaned is None or cleaned.manifest is None:
        return "was not filtered."
    toxic, personal = (cleaned.manifest.config.get(key) is not None for key in ("toxicity", "personal_data"))
    statements = ["toxic text was filtered by a classifier" if toxic else "not for statements about people"]
    statements.append("personal data was looked for by pattern" if personal else "personal data was not looked for")
    return f"was filtered for quality; {'; '.join(statements)}. The model may repeat what it read."


def _results(pipeline: PipelineResults, evaluations: Mapping[str, Artifact], verdicts: Sequence[Verdict]) -> str:
    models = pipeline.models
    rows = results_table(pipeline, models)
    lines = ["## Results", ""]
    if rows:
        lines += [f"| | {' | '.join(map(pipeline.long_name, models))} |", "|---|" + "---:|" * len(models)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", "In brackets: 95 % intervals, unless a stage's config sets another level."]
    else:
        lines.append("The model was not evaluated in this pipeline.")
    if any(artifact.stage.startswith("safety") for artifact in evaluations.values()):
        lines += [
            "",
            "Toxicity is scored on several continuations of each prompt (Gehman et al. 2020); the stereotype score is "
            "the share of sentence pairs whose stereotyping member is likelier (after Nangia et al. 2020); memorised "
            "is what greedy decoding recites of the training text from its start (Carlini et al. 2022).",
        ]
    if broken := sum(not verdict.passed for verdict in verdicts):
        notice = f"**This model was refused.** It broke {broken} of {len(verdicts)} gates and is recorded as rejected."
        lines += ["", notice]
    lines += ["", "Gates:" if verdicts else "No gates were set."]
    for verdict in verdicts:
        word = "kept" if verdict.passed else "broken"
        if verdict.gate.against:
            lines.append(f"- {verdict.gate.figure} is {verdict.finding}; expected {verdict.bound}: {word}")
        else:
            lines.append(f"- {verdict.gate.figure} = {verdict.value:.4g}, {verdict.bound}: {word}")
    return "\n".join(lines)


def _limits(evaluations: Mapping[str, Artifact]) -> str:
    lines = ["## Limits", ""]
    results = {key: artifact.read_json("results.json") or {} for key, artifact in evaluations.items()}
    for stage, result in results.items():
        for task, metrics in result.get("tasks", {}).items():
            metric = headline_metric(result, task)
            accuracy = metrics.get(metric, {})
            untrained = result.get("untrained", {}).get(task, {}).get(metric, {}).get("value")
            floor = accuracy.get("chance") if untrained is None else untrained
            word = "guessing" if untrained is None else "an untrained model"
            if floor is not None and accuracy.get("low", 1) <= floor:
                lines.append(f"- {stage}: {task} is not distinguishable from {word} ({100 * floor:.0f} %).")
    scorers = sorted({result["toxicity"]["limits"] for result in results.values() if result.get("toxicity")})
    lines += [f"- Toxicity was scored by a classifier. {limit}" for limit in scorers]
    lines += _probes(results, evaluations)
    lines.append("- A low score of a probe is not proof that a model is harmless.")
    lines.append("- Measure the model on data of your own before you rely on any of these figures.")
    return "\n".join(lines)


def _probes(results: Mapping[str, Any], evaluations: Mapping[str, Artifact]) -> list[str]:
    """Return lines with the probed groups and kinds of prompts, and their language."""
    categories = sorted({c for result in results.values() for c in result.get("bias", {}).get("by_category", {})})
    kinds = sorted({k for result in results.values() for k in result.get("toxicity", {}).get("by_kind", {})})
    lines = []
    if categories:
        lines.append(f"- Stereotypes were probed for {', '.join(categories)} only.")
    if kinds:
        lines.append(f"- Toxicity was measured on these kinds of prompts: {', '.join(kinds)}.")
    configs = [
        artifact.manifest.config
        for artifact in evaluations.values()
        if artifact.manifest and artifact.stage.startswith("safety")
    ]
    files = (("toxicity", "prompts"), ("bias", "pairs"))
    own_files = [bool((config.get(part) or {}).get(key)) for config in configs for part, key in files]
    if (categories or kinds) and own_files:
        language = (
            "The probes' language is that of the pipeline's own files" if any(own_files) else "Every probe is English"
        )
        lines.append(f"- {language}; of other languages the safety figures say nothing.")
    return lines


def _samples(pipeline: PipelineResults) -> str:
    rows = pipeline.samples(SAMPLES)
    if not rows:
        return ""
    lines = ["## Samples", "", "The first held-out prompts, not selected."]
    for row in rows:
        lines += ["", f"**{_quoted(row['prompt'])}**", ""]
        answers = {model: row["answers"][model] for model in pipeline.models if model in row["answers"]}
        marks = {model: " ✓" if is_right else " ✗" for model, is_right in row["verified"].items()}
        lines += [
            f"- {pipeline.long_name(model)}: {_quoted(text) or '(nothing)'}{marks.get(model, '')}"
            for model, text in answers.items()
        ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return one line of text that Markdown and HTML leave unchanged."""
    joined = " ".join(text.split())
    cut = joined if len(joined) <= SAMPLE_CHARACTERS else f"{joined[:SAMPLE_CHARACTERS]}…"
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|" else c for c in cut)


def _origin(model: Artifact, line: Sequence[Artifact], evaluations: Mapping[str, Artifact]) -> str:
    """Return the addresses with short digests, and all digests in full behind a title."""
    lines, digests = ["## Where it comes from", ""], []
    if manifest := model.manifest:
        commit, lock = str(manifest.code.get("commit") or ""), manifest.lock_hash
        lines += [
            f"- Artifact: `{manifest.stage}/{manifest.fingerprint}`, digest `{_short(manifest.digest)}`",
            f"- Code: commit `{_short(commit) or 'unknown'}`"
            + (" with uncommitted changes" if manifest.code.get("dirty") else "")
            + (f", lock `{_short(lock)}`" if lock else ""),
        ]
        digests += [("artifact", manifest.digest), ("commit", commit), ("lock", lock or "")]
    # Benchmarks of several models read the same files: each set of sources, and each digest, is given once.
    by_keys: dict[tuple[str, ...], list[str]] = {}
    by_digest: dict[str, list[str]] = {}
    for artifact in (*line, *evaluations.values()):
        sources = artifact.manifest.sources if artifact.manifest else ()
        if sources:
            by_keys.setdefault(tuple(f"`{source.key}`" for source in sources), []).append(artifact.label)
        for source in sources:
            by_digest.setdefault(source.digest, []).append(source.key)
    lines += [f"- Sources of {', '.join(labels)}: {', '.join(keys)}" for keys, labels in by_keys.items()]
    digests += [(", ".join(dict.fromkeys(keys)), digest) for digest, keys in by_digest.items()]
    if len(lines) == 2:
        return ""
    rows = [f"| {name.replace('|', '/')} | `{digest}` |" for name, digest in digests if digest]
    if rows:
        table = ["", "| | digest |", "|---|---|", *rows, ""]
        lines += ["", "<details><summary>Digests in full</summary>", *table, "</details>"]
    return "\n".join(lines)


def _short(digest: str) -> str:
    return digest[:10]


def _settings(line: Sequence[Artifact]) -> str:
    lines = ["## Settings", "", "Only those that differ from the defaults.", ""]
    empty = len(lines)
    for artifact in line:
        is_training = artifact.stage in WEIGHTS or artifact.installed_kind in ("model", "reward_model")
        if is_training and artifact.manifest is not None:
            lines += [f"### {artifact.label}: {artifact.headline}", ""]
            if artifact.branch:
                lines += [f"Continues from {artifact.branch}.", ""]
                lines += [f"- {changed}" for changed in artifact.branch.changed or ()] + [""] * bool(
                    artifact.branch.changed
                )
            # `identity` leaves out keys at their defaults; older manifests have the config alone.
            settings = dict(flattened(artifact.manifest.identity or artifact.manifest.config))
            lines += [f"- `{key}`: {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
            lines += [""] if settings else ["All settings are the defaults.", ""]
    return "\n".join(lines).rstrip() if len(lines) > empty else ""


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of the leaves of a config."""
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
