"""Additions that a rule checks: a small model is tuned shortly, then learns from its own answers by GRPO, RLOO or RAFT.

python -m benchmarks.alignment.bench_verifiable OUT [--seeds 17 18 19] [--ways grpo rloo raft wide many] [--rounds 300]
    [--sft-epochs 20]

Prompts are the 100 additions of one-digit numbers in ten phrasings (`3+4`, `add 3 4`, …), of which a tenth is held out,
so that a held-out prompt is a known sum in another phrasing. An answer is right if it is the sum and nothing else (rule
`exact`); nothing else rewards. The base model has random weights: all it knows is from an SFT that stops early. Every
seed has its own base model, SFT and policy; what is measured are answers sampled at the temperature of the training,
which is 1 but for "many". What is in OUT already is taken as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.alignment.stages import base_model, options_of, spread
from corpus.config import InstructionsConfig
from corpus.instructions import instructions
from corpus.tokens.chat_template import SPECIAL_TOKENS
from tests.support.tokenizers import with_chat
from training.config import RlhfConfig, SftConfig
from training.rlhf import rlhf
from training.sft import sft

PHRASES = (
    "{}+{}", "{}+{}=", "{} + {}", "{} plus {}", "add {} {}", "sum {} {}", "{} and {}", "({}+{})", "+ {} {}", "{}, {}",
)  # fmt: skip
MODEL: dict[str, Any] = {"family": "llama", "layers": 2, "width": 64, "heads": 2, "positions": 32}
SFT: dict[str, Any] = {
    "global_batch_examples": 64, "max_length": 32, "answer_max_tokens": 4,
    "heldout_limit": 100, "answers_limit": 100, "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0},
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "rollout_prompts": 512, "minibatch_answers": 64, "answer_max_tokens": 4, "max_prompt_tokens": 24,
    "kl_coef": 0.0, "heldout_prompts": 100, "heldout_answers": 4,
    "optimizer": {"learning_rate": 2.0e-4, "weight_decay": 0.0}, "schedule": {"decay": "linear", "warmup": "3 %"},
    "checkpoint_every": "1000 batches",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "answers_per_prompt": 8},
    "rloo": {"algorithm": "rloo", "answers_per_prompt": 8},
    "raft": {"algorithm": "raft", "answers_per_prompt": 8},
    # For a start that knows less: larger groups, in which more often one answer is right; ratios that may rise further,
    # so that unlikely answers stay in reach; a rate that falls to zero.
    "wide": {
        "algorithm": "grpo", "answers_per_prompt": 16, "minibatch_answers": 128, "whole_groups": True,
        "clip_ratio_high": 0.4, "optimizer": {"learning_rate": 6.0e-4, "weight_decay": 0.0},
        "schedule": {"decay": "linear", "warmup": "3 %", "final_share": 0.0},
    },
    # Four times as many prompts a round, of which each step sees 32, and answers nearer to the likeliest one.
    "many": {
        "algorithm": "grpo", "answers_per_prompt": 8, "rollout_prompts": 2048, "minibatch_answers": 256,
        "whole_groups": True, "clip_ratio_high": 0.4, "temperature": 0.5,
        "optimizer": {"learning_rate": 2.0e-4, "weight_decay": 0.0},
        "schedule": {"decay": "linear", "warmup": "10 %", "final_share": 0.0},
    },
}  # fmt: skip


def main() -> None:
    ways = {"nargs": "+", "choices": WAYS, "default": list(WAYS)}
    args, stages = options_of(__doc__, rounds=300, sft_epochs=20, sft_help="how much the model knows before", ways=ways)
    words = tokenizer_of_bytes()
    learnt = SFT | {"duration": f"{args.sft_epochs:g} epochs"}
    asked = stages.made("additions", instructions, _additions(args.out / "additions.json"))
    for seed in args.seeds:
        base = base_model(args.out / f"base_{seed}", words, MODEL, seed)
        start = stages.made(f"sft_{seed}", sft, SftConfig(**learnt, seed=seed), {"model": base, "instructions": asked})
        for way in args.ways:
            config = RlhfConfig.model_validate(SAMPLING | WAYS[way] | {"rollouts": args.rounds, "seed": seed})
            stages.made(f"{way}_{seed}", rlhf, config, {"model": start, "prompts": asked})
    print(f"| way | seeds | right before, % | right after, % | KL, nats an answer | seconds |\n|{'---|' * 6}")
    for way in args.ways:
        found = stages.figures(way, args.seeds)
        keys = (("verified_sft", 100.0), ("verified_rlhf", 100.0), ("kl_to_sft", 1.0), ("seconds", 1.0))
        cells = [spread([factor * one[key] for one in found]) for key, factor in keys]
        print(f"| {way} | {len(found)} | {' | '.join(cells)} |")


def _additions(path: Path) -> InstructionsConfig:
    sums = [
        {"instruction": phrase.format(one, other), "output": str(one + other)}
        for phrase in PHRASES
        for one in range(10)
        for other in range(10)
    ]
    path.write_text(json.dumps(sums), encoding="utf8")
    source = {"kind": "files", "paths": [str(path.resolve())], "verify": "exact"}
    return InstructionsConfig.model_validate({"read": [source], "heldout_share": 0.1})


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """A token a byte, and those of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_chat(tokenizer)


if __name__ == "__main__":
    main()
