"""How long the way takes from a model to its sources, and from a source to its models, in a store of 500 runs.

python benchmarks/infra/bench_lineage.py [--runs 500] [--repeats 5]

Builds a store of real manifests in a temporary folder: 20 corpora of 1,000 source files, each with its tokenizer and
200-file shards; 4 base models a corpus; and for every run an SFT model, a reward model, an RLHF model, the evaluations
of all three, a registration and a report. The commands run as a user would run them, each in a new process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from benchmarks.infra.manifests import sha, write_manifest  # noqa: E402
from flows.config.read import load, section_classes  # noqa: E402
from infra.fingerprint import fingerprint  # noqa: E402
from infra.store.manifest import Manifest, SourceRecord  # noqa: E402
from infra.store.store import Store  # noqa: E402

CORPORA, MODELS_A_CORPUS, SOURCE_FILES, SHARD_FILES = 20, 4, 1000, 200
GOAL_S = 2.0


class Writer:
    """Writes manifests as builds would, without payload files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.config = load(PROJECT / "configs" / "quickstart.yaml")
        self.written = 0

    def write(
        self, stage: str, number: int, files: int = 4, sources: tuple[SourceRecord, ...] = (), **inputs: Manifest
    ) -> Manifest:
        section = self.config.section(stage if stage in section_classes() else stage.split("_")[0])
        identity: Mapping[str, Any] = {"seed": number}
        digests = {name: item.digest for name, item in inputs.items()}
        name = fingerprint(stage, 1, identity, digests, {record.key: record.digest for record in sources})
        manifest = write_manifest(
            self.store.layout.artifact(stage, name),
            stage,
            name,
            inputs,
            files=files,
            figures=12,
            config=section.model_dump(mode="json") if section else {},
            identity=identity,
            sources=sources,
            pipeline="bench",
            code={"commit": "0" * 40, "dirty": False},
            finished=f"2026-11-21T00:00:00.{self.written:06}+00:00",
        )
        self.written += 1
        return manifest


def build_store(root: Path, runs: int) -> tuple[str, str, int]:
    """Returns the newest model's address, one source file, and how many artifacts there are."""
    writer = Writer(Store(root))
    bases: list[tuple[Manifest, Manifest]] = []
    for corpus in range(CORPORA):
        files = {f"/data/corpus-{corpus}/{at:05}.txt": sha(f"{corpus} {at}") for at in range(SOURCE_FILES)}
        source = SourceRecord("ingest.read.0", sha(f"corpus {corpus}"), files)
        ingest = writer.write("ingest", corpus, sources=(source,))
        clean = writer.write("clean", corpus, documents=ingest)
        tokenizer = writer.write("tokenizer", corpus, documents=clean)
        shard = writer.write("shard", corpus, SHARD_FILES, documents=clean, tokenizer=tokenizer)
        for seed in range(MODELS_A_CORPUS):
            bases.append((writer.write("pretrain", seed, shards=shard, tokenizer=tokenizer), shard))
    instructions, preferences = writer.write("instructions", 0), writer.write("preferences", 0)
    for run in range(runs):
        base, shard = bases[run % len(bases)]
        sft = writer.write("sft", run, model=base, instructions=instructions)
        reward = writer.write("reward_model", run, model=sft, preferences=preferences)
        rlhf = writer.write("rlhf", run, model=sft, reward_model=reward, prompts=instructions)
        judged = {}
        for label, model in (("base", base), ("sft", sft), ("rlhf", rlhf)):
            judged[f"benchmarks_{label}"] = writer.write(f"benchmarks_{label}", run, model=model)
            judged[f"safety_{label}"] = writer.write(f"safety_{label}", run, model=model, shards=shard)
        register = writer.write("register", run, model=rlhf, **judged)
        writer.write("report", run, register=register, rlhf=rlhf)
    return f"register/{register.fingerprint}", "/data/corpus-0/00000.txt", writer.written


def measure(arguments: list[str], repeats: int) -> tuple[float, float, int]:
    """(median seconds, slowest, nodes found) of a command."""
    seconds, nodes = [], 0
    for _ in range(repeats):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments], cwd=PROJECT, capture_output=True, check=True
        )
        seconds.append(time.perf_counter() - started)
        if "--json" in arguments:
            nodes = len(json.loads(done.stdout)["nodes"])
    return statistics.median(seconds), max(seconds), nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        model, source, artifacts = build_store(root, options.runs)
        print(f"{options.runs} runs, {artifacts:,} artifacts; median of {options.repeats}, each in a new process\n")
        print(f"{'command':<44} {'median s':>9} {'slowest s':>10} {'nodes':>7}")
        for name, arguments in (
            ("stemma --help", ["--help"]),
            ("stemma lineage MODEL --up --json", ["lineage", model, "--up", "--json", "--root", str(root)]),
            ("stemma lineage MODEL --up", ["lineage", model, "--up", "--root", str(root)]),
            ("stemma lineage FILE --down --json", ["lineage", source, "--down", "--json", "--root", str(root)]),
        ):
            median, slowest, nodes = measure(arguments, options.repeats)
            print(f"{name:<44} {median:>9.2f} {slowest:>10.2f} {nodes or '':>7}")
        print(f"\ngoal: from a model to its sources in under {GOAL_S:.0f} s")


if __name__ == "__main__":
    main()
