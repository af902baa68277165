"""A first config for files that someone has: what they hold is looked at, and sizes are chosen to fit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from corpus.quarantine import Rejected
from corpus.readers.config import FileDocuments, FileInstructions, FilePreferences
from corpus.readers.json_lines import read_records
from corpus.readers.plan import COMPRESSION_SUFFIXES, format_of
from corpus.readers.record import Record, longest_text, text_fields
from evaluation.page.words import compact
from infra.errors import ConfigError, Problem, StageError
from infra.launch.config import LaunchConfig
from infra.sources import by_name, expand
from training.presets import PRESETS, Preset

Kind = Literal["documents", "instructions", "preferences"]

LOOKED_AT = 200
"""Records of the first file of each source."""
BYTES_A_TOKEN = 3.5
"""Of English: 3.2 with 4,096 entries on docstrings (README), 4 and more with GPT-2's 50,257."""
LONG_TEXT, CUT = 50_000, 3000
"""Text files that are longer, in bytes, are cut at the first end of a paragraph after so many characters."""
COMPRESSED = 3.0
"""How much smaller text is on disk when it is compressed: gzip on English, about."""
TOKENS_A_PARAMETER = 20
"""Hoffmann et al. 2022 (Chinchilla)."""
READINGS = 4
"""Up to so many readings are about as good as new text (Muennighoff et al. 2023)."""
MFU = 0.4
"""Model FLOPs utilisation: llm-foundry publishes 0.45 to 0.60 on A100s and 0.35 to 0.46 on H100s."""

_PROMPT = ("instruction", "prompt", "question", "input", "query")
_RESPONSE = ("output", "response", "answer", "completion")


@dataclass(frozen=True)
class Found:
    """What one source holds. keys: config keys that differ from their default. documents, text_bytes: estimates."""

    path: str
    kind: Kind
    files: int
    disk_bytes: int
    fields: tuple[str, ...]
    keys: dict[str, str | None]
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class Fit:
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


def look(path: str) -> Found:
    """What the files behind a path, folder or glob hold, by the first of them.

    Raises ConfigError `missing_source` and `empty_source`, and StageError as the readers do.
    """
    places = by_name(place for place in expand([path]) if place.is_file() and place.stat().st_size)
    if not places:
        code = "empty_source" if Path(path).exists() else "missing_source"
        raise ConfigError(Problem(code, path, "expected files with something in them", "correct the path"))
    first = places[0]
    assert isinstance(first, Path)
    disk = sum(place.stat().st_size for place in places if isinstance(place, Path))
    packed = COMPRESSED if first.suffix.lower() in COMPRESSION_SUFFIXES else 1.0
    form = format_of(FileDocuments(paths=(path,)), first)
    if form == "parquet":
        return _of_parquet(path, first, len(places), disk)
    if form != "jsonl":
        size = int(disk * packed)
        # A whole book is one document that no model reads in one piece, and too few for validation and held-out text.
        if form == "text" and size > len(places) * LONG_TEXT:
            cut: dict[str, str | None] = {"cut_characters": str(CUT)}
            return Found(path, "documents", len(places), disk, (), cut, size // CUT, size)
        return Found(path, "documents", len(places), disk, (), {}, len(places), size)
    records = [one for one in islice(read_records(first, "utf-8", (), path, ()), LOOKED_AT) if isinstance(one, Record)]
    if not records:
        raise ConfigError(Problem("unreadable_source", str(first), "expected JSON objects with text"))
    fields = tuple(text_fields(records[0].value))
    kind, keys = _kind_of(fields, longest_text(records[0].value))
    count = max(1, round(disk * packed / max(1.0, _mean(records))))
    text = keys.get("text_field") or "text"
    of_text = sum(len(str(one.value.get(text, ""))) for one in records) / len(records)
    return Found(path, kind, len(places), disk, fields, keys, count, int(count * of_text) if kind == "documents" else 0)


def _mean(records: Sequence[Record | Rejected]) -> float:
    import orjson

    return sum(len(orjson.dumps(one.value)) + 1 for one in records if isinstance(one, Record)) / len(records)


def _of_parquet(path: str, first: Path, files: int, disk: int) -> Found:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(first) as file:
            is_text = (pa.types.is_string, pa.types.is_large_string)
            fields = tuple(one.name for one in file.schema_arrow if any(kind(one.type) for kind in is_text))
            rows = file.metadata.num_rows
            batch = next(file.iter_batches(LOOKED_AT), None)
    except (pa.ArrowInvalid, OSError) as error:
        message = f"no Parquet file that can be read: {error}".splitlines()[0]
        raise ConfigError(Problem("unreadable_source", str(first), message, "look at the file")) from None
    sample: list[dict[str, Any]] = batch.to_pylist() if batch else []
    kind, keys = _kind_of(fields, longest_text(sample[0]) if sample else "")
    text = keys.get("text_field") or "text"
    mean = sum(len(str(row.get(text) or "")) for row in sample) / max(1, len(sample))
    count = round(rows * disk / first.stat().st_size)
    return Found(path, kind, files, disk, fields, keys, count, int(count * mean))


def _kind_of(fields: Sequence[str], longest: str) -> tuple[Kind, dict[str, str | None]]:
    """Pairs by the names of their fields, else documents, whose text is the field `text` or the longest."""
    prompt = next((name for name in _PROMPT if name in fields), None)
    response = next((name for name in _RESPONSE if name in fields), None)
    if {"chosen", "rejected"} <= set(fields):
        # Without a prompt of its own each answer is a whole dialogue, as in HH-RLHF (Bai et al. 2022).
        if prompt is None:
            return "preferences", {"dialogue": "true"}
        return "preferences", _unlike(FilePreferences, prompt_field=prompt, input_field=_further(fields, prompt))
    if prompt and response:
        keys = {"prompt_field": prompt, "response_field": response, "input_field": _further(fields, prompt)}
        return "instructions", _unlike(FileInstructions, **keys)
    text = "text" if "text" in fields else longest
    return "documents", _unlike(FileDocuments, text_field=text) if text else {}


def _further(fields: Sequence[str], prompt: str) -> str | None:
    """The field that is put below the prompt, as in Alpaca."""
    return "input" if "input" in fields and prompt != "input" else None


def _unlike(config: Any, **keys: str | None) -> dict[str, str | None]:
    return {name: value for name, value in keys.items() if config.model_fields[name].default != value}


def fit(text_bytes: int) -> Fit:
    """Sizes for so much text: the largest preset that it can train, by 20 tokens a parameter and up to 4 readings."""
    tokens = max(1, int(text_bytes / BYTES_A_TOKEN))
    causal = sorted(
        ((name, one) for name, one in PRESETS.items() if one.family in ("llama", "gpt2")),
        key=lambda pair: pair[1].parameters,
    )
    fitting = [pair for pair in causal if pair[1].parameters * TOKENS_A_PARAMETER <= READINGS * tokens]
    name, preset = fitting[-1] if fitting else causal[0]
    trained = min(READINGS * tokens, preset.parameters * TOKENS_A_PARAMETER)
    length = min(preset.positions, 256 if preset.parameters < 30e6 else 1024)
    # GPT-3's smallest took half a million tokens (Brown et al. 2020, table 2.1); a small training needs steps more.
    batch = max(4 * length, min(1 << 19, 1 << max(0, int(math.log2(max(1, trained / 1000))))))
    batch -= batch % length
    vocabulary = 4096 if text_bytes < 50e6 else 16_384 if text_bytes < 1e9 else 50_257
    disk = 4 * text_bytes + 4 * tokens + 60 * preset.parameters
    return Fit(tokens, name, preset.parameters, trained, length, batch, vocabulary, disk, _seconds(preset, trained))


def _seconds(preset: Preset, tokens: int) -> float | None:
    """6 · parameters · tokens operations (Kaplan et al. 2020, section 2.1) at the pace of this machine's device."""
    from training.hardware import prepare

    peak = prepare(LaunchConfig()).peak_flops()
    return 6 * preset.parameters * tokens / (MFU * peak) if peak else None


def first_config(name: str, sources: Sequence[Found], fitted: Fit) -> str:
    """The YAML text, with what was found beside it. Stages that nothing was given for are left out."""
    kinds = {one.kind for one in sources}
    lines = [
        "# Made by `stemma init` from what the files hold; sizes are estimates. Look it over, then:",
        "#   stemma check THIS_FILE",
        "#   stemma run THIS_FILE",
        f"name: {name}",
        "seed: 17",
        "",
        *_section("ingest", "documents", sources),
        "",
        "validate: # Great Expectations suites; configs/suites has their limits",
        "clean: # Gopher's rules, for prose; code and lists need looser ones (configs/quickstart.yaml)",
        "dedupe:",
        "",
        f"tokenizer: {{vocab_size: {fitted.vocab_size}}}",
        f"shard: {{sequence_length: {fitted.sequence_length}}}",
        "",
        "pretrain:",
        f"  model: {{preset: {fitted.preset}}} # {_why(fitted)}",
        f"  duration: {fitted.trained_tokens:_} tokens",
        f"  global_batch_tokens: {fitted.batch_tokens}",
        "",
    ]
    if "instructions" in kinds:
        lines += [*_section("instructions", "instructions", sources), "sft:", ""]
    if {"instructions", "preferences"} <= kinds:
        lines += [*_section("preferences", "preferences", sources), "reward_model:", "rlhf:", ""]
    return "\n".join([*lines, "benchmarks:", "safety:", "register:", "report:", "corpus_report:"]) + "\n"


def _why(fitted: Fit) -> str:
    if fitted.parameters * TOKENS_A_PARAMETER > READINGS * fitted.tokens:
        return f"the smallest; about {compact(fitted.tokens)} tokens are too few even for it"
    return f"the largest that about {compact(fitted.tokens)} tokens can train"


def _section(section: str, kind: Kind, sources: Sequence[Found]) -> list[str]:
    lines = [f"{section}:", "  read:"]
    for one in sources:
        if one.kind != kind:
            continue
        about = f"{one.files:,} file{'s' * (one.files != 1)}, {one.disk_bytes / 1e6:,.1f} MB"
        lines.append(f"    # {about}" + (f"; fields: {', '.join(one.fields)}" if one.fields else ""))
        keys = "".join(f", {key}: {'null' if value is None else _quoted(value)}" for key, value in one.keys.items())
        lines.append(f"    - {{kind: files, paths: [{_quoted(one.path)}]{keys}}}")
        if kind == "documents":
            lines.append("      # say more for the reports: name: books, licence: CC-BY-4.0, language: en")
    return lines


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+", text) else "'" + text.replace("'", "''") + "'"


def looked_at(paths: Sequence[str]) -> list[Found]:
    """What all paths hold. Raises ConfigError with everything that is wrong, and where no documents are among them."""
    found: list[Found] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            found.append(look(path))
        except (ConfigError, StageError) as error:
            problems += error.problems
    kinds = {one.kind for one in found}
    if not problems and "documents" not in kinds:
        fix = "name files of text, or of records with one long text field"
        problems.append(Problem("no_documents", "", "expected documents to pretrain on, found pairs only", fix))
    if "preferences" in kinds and "instructions" not in kinds and not problems:
        fix = "name a file of instructions too: a reward model and PPO begin with a tuned model"
        problems.append(Problem("no_instructions", "", "expected instructions beside the preferences", fix))
    if problems:
        raise ConfigError(*problems)
    return found
