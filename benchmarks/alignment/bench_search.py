"""The search task: a small model that searches documents now and then learns from rewards that it pays.

python -m benchmarks.alignment.bench_search OUT [--seeds 17 18 19] [--documents docs] [--rounds 40] [--threads 1]

A task is a line of this project's documentation without its rarest word (`Which word is missing? A decay begins at the
____ in its first`). The policy writes a call of the search tool in JSON with a query, reads the best of some 4,000
passages, and answers with the words before the gap and the missing one; the reward is 1 where the last word is right,
else 0. The base model begins with bigrams and induction heads (docs/training/recipes.md) and has read no text. Its
first SFT shows calls alone, a second one a habit: four in ten demonstrations search, the others give up. Lines of a
tenth of the passages are held out from demonstrations and rewards; answers are sampled at temperature 1. Every seed has
its own base model, SFTs and policy. Existing artifacts in OUT are taken.
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

from benchmarks.alignment.stages import Stages, spread
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
from training.rl.environments.search import Search
from training.rlhf import rlhf
from training.sft import sft

DEMONSTRATIONS = {"calls": 4000, "habit": 1500}
CALLS = {"calls": 1.0, "habit": 0.4}
"""Share of the demonstrations that search."""
FRAMES = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>', "<tool_response>\n",
    "\n</tool_response>", "____", "Which word is missing?",
)  # fmt: skip
GIVEN_UP = "I do not know."
"""Answer of the others."""
PASSAGE = 140
"""Characters of a passage."""
MODEL: dict[str, Any] = {
    "family": "qwen3", "layers": 3, "width": 96, "heads": 2, "positions": 320, "tie_embeddings": False,
    "residual_init": "zero", "embedding_init": "bigram", "attention_init": "induction",
}  # fmt: skip
VOCABULARY = 1024
SFT: dict[str, Any] = {
    "duration": "2 epochs", "global_batch_examples": 32, "max_length": 288, "answer_max_tokens": 80,
    "heldout_limit": 64, "answers_limit": 8, "group_by_length": True, "evaluate_every": "100 %", "watched_prompts": 0,
    "optimizer": {"learning_rate": 1.0e-3, "embedding_scale": 3, "weight_decay": 0.0, "muon": {"learning_rate": 0.01}},
    "schedule": {"decay": "linear", "warmup": "5 %", "final_share": 0.05},
}  # fmt: skip
HABIT: dict[str, Any] = {"duration": "1 epoch", "optimizer": {"learning_rate": 3.0e-4, "weight_decay": 0.0}}
LEARNING: dict[str, Any] = {
    "environment": {
        "use": "search", "tasks": 4000, "max_turns": 3, "max_tokens": 240, "show_tools": False, "instances": 1,
    },
    "algorithm": "grpo", "answers_per_prompt": 8, "rollout_prompts": 128, "minibatch_answers": 64,
    "answer_max_tokens": 88, "max_prompt_tokens": 80, "kl_coef": 0.0, "scale_rewards": "none", "loss_mean": "token",
    "clip_ratio_high": 0.28, "refill_groups": 1, "heldout_prompts": 200,
    "optimizer": {"learning_rate": 4.0e-4, "weight_decay": 0.0}, "schedule": {"decay": "linear", "warmup": "3 %"},
    "checkpoint_every": "1000 batches",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--documents", type=Path, default=Path("docs"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    stages = Stages(args.out, LaunchConfig(threads=args.threads, trainer="native", device="cpu", precision="fp32"))
    args.out.mkdir(parents=True, exist_ok=True)
    options = {"documents": str(args.documents.resolve()), "length": PASSAGE}
    pairs = {}
    for kind in DEMONSTRATIONS:
        path = args.out / f"{kind}.jsonl"
        path.write_text(
            "".join(json.dumps({"messages": talk}) + "\n" for talk in demonstrations(kind, options)), encoding="utf8"
        )
        source = {"kind": "files", "paths": [str(path.resolve())]}
        read = InstructionsConfig.model_validate({"read": [source], "heldout_share": 0.05, "near_prompts": None})
        pairs[kind] = stages.made(f"instructions_{kind}", instructions, read)
    talks = demonstrations("calls", options)
    words = tokenizer_of(talks)
    for seed in args.seeds:
        base = base_model(args.out / f"base_{seed}", words, talks, seed)
        learnt = SftConfig.model_validate(SFT | {"seed": seed})
        able = stages.made(f"calls_{seed}", sft, learnt, {"model": base, "instructions": pairs["calls"]})
        learnt = SftConfig.model_validate(SFT | HABIT | {"seed": seed})
        start = stages.made(f"sft_{seed}", sft, learnt, {"model": able, "instructions": pairs["habit"]})
        environment = LEARNING["environment"] | {"options": options}
        settings = LEARNING | {"environment": environment, "rollouts": args.rounds, "seed": seed}
        config = RlhfConfig.model_validate(settings)
        stages.made(f"search_{seed}", rlhf, config, {"model": start, "prompts": pairs["habit"]})
    results = stages.figures("search", args.seeds)
    keys = (
        ("right before, %", "heldout_environment_sft", 100.0),
        ("right after, %", "heldout_environment_rlhf", 100.0),
        ("calls before", "tool_calls_sft", 1.0),
        ("calls after", "tool_calls_rlhf", 1.0),
        ("KL, nats per episode", "kl_to_sft", 1.0),
        ("seconds", "seconds", 1.0),
    )
    print(f"| task | seeds | {' | '.join(name for name, _, _ in keys)} |\n|{'---|' * (len(keys) + 2)}")
    cells = [spread([factor * figures[key] for figures in results]) for _, key, factor in keys]
    print(f"| search | {len(results)} | {' | '.join(cells)} |")


def demonstrations(kind: str, options: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Conversations of a kind of `DEMONSTRATIONS`, in our chat format, where a result is a message of the user."""
    draw, search = random.Random(0), Search(**options)
    talks = []
    for number in range(DEMONSTRATIONS[kind]):
        question = search.reset({"number": number, "split": "train"}, draw.getrandbits(40))
        if draw.random() >= CALLS[kind]:
            talks.append([{"role": "user", "content": question}, {"role": "assistant", "content": GIVEN_UP}])
            continue
        sentence = question.partition("? ")[2]
        passage = search.search(sentence)
        call = json.dumps({"name": "search", "arguments": {"query": sentence}}, ensure_ascii=False)
        answer = before_the_gap(sentence) + missing_word(sentence, passage)
        talk = (question, f"<tool_call>\n{call}\n</tool_call>", f"<tool_response>\n{passage}\n</tool_response>", answer)
        roles = ("user", "assistant") * 2
        talks.append([{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)])
    return talks


def before_the_gap(sentence: str) -> str:
    """The last two words before the gap, with the space that follows them."""
    before = re.search(r"(?:\S+\s+){0,2}\S*$", sentence.partition("____")[0])
    assert before is not None
    return before.group()


def missing_word(sentence: str, passage: str) -> str:
    """The word in the gap of a sentence, as a passage has it; "nothing" if it is another passage."""
    pattern = re.escape(sentence).replace("____", r"(\w+)", 1).replace("____", r"\w+")
    filled = re.search(pattern, passage)
    return filled.group(1) if filled else "nothing"


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
    tokenizer.train_from_iterator((talk[0]["content"] for talk in talks), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FRAMES])
    return with_chat(tokenizer)


def base_model(folder: Path, words: PreTrainedTokenizerFast, talks: list[list[dict[str, str]]], seed: int) -> Path:
    """A model that knows the bigrams of the demonstrations, with induction heads."""
    if not (folder / "config.json").exists():
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
