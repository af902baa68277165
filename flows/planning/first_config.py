"""A first config for a user's files: their content is inspected, and sizes are chosen to fit."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from corpus.config import (
    READS_RECORDS,
    IngestConfig,
    InstructionsConfig,
    PreferencesConfig,
)
from corpus.readers.config import FileDocuments, HuggingFaceDocuments
from corpus.readers.plan import COMPRESSION_SUFFIXES
from corpus.readers.record import pick
from corpus.recognition.first_records import first_record_problems
from corpus.recognition.forms import Group, groups_of
from corpus.recognition.readings import ANY, Kind, Reading, Wish
from evaluation.pages.words import compact, size
from flows.config.pipeline_config import PipelineConfig
from flows.planning.config_sections import about_split, clean_section, heldout_key, validate_section, yaml_value
from infra.errors import ConfigError, Problem, StageError
from infra.io.json import read_own_json
from infra.io.sources import by_name, size_of
from infra.launch.config import LaunchConfig
from training.config.presets import PRESETS, Preset

if TYPE_CHECKING:
    from corpus.recognition.fitting_rules import FittingRules
    from flows.planning.small_data import SmallSplit

BYTES_A_TOKEN = 3.5
"""Bytes per token of English: 3.2 with 4,096 entries on docstrings (README), 4 and more with GPT-2's 50,257."""
LONG_TEXT, CUT, SHORTEST_CUT = 50_000, 3000, 1000
"""Text files longer than the first number of bytes are cut at the first end of a paragraph after the second number of
characters; a few texts after fewer, but not after fewer than the third."""
VOCABULARIES = ((50e3, 512), (150e3, 1024), (400e3, 2048), (50e6, 4096), (1e9, 16_384), (math.inf, 50_257))
"""Entries of the tokenizer for less text than this number of bytes. 90 kB of short notes give 3,600 at most, and
cleaning leaves less text than there is."""
FEW = 30
"""Number of documents below which longer ones are cut too, into about as many."""
SMALL, SMALL_BYTES = 2000, 50_000_000
"""Number of documents, or pairs, and their bytes on disk, below which the split is tried on them
(`flows.planning.small_data`)."""
PAGE = 30_000
"""Bytes of a page in a WARC file, about."""
COMPRESSED = 3.0
"""Compression ratio of text on disk: gzip on English, about."""
TOKENS_A_PARAMETER = 20
"""Hoffmann et al. 2022 (Chinchilla)."""
READINGS = 4
"""Epochs up to this number are about as good as new text (Muennighoff et al. 2023)."""
MFU = 0.4
"""Model FLOPs utilisation: llm-foundry publishes 0.45 to 0.60 on A100s and 0.35 to 0.46 on H100s."""


@dataclass(frozen=True)
class InspectedSource:
    """Some files behind a path and how they are read.

    source: config keys that name the files. keys: those that define how to read them, where they differ from their
        default. why: the reason for this reading. documents, text_bytes: estimates.
    """

    path: str
    kind: Kind
    files: int
    disk_bytes: int
    fields: tuple[str, ...]
    keys: Mapping[str, Any]
    documents: int
    text_bytes: int
    why: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)


Choose = Callable[[str, Sequence[Reading]], Reading]
"""Given a path and readings of its files that are as likely, returns one of them, or raises ConfigError."""


@dataclass(frozen=True)
class FittingSizes:
    """Sizes that fit the text. seconds: of pretraining on this machine, None where its device's peak is not known. All
    are rough."""

    tokens: int
    preset: str
    parameters: int
    trained_tokens: int
    sequence_length: int
    batch_tokens: int
    vocab_size: int
    disk_bytes: int
    seconds: float | None


def look(path: str, wish: Wish = ANY, choose: Choose | None = None) -> tuple[list[InspectedSource], list[str]]:
    """The files behind a path, folder or glob by form, and notes of what is left out.

    Raises ConfigError as `corpus.recognition.forms.groups_of`, `two_readings` where two are as likely and there is no
    `choose`, and StageError as the readers do.
    """
    groups, notes = groups_of(path, wish)
    sources = []
    for group in groups:
        reading = group.readings[0]
        if len(group.readings) > 1:
            reading = (choose or refuse_two)(path, group.readings)
        sources.append(_sized(path, group, reading))
    return sources, notes


def refuse_two(path: str, readings: Sequence[Reading]) -> Reading:
    """Raise ConfigError `two_readings` with all of them, and the options that decide."""
    listed = "; or ".join(map(str, readings))
    fixes = " or ".join(dict.fromkeys(deciding_option(path, reading, readings) for reading in readings))
    raise ConfigError(
        Problem("two_readings", path, f"two interpretations are equally likely: {listed}", f"choose one with {fixes}")
    )


def deciding_option(path: str, reading: Reading, readings: Sequence[Reading]) -> str:
    """The option of `stemma init` that asks for this one of several readings."""
    if len({other.kind for other in readings}) > 1:
        return f"--as {path}={reading.kind}"
    return f"--text-field {path}={reading.text_field}"


def _sized(path: str, group: Group, reading: Reading) -> InspectedSource:
    files = group.files
    disk = sum(size_of(file) for file in files)
    is_packed = PurePosixPath(files[0].name).suffix.lower() in COMPRESSION_SUFFIXES
    unpacked = disk * (COMPRESSED if is_packed else 1.0)
    keys = dict(reading.keys)
    if not group.sample:
        # A whole book is one document that no model reads in one piece, and too few for validation and held-out text.
        # The same holds for a few longer files.
        is_long = group.format == "text" and unpacked > len(files) * LONG_TEXT
        records = max(len(files), int(unpacked) // PAGE if group.format == "warc" else 0)
        cut = CUT if is_long else _cut_of_few(records, int(unpacked)) if group.format != "warc" else 0
        count = int(unpacked) // cut if cut else records
        keys |= {"cut_characters": cut} if cut else {}
        return InspectedSource(
            path, "documents", len(files), disk, (), keys, count, int(unpacked), reading.why, group.source
        )
    count = max(_records(group, unpacked), len(group.sample))  # an estimate by bytes may say less than was read
    texts = [value for record in group.sample if isinstance(value := pick(record.value, reading.text_field), str)]
    mean = sum(len(text.encode("utf-8", "replace")) for text in texts) / len(group.sample)
    text_bytes = int(count * mean) if reading.kind == "documents" else 0
    if reading.kind == "documents" and (cut := _cut_of_few(count, text_bytes)):
        keys |= {"cut_characters": cut}
    fields = tuple(group.fields)
    return InspectedSource(
        path, reading.kind, len(files), disk, fields, keys, count, text_bytes, reading.why, group.source
    )


def _cut_of_few(documents: int, text_bytes: int) -> int:
    """Return the characters after which a few texts are cut into documents; 0 for many texts, and for short ones."""
    if documents >= FEW:
        return 0
    cut = max(SHORTEST_CUT, min(CUT, text_bytes // FEW // 100 * 100))
    return cut if text_bytes > min(FEW * CUT, 2 * documents * cut) else 0


def _records(group: Group, unpacked: float) -> int:
    """Records in all files of a group, about: of Parquet by the rows of the first file, else by the mean record."""
    first = group.files[0]
    if group.format == "parquet" and isinstance(first, Path):
        import pyarrow.parquet as pq

        with pq.ParquetFile(first) as file:
            return max(1, round(file.metadata.num_rows * unpacked / size_of(first)))
    lines = [
        json.dumps(record.value, ensure_ascii=False, default=str).encode("utf-8", "replace") for record in group.sample
    ]
    names = sum(len(name) + 6 for name in group.fields) if group.format == "csv" else 0
    mean = sum(map(len, lines)) / len(lines) - names
    return max(1, round(unpacked / max(1.0, mean)))


def fit(text_bytes: int, longest: int | None = None) -> FittingSizes:
    """Return sizes for this much text: the largest preset that it trains at 20 tokens per parameter and 4 epochs.

    Args:
        longest: sequences, in tokens, where a small corpus needs shorter ones than usual.
    """
    tokens = max(1, int(text_bytes / BYTES_A_TOKEN))
    causal = sorted(
        ((name, preset) for name, preset in PRESETS.items() if preset.family in ("llama", "gpt2")),
        key=lambda pair: pair[1].parameters,
    )
    fitting = [pair for pair in causal if pair[1].parameters * TOKENS_A_PARAMETER <= READINGS * tokens]
    name, preset = fitting[-1] if fitting else causal[0]
    trained = min(READINGS * tokens, preset.parameters * TOKENS_A_PARAMETER)
    length = min(preset.positions, 256 if preset.parameters < 30e6 else 1024, longest or preset.positions)
    # GPT-3's smallest took half a million tokens (Brown et al. 2020, table 2.1); a small training needs steps more.
    batch = max(4 * length, min(1 << 19, 1 << max(0, int(math.log2(max(1, trained / 1000))))))
    batch -= batch % length
    vocabulary = next(size for most_bytes, size in VOCABULARIES if text_bytes < most_bytes)
    trained = max(trained, batch)
    disk = 4 * text_bytes + 4 * tokens + 60 * preset.parameters
    return FittingSizes(
        tokens, name, preset.parameters, trained, length, batch, vocabulary, disk, _seconds(preset, trained)
    )


def _seconds(preset: Preset, tokens: int) -> float | None:
    """6 · parameters · tokens operations (Kaplan et al. 2020, section 2.1) at the pace of this machine's device."""
    from training.core.hardware import prepare

    peak = prepare(LaunchConfig()).peak_flops()
    return 6 * preset.parameters * tokens / (MFU * peak) if peak else None


def first_config(
    name: str,
    sources: Sequence[InspectedSource],
    fitted: FittingSizes,
    rules: FittingRules | None = None,
    split: SmallSplit | None = None,
) -> str:
    """The YAML text, with the findings next to it. Stages that nothing was given for are left out.

    Args:
        rules: of cleaning; None for the default ones.
        split: of small data; None for the default one.
    """
    kinds = {source.kind for source in sources}
    lines = [
        "# Made by `stemma init` from the content of the files; sizes are estimates. Review it, then:",
        "#   stemma check THIS_FILE",
        "#   stemma run THIS_FILE",
        f"name: {name}",
        "seed: 17",
        "",
        *_section("ingest", "documents", sources),
        "",
        *validate_section(rules, split),
        *clean_section(rules),
        "dedupe:",
        "",
        *about_split(split),
        f"tokenizer: {{vocab_size: {fitted.vocab_size}{heldout_key(split)}}}",
        f"shard: {{sequence_length: {fitted.sequence_length}{heldout_key(split)}}}",
        "",
        "pretrain:",
        f"  model: {{preset: {fitted.preset}}} # {_why(fitted)}",
        f"  duration: {fitted.trained_tokens:_} tokens",
        f"  global_batch_tokens: {fitted.batch_tokens}",
        "",
    ]
    if "instructions" in kinds:
        lines += [*_section("instructions", "instructions", sources, split), "sft:", ""]
    if {"instructions", "preferences"} <= kinds:
        lines += [*_section("preferences", "preferences", sources, split), "reward_model:", "rlhf:", ""]
    return "\n".join([*lines, "benchmarks:", "safety:", "register:", "report:", "corpus_report:"]) + "\n"


LONGEST_TUNED, LONGEST_READ = 1024, 2048
"""Longest conversation, and longest sequence of text, in tokens, of a first config for an open model; its positions if
these are fewer."""


def tuning_config(
    name: str,
    model: str,
    sources: Sequence[InspectedSource],
    rules: FittingRules | None = None,
    split: SmallSplit | None = None,
) -> str:
    """The YAML text that trains an open model further: on documents, then on instructions, then on preferences, as far
    as they were given.

    Args:
        model: the model's folder.
        rules: of cleaning; None for the default ones.
        split: of small data; None for the default one.
    """
    kinds = {source.kind for source in sources}
    longest = f"max_length: {min(LONGEST_TUNED, positions_of(Path(model)))}"
    length = split.sequence_length if split else longest_read(Path(model))
    batch = 64 if split is None or split.trained_sequences is None else max(1, min(64, split.trained_sequences // 4))
    lines = [
        "# Made by `stemma init --model` from the content of the files. Review it, then:",
        "#   stemma check THIS_FILE",
        "#   stemma run THIS_FILE",
        f"name: {name}",
        "seed: 17",
        "",
        f"base_model: {{path: {yaml_value(str(model))}}}",
        "",
    ]
    steps: list[str] = []
    latest = "base_model"
    if "documents" in kinds:
        lines += [
            *_section("ingest", "documents", sources),
            "",
            *validate_section(rules, split),
            *clean_section(rules),
            "dedupe:",
            "",
        ]
        steps += [
            "  shards:",
            "    uses: shard",
            "    inputs: {documents: dedupe, tokenizer: base_model}",
            *(f"    {line}" for line in about_split(split)),
            f"    sequence_length: {length}",
            *(["    " + heldout_key(split).removeprefix(", ")] if heldout_key(split) else []),
            "  continued:",
            "    uses: pretrain",
            "    inputs: {model: base_model, shards: shards, tokenizer: base_model}",
            "    duration: 1 epoch",
            f"    global_batch_tokens: {batch * length}",
            "    optimizer: {learning_rate: 1.0e-4} # higher rates learn more and forget more (Ibrahim et al. 2024)",
            "    schedule: {warmup: 2 %, final_share: 0.1}",
        ]
        latest = "continued"
    if "instructions" in kinds:
        lines += [*_section("instructions", "instructions", sources, split), ""]
        steps += [
            "  tuned:",
            "    uses: sft",
            f"    inputs: {{model: {latest}, instructions: instructions}}",
            "    duration: 2 epochs",
            f"    {longest}",
            "    lora: {rank: 16, alpha: 32} # without it all weights are tuned, at about a tenth of the rate",
            "    optimizer: {learning_rate: 2.0e-4, weight_decay: 0.0}",
        ]
        latest = "tuned"
    if "preferences" in kinds:
        lines += [*_section("preferences", "preferences", sources, split), ""]
        steps += [
            "  dpo:",
            "    uses: preference_tuning",
            f"    inputs: {{model: {latest}, preferences: preferences}}",
            f"    {longest}",
            "    optimizer: {learning_rate: 1.0e-6, weight_decay: 0.0} # Rafailov et al. 2023; small models want more",
        ]
    return "\n".join([*lines, "steps:", *steps]) + "\n"


def longest_read(model: Path) -> int:
    """Return the length of sequences for more training of an open model. Raises ConfigError as `positions_of`."""
    return min(LONGEST_READ, positions_of(model))


def positions_of(model: Path) -> int:
    """Positions of a model folder. Raises ConfigError for a folder that has no config.json."""
    try:
        config = read_own_json(model / "config.json")
        positions = config.get("max_position_embeddings") or config.get("n_positions") or LONGEST_READ
        return int(positions)
    except (OSError, ValueError, AttributeError, TypeError):
        message = "expected a Hugging Face model folder with config.json, *.safetensors and the tokenizer"
        fix = "such as that of: hf download Qwen/Qwen3-0.6B --local-dir models/qwen3"
        raise ConfigError(Problem("no_model", f"--model {model}", message, fix)) from None


def _why(fitted: FittingSizes) -> str:
    if fitted.parameters * TOKENS_A_PARAMETER > READINGS * fitted.tokens:
        return f"the smallest preset; about {compact(fitted.tokens)} tokens are too few even for it"
    return f"the largest preset that about {compact(fitted.tokens)} tokens can train"


def tried_rules(sources: Sequence[InspectedSource]) -> FittingRules | None:
    """The cleaning rules that fit a sample of the documents; None where there are none. Takes some seconds, on a new
    machine some ten more (native code is compiled)."""
    from corpus.recognition.fitting_rules import fitting_rules, sample_texts

    documents = [{**source.source, **source.keys} for source in sources if source.kind == "documents"]
    if not documents:
        return None
    samples = []
    for source in IngestConfig.model_validate({"read": documents}).read:
        assert isinstance(source, FileDocuments | HuggingFaceDocuments)
        samples.append(sample_texts(source, [file for file in by_name(source.places()) if size_of(file)]))
    return fitting_rules(samples)


def tried_split(
    sources: Sequence[InspectedSource], rules: FittingRules | None, sequence_length: int
) -> SmallSplit | None:
    """The split that fits small data; None where there is enough of each kind for the default one.

    Raises ConfigError as `flows.planning.small_data.fitting_split`.
    """
    from flows.planning.small_data import fitting_split, small_documents

    def small(kind: Kind) -> dict[str, Any] | None:
        chosen = [source for source in sources if source.kind == kind]
        if not chosen or sum(each.documents for each in chosen) >= SMALL:
            return None
        is_quick = sum(each.disk_bytes for each in chosen) < SMALL_BYTES
        return {"read": [{**each.source, **each.keys} for each in chosen]} if is_quick else None

    ingest = IngestConfig.model_validate(read) if (read := small("documents")) else None
    pairs: dict[str, InstructionsConfig | PreferencesConfig] = {}
    if read := small("instructions"):
        pairs["instructions"] = InstructionsConfig.model_validate(read)
    if read := small("preferences"):
        pairs["preferences"] = PreferencesConfig.model_validate(read)
    sections = [*([ingest] if ingest else []), *pairs.values()]
    if problems := [problem for section in sections for problem in first_record_problems(section)]:
        raise ConfigError(*problems)
    if not sections:
        return None
    documents = small_documents(ingest, rules.keys if rules else {}) if ingest else None
    return fitting_split(documents, pairs, sequence_length)


def _section(
    section: str, kind: Kind, sources: Sequence[InspectedSource], split: SmallSplit | None = None
) -> list[str]:
    lines = [f"{section}:", *([f"  {heldout_key(split).removeprefix(', ')}"] if heldout_key(split) else []), "  read:"]
    chosen = [source for source in sources if source.kind == kind]
    names = source_names(chosen) if kind == "documents" else [""] * len(chosen)
    for source, name in zip(chosen, names, strict=True):
        about = f"{source.files:,} file{'s' * (source.files != 1)}, {size(source.disk_bytes)}"
        lines.append(f"    # {about}; {source.why}")
        lines += [f"    # fields: {', '.join(source.fields)}"] if source.fields else []
        called = {"name": name} if name else {}
        named = {**dict([*source.source.items()][:1]), **called, **source.source, **source.keys}
        lines.append(f"    - {{{', '.join(f'{key}: {yaml_value(value)}' for key, value in named.items())}}}")
        if kind == "documents":
            lines.append("      # optional, for reports: licence: CC-BY-4.0, language: en")
    return lines


def source_names(sources: Sequence[InspectedSource]) -> list[str]:
    """A name for each source, after its folder or file; with its form where a folder has several."""
    names: list[str] = []
    for source in sources:
        path = PurePosixPath(source.path)
        parts = (path.name, *reversed(path.parts[:-1]))
        folder = next((part for part in parts if part.strip("./") and not glob.has_magic(part)), "") or Path.cwd().name
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.partition(".")[0]).strip("._-") or "files"
        if name in names:
            patterns = source.source.get("paths") or [""]
            pattern = PurePosixPath(patterns[0])
            form = pattern.suffix.lstrip(".") if glob.has_magic(patterns[0]) else pattern.name.partition(".")[0]
            name = f"{name}-{form or 'more'}"
        options = (name if number == 1 else f"{name}-{number}" for number in count(1))
        names.append(next(option for option in options if option not in names))
    return names


def inspect_sources(
    paths: Sequence[str],
    wishes: Mapping[str, Wish] | None = None,
    choose: Choose | None = None,
    *,
    has_model: bool = False,
) -> tuple[list[InspectedSource], list[str]]:
    """Files found behind all paths, and notes of what is left out.

    Raises ConfigError with everything that is wrong, and where no documents are among them.

    Args:
        wishes: by path.
        has_model: True if an open model is trained further, which needs neither documents nor instructions.
    """
    sources: list[InspectedSource] = []
    notes: list[str] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            some, left_out = look(path, (wishes or {}).get(path, ANY), choose)
            sources += some
            notes += left_out
        except (ConfigError, StageError) as error:
            problems += error.problems
    kinds = {source.kind for source in sources}
    if not problems and "documents" not in kinds and not has_model:
        fix = "give text files, or records with one long text field; or use --model FOLDER to tune an open model"
        problems.append(Problem("no_documents", "", "expected documents to pretrain on, found only pairs", fix))
    if "preferences" in kinds and "instructions" not in kinds and not problems and not has_model:
        fix = "also give a file of instructions: a reward model and PPO start from a tuned model"
        problems.append(Problem("no_instructions", "", "expected instructions in addition to preferences", fix))
    if problems:
        raise ConfigError(*problems)
    return sources, notes


def source_problems(config: PipelineConfig) -> list[Problem]:
    """Problems that `check` would find with the first records of the sources of a config."""
    sections = (getattr(config, name, None) for name in ("ingest", "instructions", "preferences"))
    return [
        problem
        for section in sections
        if isinstance(section, READS_RECORDS)
        for problem in first_record_problems(section)
    ]
