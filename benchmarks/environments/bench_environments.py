"""The calculator task: a small model that calls a calculator now and then learns from rewards that it pays.

python -m benchmarks.environments.bench_environments OUT [--seeds 17 18 19] [--rounds 100] [--sft-epochs 5] \
  [--threads 1]

A task is an exercise with two operands of up to two digits (`What is 86-39?`). The policy writes a call of the
calculator in JSON, reads its result, and answers; the reward is 1 where the answer is right, else 0. The base model
has random weights. Its first SFT shows calls alone, until it copies numbers without error; its second one shows a
habit: four in ten demonstrations call the calculator, the others give up. Every seed has its own base model, SFTs and
policy. Held-out exercises are drawn with other seeds; answers are sampled at temperature 1. Existing artifacts
in OUT are taken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.alignment.stages import base_model, options_of, spread
from corpus.config import InstructionsConfig
from corpus.instructions import instructions
from corpus.tokens.chat_template import SPECIAL_TOKENS
from tests.support.tokenizers import with_chat
from training.config import RlhfConfig, SftConfig
from training.rl.environments.calculator import Calculator, evaluate
from training.rlhf import rlhf
from training.sft import sft

DEMONSTRATIONS = {"calls": 4000, "habit": 2000}
CALLS = {"calls": 1.0, "habit": 0.4}
"""Share of the demonstrations that call the calculator."""
GIVEN_UP = "I do not know."
"""Answer of the others."""
EXERCISES: dict[str, Any] = {"digits": 2}
MODEL: dict[str, Any] = {"family": "llama", "layers": 2, "width": 96, "heads": 4, "positions": 128}
SFT: dict[str, Any] = {
    "global_batch_examples": 32, "max_length": 96, "answer_max_tokens": 24, "heldout_limit": 64, "answers_limit": 32,
    "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0}, "evaluate_every": "100 %", "watched_prompts": 0,
}  # fmt: skip
HABIT: dict[str, Any] = {"duration": "1 epoch", "optimizer": {"learning_rate": 5.0e-4, "weight_decay": 0.0}}
LEARNING: dict[str, Any] = {
    "environment": {
        "use": "calculator", "options": EXERCISES, "tasks": 4000,
        "max_turns": 3, "max_tokens": 80, "show_tools": False, "instances": 1,
    },
    "algorithm": "grpo", "answers_per_prompt": 8, "rollout_prompts": 128, "minibatch_answers": 64,
    "answer_max_tokens": 32, "max_prompt_tokens": 32, "kl_coef": 0.0, "scale_rewards": "none", "loss_mean": "token",
    "clip_ratio_high": 0.28, "refill_groups": 1, "heldout_prompts": 200,
    "optimizer": {"learning_rate": 5.0e-4, "weight_decay": 0.0}, "schedule": {"decay": "linear", "warmup": "3 %"},
    "checkpoint_every": "1000 batches",
}  # fmt: skip


def main() -> None:
    args, stages = options_of(__doc__, rounds=100, sft_epochs=5, sft_help="of calls alone")
    pairs = {}
    words = tokenizer_of(demonstrations("calls"))
    for kind in DEMONSTRATIONS:
        path = args.out / f"{kind}.jsonl"
        path.write_text(
            "".join(json.dumps({"messages": talk}) + "\n" for talk in demonstrations(kind)), encoding="utf8"
        )
        source = {"kind": "files", "paths": [str(path.resolve())]}
        read = InstructionsConfig.model_validate({"read": [source], "heldout_share": 0.05, "near_prompts": None})
        pairs[kind] = stages.made(f"instructions_{kind}", instructions, read)
    for seed in args.seeds:
        base = base_model(args.out / f"base_{seed}", words, MODEL, seed)
        learnt = SftConfig(**SFT, duration=f"{args.sft_epochs:g} epochs", seed=seed)
        able = stages.made(f"calls_{seed}", sft, learnt, {"model": base, "instructions": pairs["calls"]})
        learnt = SftConfig.model_validate(SFT | HABIT | {"seed": seed})
        start = stages.made(f"sft_{seed}", sft, learnt, {"model": able, "instructions": pairs["habit"]})
        config = RlhfConfig.model_validate(LEARNING | {"rollouts": args.rounds, "seed": seed})
        stages.made(f"calculator_{seed}", rlhf, config, {"model": start, "prompts": pairs["habit"]})
    print(table("calculator", stages.figures("calculator", args.seeds)))


def table(task: str, results: Sequence[Mapping[str, float]]) -> str:
    """Return a table of a task's figures: mean and spread over the seeds."""
    keys = (
        ("right before, %", "heldout_environment_sft", 100.0),
        ("right after, %", "heldout_environment_rlhf", 100.0),
        ("calls before", "tool_calls_sft", 1.0),
        ("calls after", "tool_calls_rlhf", 1.0),
        ("KL, nats per episode", "kl_to_sft", 1.0),
        ("seconds", "seconds", 1.0),
    )
    head = f"| task | seeds | {' | '.join(name for name, _, _ in keys)} |\n|{'---|' * (len(keys) + 2)}"
    cells = [spread([factor * figures[key] for figures in results]) for _, key, factor in keys]
    return f"{head}\n| {task} | {len(results)} | {' | '.join(cells)} |"


def demonstrations(kind: str) -> list[list[dict[str, str]]]:
    """Conversations of a kind of `DEMONSTRATIONS`, in our chat format, where a result is a message of the user."""
    draw = random.Random(0)
    talks = []
    for number in range(DEMONSTRATIONS[kind]):
        question = Calculator(**EXERCISES).reset({"number": number}, draw.getrandbits(40))
        expression = "".join(sign for sign in question if sign.isdigit() or sign in "+-*")
        value = str(evaluate(expression))
        if draw.random() >= CALLS[kind]:
            talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": GIVEN_UP}])
            continue
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        talk = (question, f"<tool_call>\n{call}\n</tool_call>", f"<tool_response>\n{value}\n</tool_response>", value)
        roles = ("user", "assistant") * 2
        talks.append([{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)])
    return talks


def tokenizer_of(talks: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each digit, learnt from conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for talk in talks for message in talk), trainer)
    return with_chat(tokenizer)


if __name__ == "__main__":
    main()
