"""Write the project's own benchmark data into evaluation/data/:  python -m tools.benchmark_data.generate"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable

from evaluation.config import DATA_DIR
from tools.benchmark_data import bias_pairs, cloze, minimal_pairs, toxicity_prompts


def as_jsonl(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_csv(rows: Iterable[dict]) -> str:
    """The rows as CSV with the number of each in a first column without a name, as CrowS-Pairs has it."""
    text = io.StringIO()
    columns = ["", "sent_more", "sent_less", "stereo_antistereo", "bias_type"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"": number, **row} for number, row in enumerate(rows))
    return text.getvalue()


FILES: dict[str, Callable[[], str]] = {
    "minimal_pairs.jsonl": lambda: as_jsonl(minimal_pairs.rows()),
    "cloze.jsonl": lambda: as_jsonl(cloze.rows()),
    "bias_pairs.csv": lambda: as_csv(bias_pairs.rows()),
    "toxicity_prompts.jsonl": lambda: as_jsonl(toxicity_prompts.rows()),
}


def main() -> None:
    for name, content in FILES.items():
        (DATA_DIR / name).write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
