"""Recall of planted test items in the layouts that copies of benchmarks have, and false alarms on clean text.

python benchmarks/corpus/bench_recall.py

For each task every item is planted once in each layout, between two paragraphs of real text, and `decontaminate` looks
for it among the items of all tasks that `benchmark_text` writes. The items are those of ../shared/data, and records
with the fields of lm-eval's own tasks that are mirrored and read by lm-eval's YAML. "long" counts items of at least 8
words (question and right answer; for the layout "question" of the question alone), "short" the others. False alarms are
counted on text that holds no benchmark; each is printed with the words that were hit. Minutes on one core.
"""

from __future__ import annotations

import csv
import html
import io
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa

from benchmarks.corpus.planted import SHARED, real_texts
from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.index import make_index
from corpus.decontaminate.items import read_items, words_of
from corpus.decontaminate.kernels import Searcher
from evaluation.benchmark_text import benchmark_text
from evaluation.config import BenchmarkTask, BenchmarkTextConfig
from evaluation.mirror_writer import mirror_task
from infra.run import Run

MIN_WORDS = 8
CLEAN = (
    "wikitext2",
    "nltk_gutenberg",
    "nltk_webtext",
    "python_peps",
    "spamassassin_email",
    "tinyshakespeare",
    "web_demo",
)
ABC = "ABCDEFGH"


@dataclass(frozen=True)
class Raw:
    """An item as its data set has it."""

    question: str
    choices: tuple[str, ...]
    right: str


def questions(raw: Raw) -> str:
    return raw.question


def answered(raw: Raw) -> str:
    return f"{raw.question} {raw.right}"


def template(raw: Raw) -> str:
    return f"Question: {raw.question}\nAnswer: {raw.right}"


def lettered(raw: Raw) -> str:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(ABC, raw.choices, strict=False))
    return f"{raw.question}\n{listed}\nAnswer: {ABC[raw.choices.index(raw.right)]}" if raw.choices else template(raw)


def between(raw: Raw) -> str:
    """The choices in a list without letters, then the answer itself."""
    listed = "".join(f"\n- {choice}" for choice in raw.choices)
    return f"{raw.question}{listed}\n{raw.right}"


def record(raw: Raw) -> str:
    return json.dumps(
        {
            "id": "Q_17",
            "question": raw.question,
            "choices": {"text": raw.choices, "label": list(ABC[: len(raw.choices)])},
            "answer": raw.right,
        }
    )


def table(raw: Raw) -> str:
    row = io.StringIO()
    csv.writer(row).writerow([17, raw.question, *(raw.choices or [raw.right]), 0])
    return row.getvalue().strip()


def quiz(raw: Raw) -> str:
    listed = "".join(
        f"<li><label><input type='radio'> {html.escape(choice)}</label></li>" for choice in raw.choices or [raw.right]
    )
    return f"<h3>12) {html.escape(raw.question)}</h3><ul class='quiz'>{listed}</ul>"


LAYOUTS: dict[str, Callable[[Raw], str]] = {
    "question": questions,
    "with answer": answered,
    "template": template,
    "lettered": lettered,
    "choices between": between,
    "JSON": record,
    "CSV": table,
    "HTML quiz": quiz,
}


def rows_of(file: Path) -> list[dict]:
    with file.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def unlabelled(text: str) -> str:
    return text.removeprefix("Question: ").removesuffix("\nAnswer:").strip()


def gauntlet(folder: Path) -> tuple[list[BenchmarkTask], dict[str, list[Raw]], Path]:
    """The tasks, the raw items of each, and a mirror of those that are lm-eval's."""
    found = {file.stem: file for file in (SHARED / "llm_foundry_eval").rglob("*.jsonl")}
    tasks, raw = [], {}
    mirror = folder / "mirror"
    for name in ("arc_easy", "piqa", "openbook_qa", "copa", "boolq", "winogender_mc_female"):
        rows = rows_of(found[name])
        tasks.append(BenchmarkTask(name=f"file_{name}", kind="multiple_choice", path=str(found[name])))
        raw[f"file_{name}"] = [
            Raw(unlabelled(row["query"]), tuple(row["choices"]), row["choices"][row["gold"]]) for row in rows
        ]
    rows = rows_of(found["commonsense_qa"])
    tasks.append(BenchmarkTask(name="file_commonsense_qa", kind="multiple_choice", path=str(found["commonsense_qa"])))
    raw["file_commonsense_qa"] = [_commonsense(row) for row in rows]
    tasks.append(BenchmarkTask(name="file_lambada", kind="cloze", path=str(SHARED / "lambada" / "lambada_test.jsonl")))
    raw["file_lambada"] = [Raw(*_last_word(row["text"])) for row in rows_of(SHARED / "lambada" / "lambada_test.jsonl")]
    tasks.append(BenchmarkTask(name="file_jeopardy", kind="cloze", path=str(found["jeopardy_small"])))
    raw["file_jeopardy"] = [Raw(row["context"], (), row["continuation"]) for row in rows_of(found["jeopardy_small"])]
    for name in ("arc_easy", "piqa", "openbookqa", "commonsense_qa", "gsm8k", "hellaswag"):
        records, items = lm_eval_records(name, found)
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf8")
        mirror_task(name, file, mirror, shots=0)
        tasks.append(BenchmarkTask(name=name, kind="lm_eval"))
        raw[name] = items
    tasks += [BenchmarkTask(name=name) for name in ("minimal_pairs", "cloze")]
    return tasks, raw, mirror


def _last_word(text: str) -> tuple[str, tuple[str, ...], str]:
    given, _, last = text.rpartition(" ")
    return given, (), last


def _commonsense(row: dict) -> Raw:
    question, _, rest = unlabelled(row["query"]).partition("\nChoices:\n")
    choices = tuple(line.partition(". ")[2] for line in rest.split("\n"))
    return Raw(question, choices, choices[row["gold"]])


def lm_eval_records(name: str, found: dict[str, Path]) -> tuple[list[dict], list[Raw]]:
    """Records as the data set on the hub has them, and the raw items."""
    if name == "gsm8k":
        rows = rows_of(SHARED / "gsm8k" / "test.jsonl")
        return rows, [Raw(row["question"], (), row["answer"]) for row in rows]
    if name == "hellaswag":
        rows = rows_of(SHARED / "hellaswag" / "hellaswag.jsonl")
        return rows, [Raw(row["ctx"], tuple(row["endings"]), row["endings"][int(row["label"])]) for row in rows]
    rows = rows_of(found["openbook_qa" if name == "openbookqa" else name])
    items = [
        _commonsense(row)
        if name == "commonsense_qa"
        else Raw(unlabelled(row["query"]), tuple(row["choices"]), row["choices"][row["gold"]])
        for row in rows
    ]
    if name == "piqa":
        return [
            {
                "goal": raw.question,
                "sol1": raw.choices[0],
                "sol2": raw.choices[1],
                "label": raw.choices.index(raw.right),
            }
            for raw in items
        ], items
    asked = "question_stem" if name == "openbookqa" else "question"
    records = []
    for number, raw in enumerate(items):
        # commonsense_qa asks for five choices, of which this file has four.
        choices = (
            [*raw.choices, "none of these"][: max(5, len(raw.choices))]
            if name == "commonsense_qa"
            else list(raw.choices)
        )
        labels = list(ABC[: len(choices)])
        records.append(
            {
                "id": str(number),
                asked: raw.question,
                "choices": {"text": choices, "label": labels},
                "answerKey": labels[raw.choices.index(raw.right)],
            }
        )
    return records, items


def hit_texts(texts: Sequence[str], index) -> dict[int, list[tuple[int, int, int]]]:
    """The hits of each text: hash, first byte, end."""
    hits: dict[int, list[tuple[int, int, int]]] = {}
    for text, gram, begin, end in Searcher(index)(pa.chunked_array([pa.array(texts, pa.large_string())])).tolist():
        hits.setdefault(text, []).append((gram, begin, end))
    return hits


def main() -> None:
    clean = [text for name in CLEAN for text in real_texts(SHARED / name)]
    generator = random.Random(17)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks, raw, mirror = gauntlet(folder)
        out = folder / "items"
        out.mkdir()
        benchmark_text(BenchmarkTextConfig(tasks=tuple(tasks), tasks_mirror=str(mirror)), {}, out, Run(folder / "work"))
        items = read_items(out)
    index, owners = make_index(items, DecontaminateConfig())
    print(
        f"{len(items):,} items, {index.grams.size:,} n-grams, {index.alone.size:,} alone, {index.answers.size:,} pairs"
    )
    print(f"{'task':<22}{'items':>7}  " + "".join(f"{layout:>16}" for layout in LAYOUTS))
    for task, planted in raw.items():
        cells = []
        for layout, write in LAYOUTS.items():
            texts = []
            for item in planted:
                before, after = (generator.choice(clean)[:300] for _ in range(2))
                texts.append(f"{before}\n\n{write(item)}\n\n{after}")
            hits = hit_texts(texts, index)
            rows = Counter()
            for number, item in enumerate(planted):
                counted = item.question if layout == "question" else f"{item.question} {item.right}"
                is_long = words_of(counted).number >= MIN_WORDS
                mine = any(
                    items[owner].task == task and int(items[owner].item) == number
                    for gram, _, _ in hits.get(number, ())
                    for owner in owners.of(gram).tolist()
                )
                rows[is_long, mine] += 1
                if is_long and not mine and os.environ.get("SHOW"):
                    print("MISSED", layout, write(item)[:300].replace("\n", "\\n"))
            long, short = (rows[side, True] + rows[side, False] for side in (True, False))
            cells.append(f"{rows[True, True]}/{long}" + (f" {rows[False, True]}/{short}" if short else ""))
        print(f"{task:<22}{len(planted):>7}  " + "".join(f"{cell:>16}" for cell in cells), flush=True)
    for name in CLEAN:
        texts = real_texts(SHARED / name)
        hits = hit_texts(texts, index)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        print(f"{name}: {len(hits)} of {len(texts):,} texts hit, {megabytes:.1f} MB")
        for text, rows in list(hits.items())[: int(os.environ.get("SHOW", 0) or 8)]:
            gram, begin, end = rows[0]
            owner = items[owners.of(gram)[0]]
            kind = (
                "n-gram"
                if gram < index.grams.size
                else "alone"
                if gram < index.grams.size + index.alone.size
                else "answer"
            )
            print(f"   {kind} {owner.task} {owner.item}: {texts[text].encode()[begin:end].decode(errors='ignore')!r}")


if __name__ == "__main__":
    main()
