"""Bits per byte after ten minutes on two cores, from text to model through our own stages.

python benchmarks/bench_recipe.py [--seeds 17] [--set KEY=VALUE …] [--out FOLDER]

Writes the text of ../shared/recipe/make_text.py (without it: says so, and does nothing), has `stemma run` make
tokenizer, shards and model of its training part by benchmarks/recipe.yaml, compiled anew, and measures the exported
model on the whole validation part. The clock runs for the whole of `stemma run`, servers and imports included.

The measure shares no code with training: transformers' own class and tokenizer in fp32. Every byte of every document
counts once. A document begins with <|endoftext|> as its only context and is predicted in windows of 256 tokens that do
not overlap; that it ends is not predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
MAKE_TEXT = PROJECT.parent / "shared" / "recipe" / "make_text.py"
CONFIG = PROJECT / "benchmarks" / "recipe.yaml"
WINDOW = 256
NANOCHAT = 1.575
AIM, AT_LEAST = 1.45, 1.50


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[17])
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
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
        found = [race(folder, seed, given.settings) for seed in given.seeds]
    print(f"nanochat {NANOCHAT}; aim {AIM}, at the least {AT_LEAST}")
    if len(found) > 1:
        print(f"{len(found)} seeds: {statistics.mean(found):.4f}, standard deviation {statistics.stdev(found):.4f}")


def race(folder: Path, seed: int, settings: list[str]) -> float:
    """Builds one model and prints what it took and what it came to; its bits per byte."""
    store = folder / f"store-{seed}"
    command = [sys.executable, "-m", "cli.main", "run", str(CONFIG), "--until", "pretrain", "--json"]
    command += ["--root", str(store), "--set", f"seed={seed}"]
    command += ["--set", f"ingest.read=[{{kind: files, paths: ['{folder / 'text' / 'train.jsonl'}']}}]"]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled-{seed}")}
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    seconds = time.monotonic() - begun
    document = json.loads(done.stdout)
    if done.returncode:
        raise SystemExit(f"stemma run ended with exit code {done.returncode}: {document.get('errors')}")
    print(f"\nseed {seed}: {seconds:.0f} s of wall time")
    for stage in document["stages"]:
        print(f"  {stage['stage']:<12}{stage['seconds']:>6.0f} s  {stage.get('headline') or ''}")
    model = Path(next(stage["path"] for stage in document["stages"] if stage["stage"] == "pretrain"))
    figures = json.loads((model / "manifest.json").read_text(encoding="utf8"))["result"]["figures"]
    for name in ("parameters", "batches", "tokens", "tokens_per_s"):
        print(f"  {name:<12}{figures[name]:>14,.0f}")
    begun = time.monotonic()
    bits, tokens, size = bits_per_byte(model, folder / "text" / "val.jsonl")
    print(f"  measured {tokens:,} tokens, {size:,} bytes in {time.monotonic() - begun:.0f} s")
    print(f"  bits per byte of the validation part: {bits:.4f}", flush=True)
    return bits


def bits_per_byte(model_dir: Path, text: Path) -> tuple[float, int, int]:
    """Bits per byte of the documents in a JSON Lines file; the tokens and bytes that were counted."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [json.loads(line)["text"] for line in text.read_text(encoding="utf8").splitlines()]
    windows = []
    for one in texts:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(one, add_special_tokens=False)]
        assert tokenizer.decode(ids[1:]) == one
        windows += [ids[begin : begin + WINDOW + 1] for begin in range(0, len(ids) - 1, WINDOW)]
    windows.sort(key=len)
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(windows), 16):
            some = windows[begin : begin + 16]
            # Padding on the right is seen by no token of a causal model; where it is predicted, it does not count.
            rows = torch.full((len(some), max(map(len, some))), -100)
            for row, window in zip(rows, some, strict=True):
                row[: len(window)] = torch.tensor(window)
            logits = model(rows[:, :-1].clamp(min=0)).logits.double()
            nats += float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
            tokens += int((rows[:, 1:] != -100).sum())
    size = sum(len(one.encode()) for one in texts)
    return nats / math.log(2) / size, tokens, size


if __name__ == "__main__":
    main()
