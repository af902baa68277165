"""Origin of the models: data, stages, lineage, and how to reproduce them."""

from __future__ import annotations

from evaluation.pages.lineage import lineage_picture
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import (
    percent,
    seconds,
    size,
)
from evaluation.results.pipeline import PipelineResults
from evaluation.results.stage_order import DOCUMENTS, PAIRS

DATA_STAGES = (*DOCUMENTS, "tokenizer", "shard", *PAIRS)
DATA_KINDS = ("documents", "tokenizer", "shards", "instructions", "preferences")


def data(pipeline: PipelineResults) -> Section:
    tables, lead = [], []
    ingest, shard = pipeline.figures("ingest"), pipeline.get("shard")
    if "documents" in ingest:
        lead.append(f"{ingest['documents']:,.0f} documents, {size(ingest.get('text_bytes', 0))} of text were read.")
        if ingest.get("quarantined"):
            lead.append(f"{ingest['quarantined']:,.0f} unreadable entries were put aside.")
    cleaned = pipeline.get("clean")
    counts = cleaned.read_json("aux/counts.json") if cleaned else None
    if counts and counts.get("read"):
        kept, read = counts["kept"], counts["read"]
        lead.append(f"Cleaning kept {kept:,} of {read:,} ({percent(kept / read)}).")
        dropped = sorted(counts.get("dropped", {}).items(), key=lambda item: (-item[1], item[0]))
        rows = [[rule.replace("_", " "), f"{n:,}", percent(n / read, 2)] for rule, n in dropped]
        note = (
            "A document is counted under the first rule that it breaks, so that later rules look milder than they are."
        )
        tables.append(Table("Documents dropped by rule", ["rule", "documents", "share"], rows, note, True, (1, 2)))
    notes = {
        "dedupe": "Duplicates",
        "semantic_dedupe": "Semantic duplicates",
        "classify": "Classifier",
        "generate": "Written by a language model",
        "decontaminate": "Test items",
        "mix": "Mixture",
    }
    for id, label in notes.items():
        if (artifact := pipeline.get(id)) and artifact.headline:
            lead.append(f"{label}: {artifact.headline}.")
    meta = (shard.read_json("meta.json") if shard else None) or {}
    if "train_tokens" in meta:
        tokens = (
            f"{meta['train_tokens']:,} tokens to train on, {meta.get('validation_tokens', 0):,} held out for validation"
        )
        lead.append(f"{tokens}, split by document.")
        if meta.get("train_bytes"):
            lead.append(f"{meta['train_bytes'] / meta['train_tokens']:.2f} bytes per token.")
    rows = []
    for id in ("instructions", "preferences"):
        figures = pipeline.figures(id)
        if "train_pairs" in figures:
            rows.append([id, f"{figures['train_pairs']:,.0f}", f"{figures['heldout_pairs']:,.0f}"])
    if rows:
        tables.append(Table("Pairs", ["kind", "to train on", "held out"], rows, numeric=(1, 2)))
    named_steps = [
        [id, artifact.stage, artifact.headline]
        for id, artifact in pipeline.artifacts.items()
        if (artifact.stage in DATA_STAGES and id != artifact.stage) or artifact.installed_kind in DATA_KINDS
    ]
    if named_steps:
        tables.append(Table("Data of named steps", ["step", "stage", "result"], named_steps))
    checks = []
    for id, artifact in pipeline.artifacts.items():
        verdict = artifact.read_json("verdict.json") if artifact.stage.startswith("validate") else None
        if verdict:
            kept = sum(bool(e.get("success", True)) for e in verdict.get("expectations", []))
            checks.append([id, str(verdict.get("suite", "")), f"{kept} of {len(verdict.get('expectations', []))}"])
    if checks:
        tables.append(Table("Validation", ["stage", "suite", "expectations kept"], checks, numeric=(2,)))
    return Section("data", "Data", " ".join(lead), tables=tables)


def stages(pipeline: PipelineResults) -> Section:
    total = sum(artifact.manifest.seconds for artifact in pipeline.artifacts.values() if artifact.manifest) or 1.0
    rows = [
        [
            id,
            artifact.headline,
            seconds(artifact.manifest.seconds),
            percent(artifact.manifest.seconds / total, 0),
            artifact.manifest.fingerprint[:8],
            artifact.manifest.digest[:8],
        ]
        for id, artifact in pipeline.artifacts.items()
        if artifact.manifest
    ]
    if not rows:
        return Section("stages", "Stages")
    note = "Seconds are those of the build, which for a reused stage was an earlier run. Stages may run side by side."
    columns = ["stage", "result", "built in", "share", "fingerprint", "digest"]
    return Section("stages", "Stages", "", tables=[Table("", columns, rows, note, numeric=(2, 3), mono=(4, 5))])


def lineage(pipeline: PipelineResults) -> Section:
    picture = lineage_picture(pipeline.artifacts)
    if not picture or not any(artifact.manifest for artifact in pipeline.artifacts.values()):
        return Section("lineage", "Lineage")
    figure = Figure(
        "What descends from what",
        picture,
        "Each box is an artifact with the start of its content digest; an arrow means that its bytes went in, a dotted "
        "one that it only had to exist, a bold one that a training continues from a state of it.",
        "It shows this pipeline's artifacts; their source files and packages are in the manifests.",
        wide=True,
    )
    return Section("lineage", "Lineage", "", [figure])


def reproduce(pipeline: PipelineResults, command: str) -> Section:
    manifests = [artifact.manifest for artifact in pipeline.artifacts.values() if artifact.manifest]
    if not manifests:
        return Section("reproduce", "Reproduce it")

    def all_of(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"

    commits = [
        str(m.code.get("commit") or "") + (" + uncommitted changes" if m.code.get("dirty") else "") for m in manifests
    ]
    versions = sorted({f"{name} {version}" for m in manifests for name, version in m.versions.items()})
    seeds = {id: artifact.manifest.config["seed"] for id, artifact in pipeline.artifacts.items()
             if artifact.manifest and "seed" in artifact.manifest.config}  # fmt: skip
    by_seed: dict[str, list[str]] = {}
    for id, seed in seeds.items():
        by_seed.setdefault(str(seed), []).append(id)
    rows = [
        ["command", command or "stemma run CONFIG"],
        ["code", all_of(commits)],
        ["lock", all_of([m.lock_hash for m in manifests])],
        ["seeds", "; ".join(f"{seed}: {', '.join(ids)}" for seed, ids in by_seed.items()) or "none"],
        ["machine", all_of([f"{m.host}, {m.device}" if m.device else m.host for m in manifests])],
        ["versions", ", ".join(versions) or "not recorded"],
    ]
    lead = "The same code, lock, config and sources give the same fingerprints."
    if len(set(commits)) > 1:
        lead += " The stages were built by more than one version of the code."
    if any(m.code.get("dirty") for m in manifests):
        lead += " Some were built with uncommitted changes, which exist only there."
    settings = "\n\n".join(
        "\n".join([f"{id}:", *(f"  {key}: {value}" for key, value in sorted(artifact.manifest.identity.items()))])
        for id, artifact in pipeline.artifacts.items()
        if artifact.manifest and artifact.manifest.identity
    )
    folded = [("Settings that differ from the defaults", settings)] if settings else []
    return Section("reproduce", "Reproduce it", lead, tables=[Table("", ["", ""], rows, mono=(1,))], folded=folded)
