"""What `rlhf` of the quickstart takes, at its size and in about a minute, for measuring time where no store is at hand.

The tokenizer, the prompts and the model's shape are the quickstart's; the model knows little, since it begins from
random weights and is tuned for sixty steps, after which answers end. The reward model is that model with a random
output layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.alignment.stages import Stages
from corpus.config import IngestConfig, InstructionsConfig, TokenizerConfig
from corpus.ingest import ingest
from corpus.instructions import instructions
from corpus.tokenizer import tokenizer
from infra.launch.config import LaunchConfig
from training.chat.base import Chat
from training.checkpoint.export import export
from training.config import ModelConfig, SftConfig
from training.core.hardware import prepare
from training.model.models import build, hf_config
from training.sft import sft
from training.train_modules.scorer import load_scorer

MODEL: dict[str, Any] = {"preset": "qwen3-4m", "tie_embeddings": False}
TUNING: dict[str, Any] = {
    "duration": "60 batches", "global_batch_examples": 16, "group_by_length": True, "max_length": 128,
    "heldout_limit": 16, "answers_limit": 16, "answer_max_tokens": 16, "evaluate_every": "100 %",
    "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0},
}  # fmt: skip


def rl_inputs(folder: Path, quickstart: dict[str, Any], launch: LaunchConfig) -> dict[str, Path]:
    """The inputs of `rlhf`, by name; what is in `folder` already is taken as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(folder, launch)
    text = {"kind": "docstrings", "limit_mb": 3}
    documents = stages.made("documents", ingest, IngestConfig.model_validate({"read": [text]}))
    vocabulary = TokenizerConfig(**quickstart["tokenizer"])
    words = stages.made("tokenizer", tokenizer, vocabulary, {"documents": documents})
    asked = stages.made("instructions", instructions, InstructionsConfig.model_validate(quickstart["instructions"]))
    base = folder / "base"
    if not (base / "config.json").exists():
        chat = Chat.load(words)
        fast: PreTrainedTokenizerFast = chat.tokenizer
        special = {name: getattr(fast, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        export(build(hf_config(ModelConfig(**MODEL), len(fast), special), 17), words, base)
    tuned = stages.made("sft", sft, SftConfig.model_validate(TUNING), {"model": base, "instructions": asked})
    reward = folder / "reward_model"
    if not (reward / "config.json").exists():
        export(load_scorer(tuned, prepare(launch), seed=1).model, tuned, reward)
    return {"model": tuned, "prompts": asked, "reward_model": reward}
