"""The search task: a small model that searches documents now and then learns from rewards that it pays.

python -m benchmarks.environments.bench_search OUT [--seeds 17 18 19] [--documents docs] [--rounds 25] [--threads 1]

A task asks for the word after two others in the documentation (`What comes after "decay begins"?`). The policy
writes a call of the search tool in JSON, reads the best of some 10,000 passages, and answers; the reward is 1 where the
answer has the next word, else 0. The base model begins with bigrams and induction heads (docs/training/recipes.md) and
has read no text. Its first SFT shows calls alone, a second one a habit: four in ten demonstrations search, the others
give up. Base model and first SFT are shared; each seed has a habit and a policy. A tenth of the tasks is in no
demonstration and no reward, and measures. Existing artifacts in OUT are taken.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.alignment.stages import Stages
from benchmarks.environments.bench_environments import table
from corpus.config import InstructionsConfig
from corpus.instructions import instructions
from corpus.tokens.chat_template import SPECIAL_TOKENS
from infra.launch.config import LaunchConfig
from tests.support.tokenizers import with_chat
from training.checkpoint.export import export
from training.config import ModelConfig, RlhfConfig, SftConfig
from training.core.hardware import prepare
from training.model.initial.bigrams import start_from_bigrams
from training.model.initial.induction import start_induction, unused_width
from training.model.models import build, hf_config
from training.model.ngram import Bigram
from training.rl.environments.search import Search, indexed
from training.rlhf import rlhf
from training.sft import sft

TASKS = 9000
CALLS = {"calls": 1.0, "habit": 0.4}
"""Share of the demonstrations that search, of one SFT and the other."""
FRAMES = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>', "<tool_response>\n",
    "\n</tool_response>", 'What comes after "',
)  # fmt: skip
QUESTION = 'What comes after "'
GIVEN_UP = "I do not know."
"""Answer of the others."""
PASSAGE = 60
"""Characters of a passage."""
MODEL: dict[str, Any] = {
    "family": "qwen3", "layers": 2, "width": 96, "heads": 2, "positions": 192, "tie_embeddings": False,
    "residual_init": "zero", "embedding_init": "bigram", "attention_init": "induction",
}  # fmt: skip
VOCABULARY = 512
SFT: dict[str, Any] = {
    "duration": "4 epochs", "global_batch_examples": 64, "max_length": 128, "answer_max_tokens": 24,
    "heldout_limit": 64, "answers_limit": 8, "group_by_length": True, "evaluate_every": "100 %", "watched_prompts": 0,
    "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0, "muon": {"learning_rate": 0.02}},
    "schedule": {"decay": "linear", "warmup": "5 %", "final_share": 0.05},
}  # fmt: skip
HABIT: dict[str, Any] = {
    "duration": "40 batches",
    "group_by_length": False,
    "optimizer": {"learning_rate": 3.0e-4, "weight_decay": 0.0},
}
LEARNING: dict[str, Any] = {
    "environment": {
        "use": "search", "max_turns": 3, "max_tokens": 96, "show_tools": False, "instances": 1,
    },
    "algorithm": "grpo", "answers_per_prompt": 8, "rollout_prompts": 128, "minibatch_answers": 64,
    "answer_max_tokens": 24, "max_prompt_tokens": 32, "temperature": 0.6,
    "kl_coef": 0.0, "scale_rewards": "none", "loss_mean": "token",
    "clip_ratio_high": 0.28, "refill_groups": 1, "heldout_prompts": 200,
    "optimizer": {"learning_rate": 4.0e-4, "weight_decay": 0.0}, "schedule": {"decay": "linear", "warmup": "3 %"},
    "checkpoint_every": "1000 batches",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--documents", type=Path, default=Path("docs"))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    stages = Stages(args.out, LaunchConfig(threads=args.threads, trainer="native", device="cpu", precision="fp32"))
    args.out.mkdir(parents=True, exist_ok=True)
    options = {"documents": str(args.documents.resolve()), "length": PASSAGE}
    tasks = tasks_of(options)
    rows = {
        "tasks": [[{"role": "user", "content": f'{QUESTION}{key}"?'}, {"role": "assistant", "content": following}]
                  for key, following, _ in tasks],
    } | {kind: demonstrations(kind, tasks) for kind in CALLS}  # fmt: skip
    pairs = {kind: instructions_of(stages, args.out / f"{kind}.jsonl", talks) for kind, talks in rows.items()}
    base = base_model(args.out / "base", rows["calls"], 1)
    able = stages.made("calls", sft, SftConfig.model_validate(SFT), {"model": base, "instructions": pairs["calls"]})
    for seed in args.seeds:
        learnt = SftConfig.model_validate(SFT | HABIT | {"seed": seed})
        start = stages.made(f"sft_{seed}", sft, learnt, {"model": able, "instructions": pairs["habit"]})
        environment = LEARNING["environment"] | {"options": options}
        settings = LEARNING | {"environment": environment, "rollouts": args.rounds, "seed": seed}
        config = RlhfConfig.model_validate(settings)
        stages.made(f"search_{seed}", rlhf, config, {"model": start, "prompts": pairs["tasks"]})
    print(table("search", stages.figures("search", args.seeds)))


def tasks_of(options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Pairs of words, the words that follow, and the passage that the tool returns for the first."""
    search, tasks = Search(**options), {}
    for text in passages(options):
        for key, following in re.findall(r"(?<= )(?=([a-z]{2,} [a-z]{2,}) ([a-z]{2,})[ .,;:])", text):
            if key not in tasks and f" {key} {following}" in (passage := search.search(key)):
                tasks[key] = (key, following, passage)
    return random.Random(0).sample(list(tasks.values()), min(TASKS, len(tasks)))


def passages(options: dict[str, Any]) -> list[str]:
    """The passages that the tool searches."""
    return list(indexed(options["documents"], options["length"], 20_000).passages)


def demonstrations(kind: str, tasks: list[tuple[str, str, str]]) -> list[list[dict[str, str]]]:
    """Conversations of a kind of `CALLS`, in our chat format, where a result is a message of the user."""
    draw, talks = random.Random(kind), []
    for key, following, passage in tasks:
        question = f'{QUESTION}{key}"?'
        if draw.random() >= CALLS[kind]:
            talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": GIVEN_UP}])
            continue
        call = json.dumps({"name": "search", "arguments": {"query": key}}, ensure_ascii=False)
        talk = (
            question, f"<tool_call>\n{call}\n</tool_call>", f"<tool_response>\n{passage}\n</tool_response>",
            f"{key} {following}",
        )  # fmt: skip
        roles = ("user", "assistant") * 2
        talks.append([{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)])
    return talks


def instructions_of(stages: Stages, path: Path, talks: list[list[dict[str, str]]]) -> Path:
    """The instructions of conversations, of which a tenth is held out."""
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf8")
    source = {"kind": "files", "paths": [str(path.resolve())]}
    read = InstructionsConfig.model_validate({"read": [source], "heldout_share": 0.1, "near_prompts": None})
    return stages.made(f"instructions_{path.stem}", instructions, read)


def tokenizer_of(talks: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """A tokenizer learnt from conversations, with a token each for what frames a call and a result."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((talk[2]["content"] for talk in talks), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FRAMES])
    return with_chat(tokenizer)


def base_model(folder: Path, talks: list[list[dict[str, str]]], seed: int) -> Path:
    """A model that knows the bigrams of the demonstrations, with induction heads."""
    if not (folder / "config.json").exists():
        words = tokenizer_of(talks)
        special = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        network = build(hf_config(ModelConfig(**MODEL), len(words), special), seed, zero_residual=True)
        texts = [words.apply_chat_template(talk, tokenize=False) for talk in talks]
        ids = np.concatenate([np.array(words.encode(text)) for text in texts])
        counted = Bigram([ids[None]], len(words), len(ids) - 1)
        hardware = prepare(LaunchConfig(device="cpu", precision="fp32"))
        start_from_bigrams(network, counted, hardware, seed, unused_width(network))
        start_induction(network, seed)
        export(network, None, folder)
        words.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
