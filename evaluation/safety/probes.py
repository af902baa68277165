"""Texts that the safety stage gives to a model: prompts and pairs of sentences."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from corpus.readers.encodings import whole_characters
from evaluation.config import DATA_DIR, BiasConfig, ToxicityConfig
from infra.errors import stage_error
from infra.io.bounded import read_text
from infra.io.json import parse_json

COLUMNS = ("sent_more", "sent_less", "stereo_antistereo", "bias_type")


def read_prompts(config: ToxicityConfig) -> list[dict[str, str]]:
    """Return the prompts with their kind (`all` if the file has none).

    JSON lines have `prompt`: a text, or an object with `text` as in RealToxicityPrompts, whose kind is `challenging` or
    `other`. BOLD's JSON has prompts by group and name; the kind is the group. A line of a text file that is a list with
    escaped line ends, as ToxiGen's prompts are, is read as that list.
    Raises StageError naming the line that is not a prompt, or a file that is empty or not UTF-8.
    """
    path = Path(config.prompts) if config.prompts else DATA_DIR / "toxicity_prompts.jsonl"
    try:
        text = read_text(path, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise stage_error("bad_prompts", str(path), f"expected text in UTF-8: {error}") from error
    if path.suffix == ".json":
        prompts = _bold(path, text)
    else:
        # Not splitlines: JSON strings may hold other line separators.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        as_json = path.suffix == ".jsonl"
        prompts = [_json_prompt(f"{path}:{number}", line) if as_json else _plain_prompt(line) for number, line in lines]
    if not prompts:
        raise stage_error("bad_prompts", str(path), "expected at least one prompt, found none")
    # JSON can escape halves of surrogate pairs, which no tokenizer takes.
    return [{name: whole_characters(text) for name, text in prompt.items()} for prompt in prompts[: config.limit]]


def is_bold(config: ToxicityConfig) -> bool:
    """Return True if the prompts are BOLD's, whose kinds are groups, such as groups of people, to compare."""
    return config.prompts is not None and Path(config.prompts).suffix == ".json"


def _json_prompt(location: str, line: str) -> dict[str, str]:
    try:
        row = parse_json(line, surrogates=True)
        if isinstance(row["prompt"], dict):
            kind = "challenging" if row.get("challenging") else "other"
            return {"prompt": str(row["prompt"]["text"]), "kind": kind}
        return {"prompt": str(row["prompt"]), "kind": str(row.get("kind", "all"))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise stage_error("bad_prompts", location, 'expected a JSON object such as {"prompt": "…"}') from error


def _plain_prompt(line: str) -> dict[str, str]:
    is_list = line.startswith("- ") and "\\n-" in line
    return {"prompt": line.replace("\\n", "\n").rstrip() if is_list else line.strip(), "kind": "all"}


def _bold(path: Path, text: str) -> list[dict[str, str]]:
    try:
        return [
            {"prompt": prompt.rstrip(), "kind": group.removesuffix("\n")}
            for group, names in parse_json(text, surrogates=True, unique_keys=True).items()
            for prompts in names.values()
            for prompt in prompts
        ]
    except (ValueError, AttributeError, TypeError) as error:
        raise stage_error("bad_prompts", str(path), "expected BOLD's JSON: {group: {name: [prompt, …]}}") from error


def read_pairs(config: BiasConfig) -> list[dict[str, str]]:
    """Return the rows of a CSV file with CrowS-Pairs' columns.

    Raises StageError naming missing columns, or the row that is not a pair.
    """
    path = Path(config.pairs) if config.pairs else DATA_DIR / "bias_pairs.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            pairs = list(_pairs(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise stage_error("bad_pairs", str(path), f"expected a CSV file in UTF-8: {error}") from error
    if not pairs:
        raise stage_error("bad_pairs", str(path), "expected at least one pair of sentences, found none")
    return pairs[: config.limit]


def _pairs(path: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
    if missing:
        raise stage_error(
            "bad_pairs", f"{path}:1", f"expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}"
        )
    for row in reader:
        if not row["sent_more"] or not row["sent_less"]:
            raise stage_error("bad_pairs", f"{path}:{reader.line_num}", "expected two sentences")
        yield {name: row[name] or "" for name in COLUMNS}
