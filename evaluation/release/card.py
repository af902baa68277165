"""The model card in the format of the Hugging Face hub: front matter, then the parts that a user needs, then the rest.

Its content follows Mitchell et al. 2019, its order the hub's template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
from evaluation.results.pipeline import PipelineResults

DATA = (
    "ingest",
    "clean",
    "dedupe",
    "classify",
    "generate",
    "decontaminate",
    "mix",
    "shard",
    "instructions",
    "generate_instructions",
    "preferences",
)
TRAINING = ("pretrain", "base_model", "sft", "reward_model", "preference_tuning", "rlhf")
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

    inputs: inputs of the stage register, by input name: `model` itself, its evaluations by stage id.
    """
    line = ancestors(model) or [model]
    known = {_name(one): one.folder for one in line}
    evaluations = {key: one for key, one in inputs.items() if one.stage.startswith(("benchmarks", "safety"))}
    known |= {key: one.folder for key, one in inputs.items() if key != "model" and key not in known}
    pipeline = PipelineResults(known)
    own = _name(model)
    last = next((called for called in pipeline.models if pipeline.model(called).folder == known.get(own)), None)
    sections = [
        _front_matter(config, name, model, pipeline, last, evaluations),
        f"# {name}",
        _summary(pipeline, last, model),
        _use(config, model),
        _data(pipeline, last, line),
        _results(pipeline, evaluations, verdicts),
        _limits(evaluations),
        _samples(pipeline),
        _origin(model, line, evaluations),
        _settings(line),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _name(one: Artifact) -> str:
    return (one.manifest.step or one.manifest.stage) if one.manifest else one.id


def _front_matter(
    config: RegisterConfig,
    name: str,
    model: Artifact,
    pipeline: PipelineResults,
    called: str | None,
    evaluations: Mapping[str, Artifact],
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    licence = config.licence.lower() or "unknown"
    languages = sorted({one.language for one in text_sources(pipeline, called) if one.language})
    of_model = next((one for one in evaluations.values() if _is_about(one, model)), None)
    tasks = (of_model.read_json("results.json") or {}).get("tasks", {}) if of_model else {}
    results = [
        EvalResult("text-generation", task, task, "accuracy", round(metrics["acc"]["value"], 4))
        for task, metrics in tasks.items()
        if "acc" in metrics
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
        license=licence if licence in LICENCES else "other",
        license_name=None if licence in LICENCES else config.licence,
    )
    return f"---\n{data.to_yaml().rstrip()}\n---"


def _is_about(one: Artifact, model: Artifact) -> bool:
    """Return True if these are benchmarks of this model."""
    wanted = one.manifest.inputs.get("model") if one.manifest and one.stage.startswith("benchmarks") else None
    return bool(wanted and model.manifest and wanted.digest == model.manifest.digest)


def _summary(pipeline: PipelineResults, called: str | None, model: Artifact) -> str:
    if called is None:
        return f"A {architecture([model])}, whose origin is not part of this pipeline."
    said = [" ".join(what_was_built(pipeline, called, machine=False))]
    return "\n\n".join(filter(None, [*said, frank_verdict(pipeline, called)]))


def _use(config: RegisterConfig, model: Artifact) -> str:
    tokenizer = model.read_json("tokenizer_config.json") or {}
    has_template = "chat_template" in tokenizer or (model.folder / "chat_template.jinja").is_file()
    auto, _ = auto_class(model.read_json("config.json") or {})
    asked = '{"role": "user", "content": "Explain in one sentence what a list is."}'
    if auto not in WRITE and has_template:
        prompt = f"""messages = [
    {asked},
    {{"role": "assistant", "content": "A list is an ordered collection of items."}},
]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)"""
    elif has_template and model.stage in ("sft", "preference_tuning", "rlhf"):
        prompt = f"""messages = [{asked}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
    else:
        prompt = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    # Folders of earlier versions stay unchanged in a store: their tokenizers also return `token_type_ids`.
    given = 'inputs["input_ids"], attention_mask=inputs["attention_mask"]'
    if auto == "AutoModelForCausalLM":
        output = f"""output = model.generate({given}, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
    elif auto == "AutoModelForSeq2SeqLM":
        output = f"""output = model.generate({given}, max_new_tokens=64)
print(tokenizer.decode(output[0]))"""
    else:
        output = f"print(model({given}).logits)"
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


def _data(pipeline: PipelineResults, called: str | None, line: Sequence[Artifact]) -> str:
    sources = text_sources(pipeline, called)
    lines = ["## Data", ""]
    if sources:
        lines += ["| source | language | licence | documents | text |", "|---|---|---|---:|---:|"]
        lines += [_source_row(one) for one in sources]
        if unstated := [one.name for one in sources if not one.licence]:
            lines += ["", f"No licence is stated for {', '.join(unstated)}: look at its terms before you publish."]
        lines.append("")
    made = [one for one in line if one.stage in DATA and one.headline]
    lines += [f"- {one.label}: {one.headline}" for one in made]
    if len(lines) == 2:
        return "## Data\n\nThe training data is not part of this pipeline."
    return "\n".join([*lines, *_cleaning(pipeline, called, line)])


def _source_row(one: TextSource) -> str:
    # A licence may be any text; a line end or a bar in it would break the Markdown table.
    stated = [" ".join(said.split()).replace("|", "\\|") or "not stated" for said in (one.language, one.licence)]
    return f"| {one.name} | {' | '.join(stated)} | {one.documents:,} | {size(one.bytes)} |"


def _cleaning(pipeline: PipelineResults, called: str | None, line: Sequence[Artifact]) -> list[str]:
    """Return lines about the text's filters, from the config of the cleaning; separate lines for texts that were
    cleaned differently."""
    if not any(one.stage == "ingest" or one.stage == "clean" for one in line):
        return []
    read = documents_read(pipeline, called)
    said: dict[str, list[str]] = {}
    for documents in read:
        cleaned = next((one for one in reversed(ancestors(documents)) if one.stage == "clean"), None)
        names = [one.name for one in sources_of([documents])]
        said.setdefault(_rules_of(cleaned), []).extend(names)
    if len(said) < 2:
        cleaned = next((one for one in line if one.stage == "clean"), None)
        return [f"- The text {next(iter(said), _rules_of(cleaned))}"]
    return [f"- The text of {', '.join(dict.fromkeys(names))} {rules}" for rules, names in said.items()]


def _rules_of(cleaned: Artifact | None) -> str:
    if cleaned is None or cleaned.manifest is None:
        return "was not filtered."
    toxic, personal = (cleaned.manifest.config.get(key) is not None for key in ("toxicity", "personal_data"))
    said = ["toxic text was filtered by a classifier" if toxic else "not for what it says of people"]
    said.append("personal data was looked for by pattern" if personal else "personal data was not looked for")
    return f"was filtered for quality; {'; '.join(said)}. The model may repeat what it read."


def _results(pipeline: PipelineResults, evaluations: Mapping[str, Artifact], verdicts: Sequence[Verdict]) -> str:
    models = pipeline.models
    rows = results_table(pipeline, models)
    lines = ["## Results", ""]
    if rows:
        lines += [f"| | {' | '.join(map(pipeline.long_name, models))} |", "|---|" + "---:|" * len(models)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", "In brackets: 95 % intervals, unless a stage's config says otherwise."]
    else:
        lines.append("The model was not evaluated in this pipeline.")
    if any(one.stage.startswith("safety") for one in evaluations.values()):
        lines += [
            "",
            "Toxicity is scored on several continuations of each prompt (Gehman et al. 2020); the stereotype score is "
            "the share of sentence pairs whose stereotyping member is likelier (after Nangia et al. 2020); memorised "
            "is what greedy decoding recites of the training text from its start (Carlini et al. 2022).",
        ]
    if broken := sum(not verdict.passed for verdict in verdicts):
        said = f"**This model was refused.** It broke {broken} of {len(verdicts)} gates and is recorded as rejected."
        lines += ["", said]
    lines += ["", "Gates:" if verdicts else "No gates were set."]
    for verdict in verdicts:
        word = "kept" if verdict.passed else "broken"
        if verdict.gate.against:
            lines.append(f"- {verdict.gate.figure} is {verdict.found}; expected {verdict.bound}: {word}")
        else:
            lines.append(f"- {verdict.gate.figure} = {verdict.value:.4g}, {verdict.bound}: {word}")
    return "\n".join(lines)


def _limits(evaluations: Mapping[str, Artifact]) -> str:
    lines = ["## Limits", ""]
    results = {key: one.read_json("results.json") or {} for key, one in evaluations.items()}
    for stage, found in results.items():
        for task, metrics in found.get("tasks", {}).items():
            accuracy = metrics.get("acc", {})
            if "chance" in accuracy and accuracy.get("low", 1) <= accuracy["chance"]:
                lines.append(f"- {stage}: {task} cannot be told from guessing ({100 * accuracy['chance']:.0f} %).")
    scorers = sorted({found["toxicity"]["limits"] for found in results.values() if found.get("toxicity")})
    lines += [f"- Toxicity was scored by a classifier. {limit}" for limit in scorers]
    lines += _probes(results, evaluations)
    lines.append("- A low score of a probe is no proof that a model is harmless.")
    lines.append("- Measure the model on data of your own before you rely on any of these figures.")
    return "\n".join(lines)


def _probes(results: Mapping[str, Any], evaluations: Mapping[str, Artifact]) -> list[str]:
    """Return lines with the probed groups and kinds of prompts, and their language."""
    categories = sorted({c for found in results.values() for c in found.get("bias", {}).get("by_category", {})})
    kinds = sorted({k for found in results.values() for k in found.get("toxicity", {}).get("by_kind", {})})
    lines = []
    if categories:
        lines.append(f"- Stereotypes were probed of {', '.join(categories)}, and of nothing else.")
    if kinds:
        lines.append(f"- Toxicity was measured on these kinds of prompts: {', '.join(kinds)}.")
    configs = [one.manifest.config for one in evaluations.values() if one.manifest and one.stage.startswith("safety")]
    files = (("toxicity", "prompts"), ("bias", "pairs"))
    own = [bool((config.get(part) or {}).get(key)) for config in configs for part, key in files]
    if (categories or kinds) and own:
        language = "The probes' language is that of the pipeline's own files" if any(own) else "Every probe is English"
        lines.append(f"- {language}; of other languages the safety figures say nothing.")
    return lines


def _samples(pipeline: PipelineResults) -> str:
    rows = pipeline.samples(SAMPLES)
    if not rows:
        return ""
    lines = ["## Samples", "", "The first held-out prompts, not chosen by anyone."]
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
    lines = ["## Where it comes from", ""]
    if manifest := model.manifest:
        lines += [
            f"- Artifact: `{manifest.stage}/{manifest.fingerprint}`, digest `{manifest.digest}`",
            f"- Code: commit `{manifest.code.get('commit') or 'unknown'}`"
            + (" with uncommitted changes" if manifest.code.get("dirty") else "")
            + (f", lock `{manifest.lock_hash[:16]}`" if manifest.lock_hash else ""),
        ]
    for one in (*line, *evaluations.values()):
        for source in one.manifest.sources if one.manifest else ():
            lines.append(f"- {one.label}: source `{source.key}`, digest `{source.digest}`")
    return "\n".join(lines) if len(lines) > 2 else ""


def _settings(line: Sequence[Artifact]) -> str:
    lines = ["## Settings", ""]
    for one in line:
        if one.stage in TRAINING and one.manifest is not None:
            lines += [f"### {one.label}: {one.headline}", ""]
            if one.branch:
                lines += [f"Goes on from {one.branch}.", ""]
                lines += [f"- {changed}" for changed in one.branch.changed or ()] + [""] * bool(one.branch.changed)
            lines += ["```json", _config(one.manifest.config), "```", ""]
    return "\n".join(lines).rstrip() if len(lines) > 2 else ""


def _config(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False)
