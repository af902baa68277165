"""Our recipe for a small model beside nanochat's, one after the other on this machine.

python -m benchmarks.training.bench_nanochat CHECKOUT [--python PYTHON] [--minutes 10] [--seed 17] [--out FOLDER]

CHECKOUT is a clone of nanochat, PYTHON an interpreter with what it imports (torch, pyarrow, rustbpe, tiktoken, wandb).
Both get the text of `bench_recipe`, as long for the whole way from text to model, and its measure of the validation
part. nanochat trains at depth 4 with its own defaults, compiled, on sequences of 256 and batches of 4,096 tokens, with
a tokenizer of 4,096 entries by its own script; how many steps the time allows is found by a short training before.
Ours runs with half of the minutes, to see if it is as far by then, and then with all of them. A second call with the
same OUT races with what nanochat reached in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.training.bench_recipe import MAKE_TEXT, MARGIN, PROJECT, WINDOW, bits_of, measure_pace, race

BATCH_TOKENS = 4096
TRIAL_STEPS = 40
_ARCHITECTURE = ["--depth=4", f"--max-seq-len={WINDOW}", "--window-pattern=L"]
_BATCHES = [f"--device-batch-size={BATCH_TOKENS // WINDOW}", f"--total-batch-size={BATCH_TOKENS}"]
_NOTHING_ELSE = ["--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=17, help="of our training; nanochat's is fixed")
    parser.add_argument("--out", type=Path, help="keeps text and models here; by default they are removed")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        _measure(given.measure)
        return
    if not MAKE_TEXT.exists():
        print(f"skipped: the text of the race is made by {MAKE_TEXT}, which is not here")
        return
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        folder = (given.out or Path(temporary)).resolve()
        record = folder / "nanochat.json"
        if not record.exists():
            subprocess.run([sys.executable, str(MAKE_TEXT), str(folder / "text")], check=True)
            bits = Nanochat(given.checkout.resolve(), given.python, folder).race(given.minutes * 60)
            record.write_text(json.dumps({"bits per byte": bits, "minutes": given.minutes}))
        reference = json.loads(record.read_text())
        pace = measure_pace(folder, [])
        for minutes in (reference["minutes"] / 2, reference["minutes"]):
            print(f"\nours, {minutes:g} minutes; nanochat: {reference}")
            store = folder / f"ours-{minutes:g}-{given.seed}"
            store.mkdir()
            (store / "text").symlink_to(folder / "text")
            race(store, given.seed, [f"pretrain.duration={pace.tokens(minutes * 60)} tokens"])


class Nanochat:
    """nanochat's own scripts on the text of the race."""

    def __init__(self, checkout: Path, python: str, folder: Path) -> None:
        self._checkout, self._python, self._folder = checkout, python, folder
        self._base = folder / "nanochat"
        self._text = folder / "text"
        _write_parquet(self._text, self._base / "base_data_climbmix")

    def race(self, seconds: float) -> float:
        """Train within this time, tokenizer and compiler included; return the bits per byte."""
        tokenizer_s, _ = self._run("scripts.tok_train", "--vocab-size=4096")
        trial_s, log = self._run("scripts.base_train", *self._settings(TRIAL_STEPS))
        steps = [float(ms) / 1000 for ms in re.findall(r"dt: ([\d.]+)ms", log)]
        step_s = statistics.median(steps[TRIAL_STEPS // 2 :])
        beside_s = tokenizer_s + trial_s - TRIAL_STEPS * step_s
        count = int((MARGIN * seconds - beside_s) / step_s)
        print(f"nanochat: {step_s:.3f} s a step, {beside_s:.0f} s beside them: {count:,} steps in {seconds:.0f} s")
        if count < TRIAL_STEPS:
            raise SystemExit("the time is too short for a training of any use")
        train_s, log = self._run("scripts.base_train", *self._settings(count))
        print(f"nanochat: {tokenizer_s + train_s:.0f} s of wall time, {count * BATCH_TOKENS:,} tokens")
        for line in log.splitlines():
            if line.startswith(("total ", "Total training time", "COMPUTE_DTYPE")) or f"step {count - 1:05d}" in line:
                print(f"  {line}")
        _, measured = self._run("benchmarks.training.bench_nanochat", "-", f"--measure={self._text / 'val.jsonl'}")
        bits, tokens, size = json.loads(measured.splitlines()[-1])
        print(f"  measured {tokens:,} tokens, {size:,} bytes")
        print(f"  bits per byte of the validation part: {bits:.4f}", flush=True)
        return float(bits)

    def _settings(self, steps: int) -> list[str]:
        return [*_ARCHITECTURE, *_BATCHES, *_NOTHING_ELSE, f"--num-iterations={steps}", "--device-type=cpu"]

    def _run(self, module: str, *settings: str) -> tuple[float, str]:
        """Run a module: seconds of wall time, and what it printed. Its compiled code is not kept for the next."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="race-compiled-") as compiled:
            paths = os.pathsep.join([str(self._checkout), str(PROJECT), os.environ.get("PYTHONPATH", "")])
            variables = {"NANOCHAT_BASE_DIR": str(self._base), "TORCHINDUCTOR_CACHE_DIR": compiled, "PYTHONPATH": paths}
            command = [self._python, "-m", module, *settings]
            done = subprocess.run(
                command,
                cwd=self._checkout,
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        if done.returncode:
            raise SystemExit(f"{module} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
        return time.monotonic() - began, done.stdout


def _write_parquet(text: Path, folder: Path) -> None:
    """The text in the files that nanochat reads, of which the last one is for validation."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    for number, part in enumerate(("train", "val")):
        documents = [json.loads(line)["text"] for line in (text / f"{part}.jsonl").read_text("utf8").splitlines()]
        table = pyarrow.table({"text": documents})
        parquet.write_table(table, folder / f"shard_{number:05d}.parquet", row_group_size=1024)


def _measure(text: Path) -> None:
    """Print bits per byte, tokens and bytes of the checkpoint in NANOCHAT_BASE_DIR, by an interpreter of nanochat."""
    import torch
    from nanochat.checkpoint_manager import load_model

    model, tokenizer, _ = load_model("base", torch.device("cpu"), phase="eval")
    start = tokenizer.get_bos_token_id()

    def encode(document: str) -> list[int]:
        ids: list[int] = tokenizer.encode(document)
        assert tokenizer.decode(ids) == document
        return [start, *ids]

    print(json.dumps(bits_of(model, encode, text)))


if __name__ == "__main__":
    main()
