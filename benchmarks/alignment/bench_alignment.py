"""Every way to align a model, on real data and from one base model, over several seeds, as three tables.

python -m benchmarks.alignment.bench_alignment MODEL OUT [--seeds 17 18 19] [--ways dpo ipo kto orpo ppo rloo grpo raft]
    [--threads 1] [--only-finished]

MODEL: a Hugging Face folder of a base model with the chat tokens, such as the pretrain artifact of the quickstart. Each
seed has models of its own:

    instructions   SFT on Alpaca's (alpaca_en_demo) and on rasbt's (LLMs-from-scratch, chapter 7), each by itself
    reward models  on Anthropic's dialogues (hh_rlhf) and on rasbt's preference pairs, and a judge of another seed
    ways           from the SFT on rasbt's instructions, on its pairs or its prompts, beside the best of n answers

A judge trains nothing. What it gives is told as a share of what it finds between the chosen and the rejected answers of
the held-out pairs, so that judges of different scales compare. What is in OUT already is taken as it is: several
commands can share the seeds out, and the last one prints all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.alignment.stages import Figures, Stages, spread
from benchmarks.evaluation.bench_eval import DATA
from corpus.config import InstructionsConfig, PreferencesConfig
from corpus.instructions import instructions
from corpus.preferences import preferences
from infra.launch.config import LaunchConfig
from training.config import PreferenceTuningConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.preference_tuning import preference_tuning
from training.reward_model import reward_model
from training.rlhf import rlhf
from training.sft import sft

RASBT = DATA / "rasbt_sft_dpo" / "ch07"
FILES = {
    "alpaca": DATA / "llama_factory_sft" / "alpaca_en_demo.json",
    "hh_rlhf": DATA / "hh_rlhf" / "test.jsonl.gz",
    "rasbt": RASBT / "04_preference-tuning-with-dpo" / "instruction-data-with-preference.json",
}
HELDOUT_SHARE = 0.1
# Rates and lengths are those of the quickstart's stages, whose model this is.
SFT: dict[str, Any] = {
    "duration": "2 epochs", "global_batch_examples": 32, "group_by_length": True, "max_length": 256,
    "answer_max_tokens": 48, "answers_limit": 64, "evaluate_every": "50 %",
    "optimizer": {
        "learning_rate": 6.0e-4, "embedding_scale": 3, "weight_decay": 0.0,
        "muon": {"learning_rate": 0.01, "iterations": 3},
    },
    "schedule": {"decay": "linear", "warmup": "5 %", "final_share": 0.05},
}  # fmt: skip
REWARD: dict[str, Any] = {
    "global_batch_pairs": 32, "group_by_length": True, "evaluate_every": "50 %",
    "optimizer": {"learning_rate": 5.0e-4, "embedding_scale": 8, "weight_decay": 0.0},
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    # Dialogues of people with an assistant are long: one reading, and of longer ones the end.
    "hh_rlhf": {"duration": "1 epoch", "max_length": 160},
    "rasbt": {"duration": "2 epochs", "max_length": 256},
}
TUNING: dict[str, Any] = {
    "duration": "2 epochs", "global_batch_pairs": 16, "group_by_length": True, "max_length": 256, "temperature": 0.7,
    "evaluate_every": "50 %", "answer_max_tokens": 48, "heldout_prompts": 112,
    "optimizer": {"learning_rate": 5.0e-5, "weight_decay": 0.0},
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "rollouts": 10, "rollout_prompts": 128, "minibatch_answers": 64, "epochs": 2, "answer_max_tokens": 48,
    "max_prompt_tokens": 192, "temperature": 0.7, "kl_coef": 0.1, "heldout_prompts": 112,
    "optimizer": {"learning_rate": 2.5e-4, "weight_decay": 0.0},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo"},
    "ipo": {"loss": "ipo"},
    "kto": {"loss": "kto"},
    "orpo": {"loss": "orpo"},
    "ppo": {"algorithm": "ppo"},
    "rloo": {"algorithm": "rloo", "answers_per_prompt": 8, "best_of": 16},
    "grpo": {"algorithm": "grpo", "answers_per_prompt": 8},
    # Of 128 answers it keeps 16.
    "raft": {"algorithm": "raft", "answers_per_prompt": 8, "minibatch_answers": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-finished", action="store_true", help="trains nothing")
    given = parser.parse_args()
    if missing := [str(file) for file in FILES.values() if not file.exists()]:
        sys.exit(f"expected {', '.join(missing)}")
    stages = Stages(given.out, LaunchConfig(threads=given.threads, trainer="native", device="cpu"), given.only_finished)
    for seed in given.seeds:
        _align(stages, given.model, seed, given.ways)
    _print(stages, given.seeds, given.ways)


def _align(stages: Stages, base: Path, seed: int, ways: list[str]) -> None:
    def split(name: str) -> dict[str, Any]:
        return {"read": [{"kind": "files", "paths": [str(FILES[name])]}], "heldout_share": HELDOUT_SHARE}

    def tuned(name: str) -> tuple[Path, Path]:
        """The instructions, and the model that learnt them."""
        config = InstructionsConfig.model_validate(split(name))
        asked = stages.made(f"instructions_{name}", instructions, config)
        inputs = {"model": base, "instructions": asked}
        return asked, stages.made(f"sft_{name}_{seed}", sft, SftConfig(**SFT, seed=seed), inputs)

    def scorer(kind: str, name: str, inputs: Mapping[str, Path], drawn_by: int) -> Path:
        config = RewardModelConfig(**REWARD, **SIZES[name], seed=drawn_by)
        return stages.made(f"{kind}_{seed}", reward_model, config, inputs)

    def paired(name: str) -> Path:
        return stages.made(f"preferences_{name}", preferences, PreferencesConfig.model_validate(split(name)))

    asked, start = tuned("rasbt")
    of_pairs = {"model": start, "preferences": paired("rasbt")}
    judge = scorer("judge", "rasbt", of_pairs, seed + 1000)
    rewards = {"reward_model": scorer("reward_rasbt", "rasbt", of_pairs, seed), "judge": judge}
    for way in ways:
        settings = WAYS[way] | {"seed": seed}
        if "loss" in settings:
            tuning = PreferenceTuningConfig.model_validate(TUNING | settings)
            stages.made(f"{way}_{seed}", preference_tuning, tuning, {**of_pairs, "judge": judge})
        else:
            sampling = RlhfConfig.model_validate(SAMPLING | settings)
            stages.made(f"{way}_{seed}", rlhf, sampling, {"model": start, "prompts": asked, **rewards})
    _, helpful = tuned("alpaca")
    scorer("reward_hh_rlhf", "hh_rlhf", {"model": helpful, "preferences": paired("hh_rlhf")}, seed)


def _print(stages: Stages, seeds: list[int], ways: list[str]) -> None:
    """Means and standard deviations over the seeds that are there."""

    def row(label: str, found: list[Figures], cells: Mapping[str, float]) -> None:
        if found:
            told = [spread([factor * one[key] for one in found]) for key, factor in cells.items()]
            print(f"| {label} | {len(found)} | {' | '.join(told)} |")

    _head("SFT", "held-out loss before", "after", "answers that end, %", "seconds")
    for name in ("alpaca", "rasbt"):
        keys = {"heldout_loss_base": 1.0, "heldout_loss_sft": 1.0, "ends_share_sft": 100.0, "seconds": 1.0}
        row(name, stages.figures(f"sft_{name}", seeds), keys)
    _head("reward model", "right, %", "who takes the longer is, %", "calibration error", "margin", "seconds")
    for name in ("hh_rlhf", "rasbt"):
        keys = {"heldout_accuracy": 100.0, "chosen_longer": 100.0, "calibration_error": 1.0, "margin": 1.0}
        row(name, stages.figures(f"reward_{name}", seeds), {**keys, "seconds": 1.0})

    _head("way", "held-out pairs won, %", "margin, nats", "KL, nats", "reward", "judge, %", "tokens", "seconds")
    between = {seed: found[0]["margin"] for seed in seeds if (found := stages.figures("judge", [seed]))}
    for way in ways:
        every = {seed: found[0] for seed in seeds if (found := stages.figures(way, [seed]))}
        for seed, one in every.items():
            one["judge_share"] = one["judge_gain"] / between[seed]
        found = list(every.values())
        if found and "win_rate" in found[0]:
            first = [spread([100 * one["win_rate"] for one in found]), spread([one["margin"] for one in found])]
            kl, gain = "kl_to_reference", "–"
        elif found:
            first, kl = ["–", "–"], "kl_to_sft"
            gain = spread([one["reward_gain"] for one in found])
        else:
            continue
        share = spread([100 * one["judge_share"] for one in found])
        tokens = next(key for key in ("answer_tokens_rlhf", "answer_tokens_policy") if key in found[0])
        last = [spread([one[key] for one in found]) for key in (tokens, "seconds")]
        cells = [*first, spread([one[kl] for one in found]), gain, share, *last]
        print(f"| {way} | {len(found)} | {' | '.join(cells)} |")
    # Of the model before, so that one of the ways is enough to tell it.
    drawn = {
        seed: found[0]
        for seed in seeds
        for way in ways
        if (found := stages.figures(way, [seed])) and "best_of_1_reward" in found[0]
    }
    for n in (4, 16) if drawn else ():

        def gains(by: str, n: int = n) -> list[float]:
            return [one[f"best_of_{n}_{by}"] - one[f"best_of_1_{by}"] for one in drawn.values()]

        shares = [100 * gain / between[seed] for seed, gain in zip(drawn, gains("judge"), strict=True)]
        kl = f"{next(iter(drawn.values()))[f'best_of_{n}_kl']:.3g}"
        print(f"| best of {n} | {len(drawn)} | – | – | {kl} | {spread(gains('reward'))} | {spread(shares)} | – | – |")


def _head(*columns: str) -> None:
    titles = [columns[0], "seeds", *columns[1:]]
    print(f"\n| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")


if __name__ == "__main__":
    main()
