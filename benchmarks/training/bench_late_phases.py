"""Late phases of pretraining on the quickstart's base models: midtraining, weight averaging, longer context.

python -m benchmarks.training.bench_late_phases OUT BASE [BASE …] [--documents docs] [--threads 1]

BASE: `pretrain` artifacts of configs/quickstart.yaml in a store, from whose manifests tokenizer and seed follow. The
second source of text is this project's documentation, of which the base model has read nothing. From each base model
on:

    docstrings     midtraining on the first source alone, with a rate that decays
    mixed          the same on half of each source; mixed_2 with another seed
    constant       as mixed, with a constant rate, and a state after every tenth of it
    uniform, ema   means of the last five states of constant
    pair, soup     the uniform mean of mixed and mixed_2, and a greedy soup of these and constant
    yarn, base     context extension to 1,024 tokens on the documentation; yarn_untrained takes one step of rate 0

Figures are held-out bits per byte by source, and numbers found in the needle test by length. Existing artifacts
in OUT are taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.alignment.stages import Figures, Stages, spread
from corpus.config import IngestConfig, ShardConfig
from corpus.ingest import ingest
from corpus.shard import shard
from evaluation.config.needle import NeedleConfig
from evaluation.needle import needle
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from infra.store.measurements import TRAINED
from training.average import average
from training.config import AverageConfig, PretrainConfig
from training.pretrain import measure_trained, train

PHASE_LENGTH = 256
PHASE: dict[str, Any] = {
    "duration": "40 batches", "global_batch_tokens": 2048, "evaluate_every": "1000 batches", "evaluate_tokens": 8192,
    "optimizer": {
        "learning_rate": 5.0e-4, "embedding_scale": 10, "head_scale": 2, "betas": [0.6, 0.98],
        "muon": {"learning_rate": 0.01, "momentum": 0.9, "iterations": 3},
    },
    "schedule": {"warmup": "5 %", "decay": "linear", "final_share": 0.0},
}  # fmt: skip
MIXED: dict[str, Any] = {"proportion": {"docstrings": 1, "docs": 1}}
MIDTRAININGS: dict[str, dict[str, Any]] = {
    "docstrings": {"mixture": {"proportion": {"docstrings": 1, "docs": 0}}},
    "mixed": {"mixture": MIXED},
    "mixed_2": {"mixture": MIXED},
    "constant": {
        "mixture": MIXED, "schedule": {"warmup": "5 %", "decay": "constant"}, "keep_state": {"every": "4 batches"},
    },
}  # fmt: skip
STATES = 5
AVERAGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "uniform": ({"states": STATES}, ("constant",)),
    "ema": ({"states": STATES, "method": "ema", "decay": 0.7}, ("constant",)),
    "pair": ({}, ("mixed", "mixed_2")),
    "soup": ({"method": "greedy", "validation_sequences": 64}, ("mixed", "mixed_2", "constant")),
}
"""Config of `average`, and its members."""
LONGER = 1024
EXTENSIONS: dict[str, dict[str, Any]] = {
    "yarn": {"rope": {"kind": "yarn", "positions": LONGER}},
    "base": {"rope": {"kind": "base", "positions": LONGER}},
    "yarn_untrained": {
        "rope": {"kind": "yarn", "positions": LONGER}, "duration": "1 batches",
        "optimizer": {"learning_rate": 1.0e-12, "weight_decay": 0.0},
    },
}  # fmt: skip
EXTENDING: dict[str, Any] = {
    "duration": "24 batches", "global_batch_tokens": 4096, "mixture": {"proportion": {"docs": 1, "docstrings": 0}},
}  # fmt: skip
NEEDLE: dict[str, Any] = {"lengths": (128, 256, 512, 1024), "depths": (0.0, 0.25, 0.5, 0.75, 1.0), "items": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("bases", type=Path, nargs="+")
    parser.add_argument("--documents", type=Path, default=Path("docs"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--phases", nargs="+", choices=("midtraining", "context"), default=("midtraining", "context"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stages = Stages(args.out, LaunchConfig(threads=args.threads, trainer="native", device="cpu"))
    rows: dict[str, list[Figures]] = {}
    for base in args.bases:
        manifest = parse_own_json((base / "manifest.json").read_text(encoding="utf8"))
        tokenizer = base.resolve().parent.parent / manifest["inputs"]["tokenizer"]["path"]
        seed = manifest["config"]["seed"]
        if "midtraining" in args.phases:
            shards = packed(stages, args.documents, tokenizer, PHASE_LENGTH)
            for name, model in midtrained(stages, base, tokenizer, shards, seed).items():
                inputs = {TRAINED: model, "shards": shards, "tokenizer": tokenizer}
                config = PretrainConfig.model_validate(PHASE)
                measured = stages.made(f"measured_{name}_{seed}", measure_trained, config, inputs)
                rows.setdefault(name, []).append(stages.figures_of(measured.name))
        if "context" in args.phases:
            shards = packed(stages, args.documents, tokenizer, LONGER)
            for name, model in extended(stages, base, tokenizer, shards, seed).items():
                asking = NeedleConfig.model_validate(NEEDLE)
                found_shares = stages.made(f"needle_{name}_{seed}", needle, asking, {"model": model})
                rows.setdefault(f"needle: {name}", []).append(stages.figures_of(found_shares.name))
    table(rows, {"bits per byte of docs": "bits_per_byte_docs", "of docstrings": "bits_per_byte_docstrings"}, 1.0)
    table(rows, {f"found at {length}, %": f"needle_{length}" for length in NEEDLE["lengths"]}, 100.0)


def packed(stages: Stages, documents: Path, tokenizer: Path, length: int) -> Path:
    """Shards of both sources, by source."""
    files = {"kind": "files", "name": "docs", "paths": [str(documents.resolve() / "**" / "*.md")]}
    read = IngestConfig.model_validate({"read": [{"kind": "docstrings", "limit_mb": 3}, files]})
    text = stages.made("documents", ingest, read)
    config = ShardConfig(sequence_length=length, by_source=True, heldout_share=0.1)
    return stages.made(f"shards_{length}", shard, config, {"documents": text, "tokenizer": tokenizer})


def midtrained(stages: Stages, base: Path, tokenizer: Path, shards: Path, seed: int) -> dict[str, Path]:
    """The base model, its midtrainings and their averages, by name."""
    models = {"before": base}
    inputs = {"model": base, "tokenizer": tokenizer, "shards": shards}
    for number, (name, settings) in enumerate(MIDTRAININGS.items()):
        config = PretrainConfig.model_validate(PHASE | settings | {"seed": 100 * seed + number})
        models[name] = stages.made(f"{name}_{seed}", train, config, inputs)
    for name, (settings, members) in AVERAGES.items():
        given = {"model" if member == members[0] else member: models[member] for member in members}
        given |= {"shards": shards} if settings.get("method") == "greedy" else {}
        models[name] = stages.made(f"{name}_{seed}", average, AverageConfig.model_validate(settings), given)
    return models


def extended(stages: Stages, base: Path, tokenizer: Path, shards: Path, seed: int) -> dict[str, Path]:
    """The base model and its extensions, by name."""
    inputs = {"model": base, "tokenizer": tokenizer, "shards": shards}
    models = {"before": base}
    for name, settings in EXTENSIONS.items():
        config = PretrainConfig.model_validate(PHASE | EXTENDING | settings | {"seed": seed})
        models[name] = stages.made(f"context_{name}_{seed}", train, config, inputs)
    return models


def table(rows: dict[str, list[Figures]], columns: dict[str, str], factor: float) -> None:
    """Print mean and spread over seeds of the rows that have such figures."""
    print(f"\n| model | seeds | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for name, several in rows.items():
        if all(key in figures for figures in several for key in columns.values()):
            cells = [spread([factor * figures[key] for figures in several]) for key in columns.values()]
            print(f"| {name} | {len(several)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
