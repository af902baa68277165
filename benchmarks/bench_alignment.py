"""Aligns one base model on one file of preference pairs in every way, several seeds each, and prints them side by side.

python -m benchmarks.bench_alignment MODEL PAIRS OUT [--seeds 17 18 19] [--ways dpo ipo kto orpo rloo]

MODEL: a Hugging Face folder of a base model with the chat tokens, such as the pretrain artifact of the quickstart.
PAIRS: a file of preferences whose records also have a field `output` to tune on first, such as rasbt's
instruction-data-with-preference (LLMs-from-scratch, chapter 7). What is in OUT already is taken as it is. SFT, the
reward model and the judge (another seed's) are made once; all ways begin at the same SFT model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from corpus.config import InstructionsConfig, PreferencesConfig
from corpus.instructions import instructions
from corpus.preferences import preferences
from infra.config import StageConfig
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PreferenceTuningConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.preference_tuning import preference_tuning
from training.reward_model import reward_model
from training.rlhf import rlhf
from training.sft import sft

HELDOUT_SHARE = 0.1
SFT = {
    "duration": "4 epochs", "global_batch_examples": 16, "group_by_length": True, "max_length": 256,
    "answer_max_tokens": 48, "answers_limit": 64, "optimizer": {"learning_rate": 5.0e-4, "weight_decay": 0.0},
}  # fmt: skip
REWARD = {
    "duration": "2 epochs", "global_batch_pairs": 16, "group_by_length": True, "max_length": 256,
    "optimizer": {"learning_rate": 2.0e-4, "weight_decay": 0.0},
}  # fmt: skip
TUNING: dict[str, Any] = {
    "duration": "2 epochs", "global_batch_pairs": 16, "group_by_length": True, "max_length": 256,
    "answer_max_tokens": 48, "heldout_prompts": 112, "optimizer": {"learning_rate": 5.0e-5, "weight_decay": 0.0},
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "rollouts": 20, "rollout_prompts": 64, "minibatch_answers": 32, "answers_per_prompt": 4, "answer_max_tokens": 48,
    "max_prompt_tokens": 192, "heldout_prompts": 112, "optimizer": {"learning_rate": 1.0e-4, "weight_decay": 0.0},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo"},
    "ipo": {"loss": "ipo"},
    "kto": {"loss": "kto"},
    "orpo": {"loss": "orpo"},
    "rloo": {},
}
SHOWN = {
    "dpo": ("win_rate", "margin", "chosen_rise", "kl_to_reference", "judge_gain", "judge_gain_equal_length"),
    "rloo": ("reward_gain", "kl_to_sft", "judge_gain", "judge_gain_equal_length"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    launch = LaunchConfig(threads=args.threads, trainer="native")

    def made(name: str, function: Callable[..., Any], config: StageConfig, inputs: Mapping[str, Path]) -> Path:
        """The artifact of one stage, with its figures in figures.json."""
        out = args.out / name
        if not (out / "figures.json").exists():
            out.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            result = function(config, inputs, out, Run(args.out / "work" / name, launch))
            took = time.monotonic() - began
            figures = {**result.figures, "seconds": took}
            (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf8")
            print(f"{name}: {result.headline} ({took:.0f} s)", flush=True)
        return out

    read = [{"kind": "files", "paths": [str(args.pairs.resolve())]}]
    split = {"read": read, "heldout_share": HELDOUT_SHARE}
    asked = made("instructions", instructions, InstructionsConfig.model_validate(split), {})
    pairs = made("preferences", preferences, PreferencesConfig.model_validate(split), {})
    start = made("sft", sft, SftConfig.model_validate(SFT), {"model": args.model, "instructions": asked})
    of_pairs = {"model": start, "preferences": pairs}
    judge = made("judge", reward_model, RewardModelConfig.model_validate(REWARD | {"seed": 2}), of_pairs)
    found: dict[str, list[dict[str, float]]] = {}
    for way in args.ways:
        for seed in args.seeds:
            name, settings = f"{way}_{seed}", {**WAYS[way], "seed": seed}
            if way == "rloo":
                scorer = made("reward_model", reward_model, RewardModelConfig.model_validate(REWARD), of_pairs)
                inputs = {"model": start, "prompts": asked, "reward_model": scorer, "judge": judge}
                out = made(name, rlhf, RlhfConfig.model_validate(SAMPLING | settings), inputs)
            else:
                config = PreferenceTuningConfig.model_validate(TUNING | settings)
                out = made(name, preference_tuning, config, {**of_pairs, "judge": judge})
            found.setdefault(way, []).append(json.loads((out / "figures.json").read_text(encoding="utf8")))
    for way, runs in found.items():
        cells = [f"{key} {_spread([run[key] for run in runs])}" for key in SHOWN.get(way, SHOWN["dpo"])]
        print(f"{way} ({len(runs)} seeds): {', '.join(cells)}")


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"


if __name__ == "__main__":
    main()
