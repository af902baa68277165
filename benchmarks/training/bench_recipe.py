"""Bits per byte after ten minutes on two cores, from text to model through our own stages.

python benchmarks/training/bench_recipe.py [--seeds 17] [--minutes 10] [--set KEY=VALUE …] [--out FOLDER]

Writes the text of ../shared/recipe/make_text.py (without it: says so, and does nothing), has `stemma run` make
tokenizer, shards and model of its training part by benchmarks/training/recipe.yaml, compiled anew, and measures the
exported model on the whole validation part. The clock runs for the whole of `stemma run`, servers and imports included.
How many tokens the time allows is found before it starts, by a short training on this machine.

The measure shares no code with training: transformers' own class and tokenizer in fp32. Every byte of every document
counts once. A document begins with <|endoftext|> as its only context and is predicted in windows of 256 tokens that do
not overlap; that it ends is not predicted.

python benchmarks/training/bench_recipe.py --ablations [NAME …] [--seeds 17] [--tokens 524288 | --flops 6e13]
    [--out FOLDER]

What each part of the recipe is worth: trainings of one length in tokens, or of as many FLOPs each, on one thread, two
at a time, with one part changed in each. Never looks at the validation part: the figure is the pretrain stage's own
bits per byte, of 2 % of the training documents that were held out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parents[2]
MAKE_TEXT = PROJECT.parent / "shared" / "recipe" / "make_text.py"
CONFIG = PROJECT / "benchmarks" / "training" / "recipe.yaml"
WINDOW = 256
NANOCHAT = 1.575
AIM, AT_LEAST = 1.45, 1.50
TRIAL = 120
"""Batches of the training that tells how fast this machine is, by the second half of them: in the first kernels are
compiled, servers start, and the guard computes the loss of each example."""
MARGIN = 0.96
"""Share of the time that is planned for: machines do not run evenly."""
# What each trains with in place of the recipe's settings.
ABLATIONS: dict[str, dict[str, str]] = {
    "recipe": {},
    "attention random": {"model.attention_init": "random"},
    "attention and embeddings random, their rates 100 and 5": {
        "model.attention_init": "random", "model.embedding_init": "random",
        "optimizer.embedding_scale": "100", "optimizer.head_scale": "5",
    },
    "rates of the embeddings 10 and 2": {"optimizer.embedding_scale": "10", "optimizer.head_scale": "2"},
    "rates of the embeddings 3 and 1": {"optimizer.embedding_scale": "3", "optimizer.head_scale": "1"},
    "AdamW for the matrices": {"optimizer.muon": "null"},
    "Muon at 0.06": {"optimizer.muon.learning_rate": "0.06"},
    "Muon at 0.015": {"optimizer.muon.learning_rate": "0.015"},
    "betas of 0.9 and 0.95, Muon's momentum 0.95": {
        "optimizer.betas": "[0.9, 0.95]", "optimizer.muon.momentum": "0.95",
    },
    "betas of 0.9 and 0.95": {"optimizer.betas": "[0.9, 0.95]"},
    "Muon's momentum 0.95": {"optimizer.muon.momentum": "0.95"},
    "Muon's momentum 0.85": {"optimizer.muon.momentum": "0.85"},
    "five Newton-Schulz steps": {"optimizer.muon.iterations": "5"},
    "no query-key norm, attention random": {"model.preset": "llama-4m", "model.attention_init": "random"},
    "residual projections not zero": {"model.residual_init": "scaled"},
    "squared ReLU in the gate": {"model.activation": "relu2"},
    "tied embeddings, random as the attention": {
        "model.tie_embeddings": "true", "model.attention_init": "random", "model.embedding_init": "random",
    },
    "no weight decay": {"optimizer.weight_decay": "0"},
    "cosine to a tenth": {"schedule.decay": "cosine", "schedule.final_share": "0.1"},
    "WSD, half of it the fall": {"schedule.decay": "wsd", "schedule.decay_length": "50 %"},
    "batches that grow from 1,024 over 100,000 tokens": {
        "batch_warmup.first_tokens": "1024", "batch_warmup.over_tokens": "100000",
    },
    "documents not kept apart": {"attention": "sequence"},
    "batches of 2,048 tokens": {"global_batch_tokens": "2048", "optimizer.muon.learning_rate": "0.02"},
    "three layers": {"model.layers": "3"},
    "four layers": {"model.layers": "4"},
    "an MLP of 352": {"model.mlp_width": "352"},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[17])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="wall time of a race; 0 trains as long as the recipe says"
    )
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--ablations", nargs="*", metavar="NAME", help=f"these, or all: {'; '.join(ABLATIONS)}")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, default=524_288, help="of each ablation")
    length.add_argument("--flops", type=float, help="of each ablation, as many as its model makes tokens of them")
    parser.add_argument("--out", type=Path, help="keeps stores and text here; by default they are removed")
    given = parser.parse_args()
    if not MAKE_TEXT.exists():
        print(f"skipped: the text of the race is made by {MAKE_TEXT}, which is not here")
        return
    names = ("torch", "mosaicml", "mosaicml-streaming", "transformers")
    print(
        f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, { {name: metadata.version(name) for name in names} }"
    )
    with tempfile.TemporaryDirectory(prefix="recipe-") as temporary:
        folder = (given.out or Path(temporary)).resolve()
        subprocess.run([sys.executable, str(MAKE_TEXT), str(folder / "text")], check=True)
        settings = given.settings
        if given.ablations is not None:
            ablate(folder, given.ablations or list(ABLATIONS), given.seeds, settings, given.tokens, given.flops)
            return
        if given.minutes:
            tokens = measure_pace(folder, settings).tokens(given.minutes * 60)
            settings = [*settings, f"pretrain.duration={tokens} tokens"]
        bits = [race(folder, seed, settings) for seed in given.seeds]
    print(f"nanochat {NANOCHAT}; aim {AIM}, at the least {AT_LEAST}")
    if len(bits) > 1:
        print(f"{len(bits)} seeds: {statistics.mean(bits):.4f}, standard deviation {statistics.stdev(bits):.4f}")


@dataclass(frozen=True)
class Pace:
    """Speed of the recipe on this machine.

    Args:
        batch_tokens: Tokens of a batch.
        batch_s: Seconds of one.
        beside_s: Seconds of `stemma run` beside its batches.
    """

    batch_tokens: float
    batch_s: float
    beside_s: float

    def tokens(self, seconds: float) -> int:
        """Number of tokens that a race of this length trains on."""
        batches = int((MARGIN * seconds - self.beside_s) / self.batch_s)
        print(f"{self}: {batches:,} batches in {seconds:.0f} s")
        if batches < TRIAL:
            raise SystemExit("the time is too short for a training of any use")
        return int(batches * self.batch_tokens)


def measure_pace(folder: Path, settings: list[str]) -> Pace:
    """The pace of a training of TRIAL batches, which is thrown away."""
    trial = folder / "trial"
    wall_s, document = run_stages(trial, 0, [*settings, f"pretrain.duration={TRIAL} batches"])
    model = model_of(document)
    times = [json.loads(line)["time"] for line in (model / "aux" / "metrics.jsonl").read_text().splitlines()]
    batch_tokens = figures_of(model)["tokens"] / TRIAL
    # The last line is written when the training is over.
    batch_s = (times[TRIAL - 2] - times[TRIAL // 2]) / (TRIAL - 2 - TRIAL // 2)
    shutil.rmtree(trial)
    return Pace(batch_tokens, batch_s, wall_s - TRIAL * batch_s)


def ablate(
    folder: Path, names: list[str], seeds: list[int], settings: list[str], tokens: int, flops: float | None
) -> None:
    """Prints bits per byte of held-out training documents with each of the ABLATIONS, each seed on a line.

    flops: of each training, in place of `tokens`.
    """
    store = folder / "store"
    shares = ("shard.heldout_share=0.02", "tokenizer.heldout_share=0.02")
    settings = [*settings, *shares, "pretrain.validation_tokens=120000", "launch.threads=1"]
    # One after the other up to the shards, which all of them share.
    run_stages(store, seeds[0], settings, until="shard")

    def figures(name: str, seed: int) -> dict[str, Any]:
        changed = [f"pretrain.{key}={value}" for key, value in ABLATIONS[name].items()]
        long = tokens if flops is None else int(flops / flops_of(ABLATIONS[name]))
        changed += [f"pretrain.duration={long} tokens", f"pretrain.seed={seed}"]
        return figures_of(model_of(run_stages(store, seeds[0], [*settings, *changed])[1]))

    print(f"{'':<56}         bits per byte, nats a token, tokens")
    with ThreadPoolExecutor(2) as pool:
        trainings = [(name, seed) for name in names for seed in seeds]
        results = pool.map(lambda training: figures(*training), trainings)
        for (name, seed), result in zip(trainings, results, strict=True):
            figures_text = f"{result['bits_per_byte']:.4f}  {result['validation_loss']:.3f}  {result['tokens']:>10,.0f}"
            print(f"{name:<56}seed {seed:<4}{figures_text}", flush=True)


def flops_of(changed: dict[str, str]) -> float:
    """FLOPs that training on one token takes with an ablation's model."""
    from training.config import ModelConfig
    from training.model.models import build, flops_per_token, hf_config

    recipe = yaml.safe_load(CONFIG.read_text(encoding="utf8"))
    model = recipe["pretrain"]["model"]
    model |= {key.removeprefix("model."): value for key, value in changed.items() if key.startswith("model.")}
    config = hf_config(ModelConfig.model_validate(model), recipe["tokenizer"]["vocab_size"], {})
    return flops_per_token(build(config, 0), WINDOW)


def run_stages(store: Path, seed: int, settings: list[str], until: str = "pretrain") -> tuple[float, dict[str, Any]]:
    """Runs tokenizer, shards and pretraining in a store: seconds of wall time, and the command's document."""
    text = store.parent / "text" / "train.jsonl"
    command = [sys.executable, "-m", "cli.main", "run", str(CONFIG), "--until", until, "--json"]
    command += ["--root", str(store), "--set", f"seed={seed}"]
    command += ["--set", f"ingest.read=[{{kind: files, paths: ['{text}']}}]"]
    command += [part for setting in settings for part in ("--set", setting)]
    compiled = store.with_name(f"{store.name}-compiled")
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    started = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    seconds = time.monotonic() - started
    document = json.loads(done.stdout)
    if done.returncode:
        raise SystemExit(f"stemma run ended with exit code {done.returncode}: {document.get('errors')}")
    return seconds, document


def model_of(document: dict[str, Any]) -> Path:
    return Path(next(stage["path"] for stage in document["stages"] if stage["stage"] == "pretrain"))


def figures_of(model: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((model / "manifest.json").read_text(encoding="utf8"))["result"]["figures"]
    return figures


def race(folder: Path, seed: int, settings: list[str]) -> float:
    """Builds one model and prints what it took and what it came to; its bits per byte."""
    seconds, document = run_stages(folder / f"store-{seed}", seed, settings)
    print(f"\nseed {seed}: {seconds:.0f} s of wall time")
    for stage in document["stages"]:
        print(f"  {stage['stage']:<12}{stage['seconds']:>6.0f} s  {stage.get('headline') or ''}")
    model = model_of(document)
    figures = figures_of(model)
    for name in ("parameters", "batches", "tokens", "tokens_per_s"):
        print(f"  {name:<12}{figures[name]:>14,.0f}")
    started = time.monotonic()
    bits, tokens, size = bits_per_byte(model, folder / "text" / "val.jsonl")
    print(f"  measured {tokens:,} tokens, {size:,} bytes in {time.monotonic() - started:.0f} s")
    print(f"  bits per byte of the validation part: {bits:.4f}", flush=True)
    return bits


def bits_per_byte(model_dir: Path, text: Path) -> tuple[float, int, int]:
    """Bits per byte of the documents in a JSON Lines file by an exported model; see `bits_of`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def encode(document: str) -> list[int]:
        ids: list[int] = tokenizer.encode(document, add_special_tokens=False)
        assert tokenizer.decode(ids) == document
        return [tokenizer.eos_token_id, *ids]

    return bits_of(lambda ids: model(ids).logits, encode, text)


def bits_of(logits_of: Callable[[Any], Any], encode: Callable[[str], list[int]], text: Path) -> tuple[float, int, int]:
    """Bits per byte of the documents in a JSON Lines file; the tokens and bytes that were counted.

    Args:
        logits_of: Logits (B, T, V) of ids (B, T).
        encode: Ids of a document, the first of which is context alone.
        text: The file.
    """
    import torch
    from torch.nn.functional import cross_entropy

    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf8").splitlines()]
    windows = []
    for ids in map(encode, documents):
        windows += [ids[begin : begin + WINDOW + 1] for begin in range(0, len(ids) - 1, WINDOW)]
    windows.sort(key=len)
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(windows), 16):
            batch = windows[begin : begin + 16]
            # Padding on the right is seen by no token of a causal model; where it is predicted, it does not count.
            rows = torch.full((len(batch), max(map(len, batch))), -100)
            for row, window in zip(rows, batch, strict=True):
                row[: len(window)] = torch.tensor(window)
            logits = logits_of(rows[:, :-1].clamp(min=0)).double()
            nats += float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
            tokens += int((rows[:, 1:] != -100).sum())
    size = sum(len(document.encode()) for document in documents)
    return nats / math.log(2) / size, tokens, size


if __name__ == "__main__":
    main()
