"""The texts that the safety stage asks of a model: prompts and pairs of sentences."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from evaluation.config import DATA_DIR, BiasConfig, ToxicityConfig
from infra.errors import stage_error

COLUMNS = ("sent_more", "sent_less", "stereo_antistereo", "bias_type")


def read_prompts(config: ToxicityConfig) -> list[dict[str, str]]:
    """The prompts with their kind (`all` where the file gives none).

    Raises StageError naming the line that is not a prompt, or an empty file.
    """
    path = Path(config.prompts) if config.prompts else DATA_DIR / "toxicity_prompts.jsonl"
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                prompts.append({"prompt": str(row["prompt"]), "kind": str(row.get("kind", "all"))})
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise stage_error(
                    "bad_prompts", f"{path}:{number}", 'expected a JSON object such as {"prompt": "…"}'
                ) from error
        else:
            prompts.append({"prompt": line.strip(), "kind": "all"})
    if not prompts:
        raise stage_error("bad_prompts", str(path), "expected at least one prompt, found none")
    return prompts[: config.limit]


def read_pairs(config: BiasConfig) -> list[dict[str, str]]:
    """The rows of a CSV file with CrowS-Pairs' columns.

    Raises StageError naming missing columns, or the row that is not a pair.
    """
    path = Path(config.pairs) if config.pairs else DATA_DIR / "bias_pairs.csv"
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise stage_error(
                "bad_pairs", f"{path}:1", f"expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}"
            )
        pairs = []
        for row in reader:
            if not row["sent_more"] or not row["sent_less"]:
                raise stage_error("bad_pairs", f"{path}:{reader.line_num}", "expected two sentences")
            pairs.append({name: row[name] or "" for name in COLUMNS})
    if not pairs:
        raise stage_error("bad_pairs", str(path), "expected at least one pair of sentences, found none")
    return pairs[: config.limit]
