"""What tuning on some kinds of tasks does for kinds that it never saw, zero- and few-shot, over several seeds.

python -m benchmarks.alignment.bench_generalisation MODEL OUT [--seeds 17 18 19] [--shots 0 2] [--limit 100]
    [--threads 1]

MODEL: a Hugging Face folder of a base model with the chat tokens, such as the pretrain artifact of the quickstart.
Seven public data sets are of three kinds (KINDS). As in FLAN (Wei et al. 2022, section 2), one kind is left out at a
time: the instructions of the two others, in three phrasings a data set, tune a model, and every model answers questions
of all three, of rows that nobody was tuned on. So each task is answered by models that saw its kind and by one that did
not. Rows of over 450 characters are left out, so that two solved examples fit in 512 tokens. What is in OUT already is
taken as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.alignment.stages import Stages, spread
from benchmarks.evaluation.bench_eval import DATA, GAUNTLET
from corpus.config import InstructionsConfig
from corpus.instructions import instructions
from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig
from infra.launch.config import LaunchConfig
from training.config import SftConfig
from training.sft import sft


class Task(NamedTuple):
    """A file of questions, its fields, and the phrasings of its instructions."""

    path: Path
    phrasings: Sequence[str]
    query: str = "query"
    choices: str = "choices"
    gold: str = "gold"
    query_suffix: str = "\nAnswer:"


ANSWERS = ("{%s}\n{options}", "{%s}\nChoose the right answer.\n{options}", "Choose one of these:\n{options}\n\n{%s}")
GOES_ON = (
    "How does it go on? {%s}\n{options}",
    "{%s} …\nWhat comes next?\n{options}",
    "{options}\nWhich follows? {%s}",
)
YES_OR_NO = ("{%s}", "Answer with yes or no.\n{%s}", "{%s}\nYes or no?")
KINDS: dict[str, dict[str, Task]] = {
    "questions": {
        "arc_easy": Task(GAUNTLET / "world_knowledge" / "arc_easy.jsonl", ANSWERS),
        "openbook_qa": Task(GAUNTLET / "commonsense_reasoning" / "openbook_qa.jsonl", GOES_ON),
    },
    "common sense": {
        "piqa": Task(GAUNTLET / "commonsense_reasoning" / "piqa.jsonl", ANSWERS),
        "copa": Task(GAUNTLET / "commonsense_reasoning" / "copa.jsonl", GOES_ON, query_suffix=""),
        "hellaswag": Task(DATA / "hellaswag" / "hellaswag.jsonl", GOES_ON, "ctx", "endings", "label", ""),
    },
    "yes or no of a passage": {
        "boolq": Task(GAUNTLET / "reading_comprehension" / "boolq.jsonl", YES_OR_NO),
        "sensitive": Task(GAUNTLET / "safety" / "enterprise_pii_classification.jsonl", YES_OR_NO, query_suffix=""),
    },
}
LONGEST = 450
"""Characters of a question with all of its choices."""
MOST_EXAMPLES = 120
"""Of a data set that are tuned on."""
# Rates as the quickstart's, whose model this is.
SFT: dict[str, Any] = {
    "duration": "1 epoch", "global_batch_examples": 16, "group_by_length": True, "max_length": 192,
    "answer_max_tokens": 16, "answers_limit": 2, "heldout_limit": 32, "evaluate_every": "100 %", "watched_prompts": 0,
    "optimizer": {
        "learning_rate": 6.0e-4, "embedding_scale": 3, "weight_decay": 0.0,
        "muon": {"learning_rate": 0.01, "iterations": 3},
    },
    "schedule": {"decay": "linear", "warmup": "5 %", "final_share": 0.05},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--limit", type=int, default=100, help="questions of each task that are asked")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if missing := [str(task.path) for tasks in KINDS.values() for task in tasks.values() if not task.path.exists()]:
        sys.exit(f"expected {', '.join(missing)}")
    stages = Stages(given.out, LaunchConfig(threads=given.threads, trainer="native", device="cpu"))
    files = {name: _split(task, given.out / "data" / name, given.limit) for name, task in _tasks().items()}
    asked = BenchmarksConfig.model_validate({
        "tasks": [
            {
                "name": name, "kind": "multiple_choice", "path": str(test), "shots_path": str(train),
                **{key: getattr(task, key) for key in ("query", "choices", "gold", "query_suffix")},
            }
            for (name, task), (train, test) in zip(_tasks().items(), files.values(), strict=True)
        ],
        "shots": given.shots,
    })  # fmt: skip
    scored = {("base", 0): stages.made("benchmarks_base", benchmarks, asked, {"model": given.model})}
    for seed, left_out in product(given.seeds, KINDS):
        seen = [name for kind, tasks in KINDS.items() if kind != left_out for name in tasks]
        read = [_source(_tasks()[name], files[name][0]) for name in seen]
        config = InstructionsConfig.model_validate({"read": read, "heldout_share": 0.05})
        label = left_out.replace(" ", "_")
        inputs = {
            "model": given.model,
            "instructions": stages.made(f"instructions_without_{label}", instructions, config),
        }
        tuned = stages.made(f"sft_without_{label}_{seed}", sft, SftConfig(**SFT, seed=seed), inputs)
        scored[left_out, seed] = stages.made(f"benchmarks_without_{label}_{seed}", benchmarks, asked, {"model": tuned})
    _print(scored, given.seeds, given.shots)


def _tasks() -> dict[str, Task]:
    return {name: task for tasks in KINDS.values() for name, task in tasks.items()}


def _split(task: Task, folder: Path, limit: int) -> tuple[Path, Path]:
    """Rows to tune on and rows to ask, evenly over the file: at most half of them are asked."""
    rows = [row for row in map(json.loads, task.path.read_text(encoding="utf8").splitlines()) if _fits(row, task)]
    count = min(limit, len(rows) // 2)
    asked = {(2 * number + 1) * len(rows) // (2 * count) for number in range(count)}
    folder.mkdir(parents=True, exist_ok=True)
    sides = folder / "train.jsonl", folder / "test.jsonl"
    for path, is_asked in zip(sides, (False, True), strict=True):
        lines = [json.dumps(row) + "\n" for number, row in enumerate(rows) if (number in asked) == is_asked]
        path.write_text("".join(lines), encoding="utf8")
    return sides


def _fits(row: Mapping[str, Any], task: Task) -> bool:
    return len(row[task.query]) + sum(map(len, row[task.choices])) <= LONGEST


def _source(task: Task, path: Path) -> dict[str, Any]:
    """The data set as instructions: the choice of the right number is the answer."""
    choices = {task.gold: {number: f"{{{task.choices}.{number}}}" for number in range(4)}}
    phrased = [
        {"prompt": text % task.query, "answer": f"{{{task.gold}}}", "choices": choices} for text in task.phrasings
    ]
    return {"kind": "files", "paths": [str(path)], "templates": phrased, "max_examples": MOST_EXAMPLES}


def _print(scored: Mapping[tuple[str, int], Path], seeds: Sequence[int], shots: Sequence[int]) -> None:
    """Accuracy of the base model, of those that saw other kinds alone, and of those that saw the task's kind."""
    found = {
        key: json.loads((path / "results.json").read_text(encoding="utf8"))["shots"] for key, path in scored.items()
    }

    def share(key: tuple[str, int], count: int, name: str) -> float:
        return 100 * float(found[key][str(count)][name]["acc"]["value"])

    titles = [f"{who}, {count} shots" for count in shots for who in ("base", "never saw the kind", "saw it")]
    print(f"| kind | task | questions | chance | {' | '.join(titles)} |\n|---|---|{'---:|' * (2 + len(titles))}")
    means: dict[str, list[list[float]]] = {title: [] for title in titles}
    for kind, tasks in KINDS.items():
        others = [one for one in KINDS if one != kind]
        for name in tasks:
            cell = found["base", 0][str(shots[0])][name]["acc"]
            values = []
            for count in shots:
                values.append([share(("base", 0), count, name)])
                values.append([share((kind, seed), count, name) for seed in seeds])
                values.append([fmean(share((one, seed), count, name) for one in others) for seed in seeds])
            for title, value in zip(titles, values, strict=True):
                means[title].append(value)
            told = [_cell(value) for value in values]
            print(f"| {kind} | {name} | {cell['n']} | {100 * cell['chance']:.3g} | {' | '.join(told)} |")
    told = [_cell([fmean(seed) for seed in zip(*rows, strict=True)]) for rows in means.values()]
    print(f"| all | mean | | | {' | '.join(told)} |")


def _cell(values: list[float]) -> str:
    """Mean and standard deviation of several seeds; of one value nothing but that."""
    return f"{values[0]:.3g}" if len(values) == 1 else spread(values)


if __name__ == "__main__":
    main()
