"""Whether a reward model learns otherwise in bf16 than in fp32: several seeds in each, on one SFT model and its pairs.

python benchmarks/alignment/bench_reward_precision.py --store .stemma --out FOLDER [--seeds 17 18 19]
    [--precisions bf16 fp32]

Trains through `python -m training.reward_model` with the settings of configs/quickstart.yaml; what is in FOLDER already
is not trained again. Prints held-out accuracy, how the losses of two precisions part, and paired differences.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaluation.statistics.intervals import difference_of_paired_proportions, mcnemar_p_value, wilson
from training.chat.base import Chat, read_rows
from training.config import RewardModelConfig
from training.core.hardware import Hardware
from training.data.preferences import fitted_rankings
from training.train_modules.scorer import RewardModel, load_scorer, score_pairs

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True, help="a store with the quickstart's sft and preferences")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-finished", action="store_true", help="trains nothing")
    given = parser.parse_args()
    sft, preferences = (_newest(given.store, stage) for stage in ("sft", "preferences"))
    given.out.mkdir(parents=True, exist_ok=True)
    runs = [(precision, seed) for seed in given.seeds for precision in given.precisions]
    for precision, seed in runs if not given.only_finished else ():
        _train(given.out, sft, preferences, precision, seed, given.threads)
    rights = {}
    for precision, seed in runs:
        folder = given.out / f"{precision}-{seed}"
        if (folder / "model.safetensors").exists():
            for measured in ("bf16", "fp32"):
                rights[precision, seed, measured] = _right(folder, preferences, measured)
    for (precision, seed, measured), right in rights.items():
        share = wilson(int(right.sum()), len(right))
        print(
            f"trained in {precision}, seed {seed}, scored in {measured}: "
            f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%}) of {len(right)}"
        )
    for (one, first), (other, second) in itertools.combinations(rights.items(), 2):
        print(f"{_name(one)} less {_name(other)}: {_paired(first, second)}")
    curves = {f"{precision}-{seed}": _losses(given.out / f"{precision}-{seed}.err") for precision, seed in runs}
    for (one, mine), (other, theirs) in itertools.combinations(curves.items(), 2):
        common = min(len(mine), len(theirs))
        if common:
            apart = float(np.sqrt(np.mean((mine[:common] - theirs[:common]) ** 2)))
            print(f"training loss of {one} and {other}: {apart:.4f} apart (rms of the first {common} batches)")


def _newest(store: Path, stage: str) -> Path:
    return max(store.glob(f"{stage}/*/manifest.json"), key=lambda path: path.stat().st_mtime).parent


def _train(out: Path, sft: Path, preferences: Path, precision: str, seed: int, threads: int) -> None:
    folder = out / f"{precision}-{seed}"
    if folder.exists():
        return
    settings = {**yaml.safe_load(QUICKSTART.read_text(encoding="utf8"))["reward_model"], "seed": seed}
    config = out / f"{seed}.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf8")
    command = [sys.executable, "-m", "training.reward_model", "--config", str(config), "--out", str(folder)]
    command += ["--input", f"model={sft}", "--input", f"preferences={preferences}"]
    command += ["--launch", f"precision={precision}", "--launch", f"threads={threads}"]
    with (out / f"{precision}-{seed}.err").open("w") as told:
        subprocess.run(command, stderr=told, check=True, cwd=QUICKSTART.parents[1])


def _right(folder: Path, preferences: Path, precision: str) -> np.ndarray:
    """Which held-out pairs a model puts in the right order."""
    config = RewardModelConfig.model_validate(yaml.safe_load(QUICKSTART.read_text(encoding="utf8"))["reward_model"])
    chat = Chat.load(folder)
    model = RewardModel(load_scorer(folder, Hardware(torch.device("cpu"), bf16=precision == "bf16")))
    rows = read_rows(preferences / "heldout.jsonl", ("prompt", "chosen", "rejected"), config.heldout_limit)
    fitted = fitted_rankings(chat, rows, config.max_length, config.too_long)
    scores = score_pairs(model, fitted.examples, chat.pad)
    return scores[:, 0] > scores[:, 1]


def _paired(first: np.ndarray, second: np.ndarray) -> str:
    cells = [int(one.sum()) for one in (first & second, first & ~second, ~first & second, ~first & ~second)]
    found = difference_of_paired_proportions(*cells)
    return (
        f"{100 * found.value:+.1f} points ({100 * found.low:+.1f} to {100 * found.high:+.1f}), "
        f"{cells[1] + cells[2]} pairs told apart, p {mcnemar_p_value(cells[1], cells[2]):.2g}"
    )


def _name(run: tuple[Any, ...]) -> str:
    return f"{run[0]}-{run[1]} scored in {run[2]}"


def _losses(path: Path) -> np.ndarray:
    """The training loss of each batch, as a run told it."""
    found = {}
    for line in path.read_text(encoding="utf8").splitlines() if path.exists() else ():
        if line.startswith('{"kind": "metric"') and line.endswith("}"):
            told = json.loads(line)
            if "train/loss" in told["values"]:
                found[told["step"]] = float(told["values"]["train/loss"])
    return np.array([found[step] for step in sorted(found)])


if __name__ == "__main__":
    main()
